"""The steps and workbook tasks of the classic dialect, as the current one writes them."""

from noetl_core.domain.classic_next import INPUTS, is_classic_next, merged_inputs, modern_next
from noetl_core.domain.reader import Report
from noetl_core.domain.template import nearest
from noetl_core.domain.tools import TOOLS
from noetl_core.domain.tree_edit import (
    Draft,
    empty_at,
    expression_of,
    list_at,
    text_at,
    text_of,
)
from noetl_core.domain.yaml_tree import Mapping, Node, Scalar, Sequence, describe

_STEP_KEYS = (
    *("step", "desc", "spec", "input", "loop", "tool", "retry", "sink", "output", "set", "next"),
    *("type", "name", "save", "vars"),
)
_LOOP_KEYS = ("collection", "element", "mode", "concurrency", "chunk_size")
_CREDENTIAL_KEYS = ("connection", "credential")
_SINK_MODES = {"insert": "append", "overwrite": "replace"}
_NO_TOOL = ("start", "end", "router")
"""Kinds of the steps that only say where a playbook begins, ends or branches."""

_WITHOUT_BODY = ("GET", "HEAD", "DELETE")


def is_classic_step(node: Mapping) -> bool:
    items = node.items
    loop = items.get("loop")
    return (
        is_classic_task(node)
        or ("name" in items and "step" not in items)
        or any(name in items for name in ("save", "vars"))
        or (isinstance(loop, Mapping) and any(name in loop.items for name in _LOOP_KEYS))
        or is_classic_next(items.get("next"))
    )


def is_classic_task(node: Mapping) -> bool:
    kind = node.items.get("tool", node.items.get("type"))
    return text_of(kind) is not None or any(name in node.items for name in ("args", "with"))


