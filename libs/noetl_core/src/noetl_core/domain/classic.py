"""The classic dialect (`noetl.io/v1`) as a tree of the current one; docs/classic.md has the table.

Each piece is converted on its own, so a document may mix the two. Every node keeps the place of the
one it came from: what is wrong is reported where the user wrote it. What has no counterpart is an
error; keys that neither dialect knows stay where they are, for the parser to report.
"""

from collections.abc import Callable, Iterator

from noetl_core.domain.classic_step import StepImporter, is_classic_step, is_classic_task
from noetl_core.domain.reader import Report
from noetl_core.domain.tools import is_raw
from noetl_core.domain.tree_edit import Draft, empty_at, list_at, text_at, text_of, with_names
from noetl_core.domain.yaml_tree import Mapping, Node, Sequence

CLASSIC_API_VERSION = "noetl.io/v1"
API_VERSION = "noetl.io/v2"

_HEAD_KEYS = ("name", "path", "description", "labels", "tags", "version")

_RESULT_NAMES = {
    "result": "output",
    "this": "output",
    "response": "output",
    "data": "output.data",
}
"""What templates that run after the tool call its result."""


def is_classic(tree: Node) -> bool:
    """Whether the document, or a piece of it, is in the classic dialect."""
    if not isinstance(tree, Mapping):
        return False
    return (
        text_of(tree.items.get("apiVersion")) == CLASSIC_API_VERSION
        or any(is_classic_step(step) for step in _entries(tree, "workflow"))
        or any(is_classic_task(task) for task in _entries(tree, "workbook"))
    )


def modernise(tree: Node, report: Report) -> Node:
    """The same playbook in the current dialect."""
    if not isinstance(tree, Mapping):
        return tree
    draft = Draft(tree)
    version = draft.get("apiVersion")
    is_old = version is None or text_of(version) == CLASSIC_API_VERSION
    if is_old:
        draft.put("apiVersion", text_at(version or tree, API_VERSION))
    _convert_head(draft)
    importer = StepImporter(report)
    _convert_each(draft, "workbook", importer.workbook_entry)
    _convert_each(draft, "workflow", importer.step)
    if is_old:
        _start_at_start(draft)
        _end_at_end(draft)
    return _with_current_names(draft.finished())


def _entries(tree: Mapping, name: str) -> Iterator[Mapping]:
    node = tree.items.get(name)
    items = node.items if isinstance(node, Sequence) else []
    return (item for item in items if isinstance(item, Mapping))


def _convert_each(draft: Draft, name: str, convert: Callable[[Mapping], Node]) -> None:
    node = draft.get(name)
    if isinstance(node, Sequence):
        items = [convert(item) if isinstance(item, Mapping) else item for item in node.items]
        draft.put(name, list_at(node, items))


def _convert_head(draft: Draft) -> None:
    """`name` and `path` at the top are metadata; a version of one's own is a label."""
    if "metadata" not in draft.items and "name" in draft.items:
        head = empty_at(draft.key("name"))
        draft.move(_HEAD_KEYS, head)
        draft.put("metadata", head.finished())
    metadata = draft.get("metadata")
    if isinstance(metadata, Mapping) and "version" in metadata.items:
        head = Draft(metadata)
        labels = head.get("labels")
        merged = Draft(labels) if isinstance(labels, Mapping) else empty_at(head.key("version"))
        head.move(["version"], merged)
        head.put("labels", merged.finished())
        draft.put("metadata", head.finished())


def _start_at_start(draft: Draft) -> None:
    """A classic playbook begins at `start`, wherever that stands."""
    names = [text_of(step.items.get("step")) for step in _entries(draft.finished(), "workflow")]
    executor = draft.get("executor")
    if "start" not in names or names[0] == "start" or executor is not None:
        return
    place = draft.key("workflow")
    spec, top = empty_at(place), empty_at(place)
    spec.put("entry_step", text_at(place, "start"))
    top.put("spec", spec.finished())
    draft.put("executor", top.finished())


def _end_at_end(draft: Draft) -> None:
    """A classic playbook may go to `end` without having that step."""
    workflow = draft.get("workflow")
    steps = list(_entries(draft.finished(), "workflow"))
    if not isinstance(workflow, Sequence) or any(_is_called(step, "end") for step in steps):
        return
    places = [arc for step in steps for arc in _arcs(step) if _is_called(arc, "end")]
    if places:
        end = empty_at(places[0])
        end.put("step", text_at(places[0], "end"))
        draft.put("workflow", list_at(workflow, [*workflow.items, end.finished()]))


def _is_called(node: Mapping, name: str) -> bool:
    return text_of(node.items.get("step")) == name


def _arcs(step: Mapping) -> Iterator[Mapping]:
    following = step.items.get("next")
    return _entries(following, "arcs") if isinstance(following, Mapping) else iter(())


def _with_current_names(tree: Mapping) -> Mapping:
    """`vars` is `ctx`; after the tool, `result` and its like are `output`. Own names stay."""
    own = frozenset(_own_names(tree))
    variables = {} if "vars" in own else {"vars": "ctx"}
    results = {k: v for k, v in _RESULT_NAMES.items() if k not in own} | variables
    draft = Draft(tree)
    for name in ("workbook", "workflow"):
        _convert_each(draft, name, lambda node: _with_names_in_step(node, variables, results))
    return draft.finished()


def _with_names_in_step(step: Mapping, variables: dict[str, str], results: dict[str, str]) -> Node:
    draft = Draft(step)
    for name, node in draft.items.items():
        if name in {"set", "sink", "next"}:
            draft.items[name] = with_names(node, results)
        elif name == "tool":
            draft.items[name] = _with_names_in_tool(node, variables)
        else:
            draft.items[name] = with_names(node, variables)
    return draft.finished()


def _with_names_in_tool(node: Node, names: dict[str, str]) -> Node:
    if isinstance(node, Sequence):
        return list_at(node, [_with_names_in_tool(each, names) for each in node.items])
    if not isinstance(node, Mapping):
        return node
    draft = Draft(node)
    kind = text_of(node.items.get("kind")) or ""
    for name, value in node.items.items():
        draft.items[name] = value if is_raw(kind, name) else with_names(value, names)
    return draft.finished()


def _own_names(tree: Mapping) -> Iterator[str]:
    """Names that mean something of the playbook's own wherever they stand."""
    workload = tree.items.get("workload")
    if isinstance(workload, Mapping):
        yield from workload.items
    for step in _entries(tree, "workflow"):
        loop = step.items.get("loop")
        iterator = loop.items.get("iterator") if isinstance(loop, Mapping) else None
        yield from filter(None, (text_of(step.items.get("step")), text_of(iterator)))
        for holder in (step, *_arcs(step)):
            for name in ("input", "set"):
                node = holder.items.get(name)
                if isinstance(node, Mapping):
                    yield from (key.removeprefix("ctx.") for key in node.items)