class StepImporter:
    """Converts each piece on its own; a piece of the current dialect stays as it is."""

    def __init__(self, report: Report) -> None:
        self._report = report

    def workbook_entry(self, node: Mapping) -> Node:
        draft = Draft(node)
        kind = self._kind(draft)
        if kind is not None:
            tool = empty_at(kind)
            rest = [name for name in draft.items if name not in {"name", "desc"}]
            draft.move(rest, tool)
            tool.put("kind", kind)
            self._request_data(tool)
            draft.put("tool", self._task(tool.finished()), key=kind)
        return draft.finished()

    def step(self, node: Mapping) -> Node:
        draft = Draft(node)
        if "step" not in draft.items and "name" in draft.items:
            draft.put("step", draft.items["name"], key=draft.key("name"))
            if "workbook" not in {text_of(draft.get("tool")), text_of(draft.get("type"))}:
                draft.take("name")
        draft.rename(self._report, "save", "sink")
        self._tool(draft)
        merged_inputs(self._report, draft)
        self._loop(draft)
        self._retry(draft)
        self._sink(draft)
        self._vars(draft)
        self._next(draft)
        return draft.finished()

    def _kind(self, draft: Draft) -> Node | None:
        """The kind of a tool whose fields stand beside it, taken out."""
        name = "tool" if "tool" in draft.items else "type"
        return draft.take(name) if text_of(draft.get(name)) is not None else None

    def _tool(self, draft: Draft) -> None:
        kind = self._kind(draft)
        if kind is None:
            node = draft.get("tool")
            if isinstance(node, Sequence):
                draft.put("tool", list_at(node, [self._task(each) for each in node.items]))
            elif node is not None:
                draft.put("tool", self._task(node))
        elif text_of(kind) == "iterator":
            self._iterator(draft, kind)
        elif text_of(kind) not in _NO_TOOL:
            draft.put("tool", self._flat_tool(draft, kind), key=kind)

    def _flat_tool(self, draft: Draft, kind: Node) -> Node:
        name = text_of(kind) or ""
        if name == "workbook" and "name" not in draft.items:
            draft.rename(self._report, "task", "name")
        tool = empty_at(kind)
        tool.put("kind", kind)
        draft.move([key for key in draft.items if _is_of_tool(key, name)], tool)
        self._request_data(tool)
        return self._task(tool.finished())

    def _task(self, node: Node) -> Node:
        """A task whose fields are in one mapping already."""
        if not isinstance(node, Mapping):
            return node
        draft = Draft(node)
        if "kind" not in draft.items and len(draft.items) == 1:
            ((label, inner),) = draft.items.items()
            draft.put(label, self._task(inner))
            return draft.finished()
        if "kind" not in draft.items:
            kind = self._kind(draft)
            if kind is not None:
                draft.put("kind", kind)
                self._request_data(draft)
        fields = _fields_of(text_of(draft.get("kind")))
        merged_inputs(self._report, draft, tuple(each for each in INPUTS if each not in fields))
        self._auth(draft)
        return draft.finished()

    def _request_data(self, tool: Draft) -> None:
        """`data` of a request without a body is its query; `{query, body}` says which is which."""
        data = tool.get("data")
        if text_of(tool.get("kind")) != "http" or not isinstance(data, Mapping):
            return
        if data.items and data.items.keys() <= {"query", "body"}:
            tool.take("data")
            Draft(data).move(data.items, tool)
            tool.rename(self._report, "query", "params")
        elif (text_of(tool.get("method")) or "GET").upper() in _WITHOUT_BODY:
            tool.rename(self._report, "data", "params")

    def _auth(self, draft: Draft) -> None:
        for name in _CREDENTIAL_KEYS:
            draft.rename(self._report, name, "auth")
        auth = draft.get("auth")
        if isinstance(auth, Mapping) and auth.items.keys() - {"type"} == {"credential"}:
            draft.put("auth", auth.items["credential"])

    def _iterator(self, draft: Draft, kind: Node) -> None:
        """A loop whose body is `task`. What the body saves, it saves for each element."""
        loop = empty_at(kind)
        draft.move(_LOOP_KEYS, loop)
        draft.put("loop", loop.finished(), key=kind)
        if draft.take("sink") is not None:
            message = "the sink of an iterator's whole result has no counterpart"
            hint = "put it in `task` to save each element, or save in a step of its own"
            self._report.add(draft.key("sink"), message, key="sink", hint=hint)
        body = draft.take("task")
        if not isinstance(body, Mapping):
            message = "an iterator needs `task`, a mapping: what to do with each element"
            self._report.add(body or kind, message, key="task")
            return
        inner = Draft(body)
        inner.rename(self._report, "save", "sink")
        inner.move(("sink", "retry"), draft)
        label = next((n for n in ("task", "name") if text_of(inner.get(n)) is not None), None)
        if label == "task":
            inner.rename(self._report, "task", "name")
        tool = self._task(inner.finished())
        if isinstance(tool, Mapping) and text_of(tool.items.get("kind")) == "iterator":
            hint = "put the inner loop in a playbook of its own and call it with `tool: playbook`"
            message = "an iterator inside an iterator has no counterpart"
            self._report.add(tool, message, key="task", hint=hint)
            return
        draft.put("tool", tool)

    def _loop(self, draft: Draft) -> None:
        node = draft.get("loop")
        if not isinstance(node, Mapping) or not any(name in node.items for name in _LOOP_KEYS):
            return
        loop = Draft(node)
        is_old = "collection" in loop.items or "element" in loop.items
        loop.rename(self._report, "collection", "in")
        loop.rename(self._report, "element", "iterator")
        given = loop.get("spec")
        spec = Draft(given) if isinstance(given, Mapping) else empty_at(node)
        loop.move(("mode", "concurrency", "chunk_size"), spec)
        spec.rename(self._report, "concurrency", "max_in_flight")
        mode = spec.get("mode")
        if mode is None and is_old:
            # Classic loops are sequential, unless they say how many may run at once.
            spec.put(
                "mode", text_at(node, "parallel" if "max_in_flight" in spec.items else "sequential")
            )
        elif text_of(mode) == "async" and mode is not None:
            spec.put("mode", text_at(mode, "parallel"))
        loop.put("spec", spec.finished())
        draft.put("loop", loop.finished())

    def _retry(self, draft: Draft) -> None:
        node = draft.get("retry")
        if isinstance(node, Sequence):
            hint = "write `retry: {on_error: {...}, on_success: {...}}`"
            self._report.add(
                node, "a list of retry policies has no counterpart", key="retry", hint=hint
            )
            draft.take("retry")
        if not isinstance(node, Mapping):
            return
        if not node.items.keys() & {"on_error", "on_success"}:
            retry = empty_at(node)
            retry.put("on_error", self._on_error(node))
        else:
            retry = Draft(node)
            on_error = retry.get("on_error")
            if isinstance(on_error, Mapping):
                retry.put("on_error", self._on_error(on_error))
        draft.put("retry", retry.finished())

    def _on_error(self, node: Mapping) -> Mapping:
        draft = Draft(node)
        draft.rename(self._report, "retry_when", "when")
        draft.rename(self._report, "delay", "initial_delay")
        factor = draft.get("backoff_multiplier")
        if isinstance(factor, Scalar) and factor.value in (1, 2):
            # The factor of the two kinds of growth there are; any other stays and is reported.
            draft.take("backoff_multiplier")
            if "backoff" not in draft.items:
                draft.put(
                    "backoff", text_at(factor, "fixed" if factor.value == 1 else "exponential")
                )
        stop = draft.take("stop_when")
        if stop is not None:
            draft.put("when", self._unless(draft.get("when"), stop), key=draft.key("stop_when"))
        return draft.finished()

    def _unless(self, when: Node | None, stop: Node) -> Scalar:
        parts = [] if when is None else [(when, expression_of(when))]
        for guard, expression in [*parts, (stop, expression_of(stop))]:
            if expression is None:
                message = "a guard beside `stop_when` must be one `{{ expression }}`"
                self._report.add(guard, message, key="stop_when")
        asked = "".join(f"({expression}) and " for _, expression in parts)
        return text_at(stop, f"{{{{ {asked}not ({expression_of(stop)}) }}}}")

    def _sink(self, draft: Draft) -> None:
        node = draft.get("sink")
        if not isinstance(node, Mapping):
            return
        sink = Draft(node)
        for name in ("storage", "type", "kind"):
            sink.rename(self._report, name, "tool")
        tool = sink.get("tool")
        if isinstance(tool, Mapping):
            sink.take("tool")
            Draft(tool).move(tool.items, sink)
            sink.rename(self._report, "kind", "tool")
        self._auth(sink)
        sink.rename(self._report, "data", "args")
        key, mode = sink.get("key"), sink.get("mode")
        if isinstance(key, Scalar):
            sink.put("key", list_at(key, [key]))
        if mode is not None and (text_of(mode) or "") in _SINK_MODES:
            sink.put("mode", text_at(mode, _SINK_MODES[text_of(mode) or ""]))
        draft.put("sink", sink.finished())

    def _vars(self, draft: Draft) -> None:
        """Variables are set when the step has ended, before its arcs."""
        node = draft.take("vars")
        if node is None:
            return
        if not isinstance(node, Mapping):
            message = f"`vars` must be a mapping of names to templates, not {describe(node)}"
            self._report.add(node, message, key="vars")
            return
        given = draft.get("set")
        if given is not None and not isinstance(given, Mapping):
            return  # The parser says what is wrong with it.
        merged = empty_at(node) if given is None else Draft(given)
        for name, value in node.items.items():
            if f"ctx.{name}" in merged.items:
                message = f"`{name}` is in `vars` and in `set`"
                self._report.add(node.keys[name], message, key=name)
            merged.put(f"ctx.{name}", value, key=node.keys[name])
        draft.put("set", merged.finished(), key=draft.key("vars"))

    def _next(self, draft: Draft) -> None:
        node = draft.get("next")
        if node is None:
            return
        if is_classic_next(node):
            draft.put("next", modern_next(self._report, node))
        elif isinstance(node, Mapping) and isinstance(arcs := node.items.get("arcs"), Sequence):
            following = Draft(node)
            following.put("arcs", list_at(arcs, [self._arc(arc) for arc in arcs.items]))
            draft.put("next", following.finished())

    def _arc(self, node: Node) -> Node:
        if not isinstance(node, Mapping):
            return node
        draft = Draft(node)
        merged_inputs(self._report, draft)
        return draft.finished()


def _fields_of(kind: str | None) -> tuple[str, ...]:
    return TOOLS[kind].fields if kind in TOOLS else ()


def _is_of_tool(key: str, kind: str) -> bool:
    """Whether a key beside `tool: KIND` is the tool's; a misspelled one goes where it is near."""
    fields = (*TOOLS[kind].fields, "timeout", *_CREDENTIAL_KEYS) if kind in TOOLS else ()
    if key in _STEP_KEYS:
        return kind == "workbook" and key == "name"
    if key in fields or (not fields and key not in INPUTS):
        return True
    return key not in INPUTS and not nearest(key, _STEP_KEYS) and bool(nearest(key, fields))
