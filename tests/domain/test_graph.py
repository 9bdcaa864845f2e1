"""The arc graph: what lies ahead, which arcs lead back, where branches meet."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noetl_core.domain.graph import graph_of
from noetl_core.domain.ids import StepName
from noetl_core.domain.playbook import Arc, Metadata, Next, Playbook, Step, StepSpec


def playbook(arcs: dict[str, str], *, join: dict[str, str] | None = None) -> Playbook:
    """`{"a": "bc", "b": "d"}`: steps with one letter, and where their arcs lead."""
    steps = {
        StepName(name): Step(
            step=StepName(name),
            spec=StepSpec(join=(join or {}).get(name)),  # type: ignore[arg-type]
            next=Next(arcs=tuple(Arc(step=StepName(target)) for target in targets)),
        )
        for name, targets in arcs.items()
    }
    return Playbook(metadata=Metadata(name="p"), steps=steps)


def ahead(book: Playbook, source: str) -> str:
    graph = graph_of(book)
    return "".join(s for s in book.steps if graph.reaches(StepName(source), s))


def barriers(book: Playbook) -> str:
    return "".join(step for step in book.steps if graph_of(book).is_barrier(step))


DIAMOND = {"a": "bc", "b": "d", "c": "d", "d": ""}
LOOP = {"a": "b", "b": "c", "c": "bd", "d": ""}


def test_a_step_reaches_what_its_arcs_lead_to_and_not_itself() -> None:
    assert [ahead(playbook(DIAMOND), step) for step in "abcd"] == ["bcd", "d", "d", ""]


def test_an_arc_back_is_not_counted() -> None:
    book = playbook(LOOP)

    assert graph_of(book).back_edges == {("c", "b")}
    assert ahead(book, "c") == "d"
    assert graph_of(book).incoming[StepName("b")] == ("a",)


BRANCHES_THAT_GO_ROUND = {"a": "bd", "b": "cf", "c": "b", "d": "ef", "e": "d", "f": "a"}


def test_who_goes_round_a_loop_can_still_come_to_where_it_is_left_for() -> None:
    book = playbook(BRANCHES_THAT_GO_ROUND)

    assert graph_of(book).back_edges == {("c", "b"), ("e", "d"), ("f", "a")}
    assert barriers(book) == "f"
    assert ahead(book, "c") == ahead(book, "e") == "f"


def test_the_next_turn_of_a_loop_around_both_is_not_waited_for() -> None:
    assert ahead(playbook(BRANCHES_THAT_GO_ROUND), "f") == ""


def test_an_arc_to_itself_leads_back() -> None:
    book = playbook({"a": "ab", "b": ""})

    assert graph_of(book).back_edges == {("a", "a")}
    assert ahead(book, "a") == "b"


@pytest.mark.parametrize(
    ("arcs", "join", "expected"),
    [
        (DIAMOND, {}, "d"),
        (DIAMOND, {"d": "any"}, ""),
        (DIAMOND, {"b": "all"}, "bd"),
        (LOOP, {}, ""),
        ({"a": "bb", "b": ""}, {}, "b"),
        ({"a": "bc", "b": "c", "c": "a"}, {}, "c"),
    ],
)
def test_branches_meet_at_a_barrier(
    arcs: dict[str, str], join: dict[str, str], expected: str
) -> None:
    assert barriers(playbook(arcs, join=join)) == expected


def test_a_step_nobody_leads_to_is_not_reachable() -> None:
    book = playbook({"a": "b", "b": "", "x": "b"})

    assert graph_of(book).reachable == {"a", "b"}
    assert ahead(book, "x") == "b"


def test_the_walk_begins_at_the_entry_step() -> None:
    book = playbook({"b": "a", "a": "b"})

    assert graph_of(book).back_edges == {("a", "b")}


def test_a_chain_of_thousands_has_a_graph() -> None:
    names = [StepName(f"s{number}") for number in range(3000)]
    steps = {
        name: Step(step=name, next=Next(arcs=(Arc(step=after),)))
        for name, after in zip(names, [*names[1:], names[0]], strict=True)
    }
    graph = graph_of(Playbook(metadata=Metadata(name="p"), steps=steps))

    assert graph.reaches(names[0], names[-1])
    assert not graph.reaches(names[-1], names[0])


def test_the_graph_is_made_once_for_a_playbook() -> None:
    book, same = playbook(DIAMOND), playbook(DIAMOND)

    assert graph_of(book) is graph_of(book)
    assert graph_of(same) is not graph_of(book)
    assert book == same


GRAPHS = st.fixed_dictionaries({name: st.text("abcdef", max_size=3) for name in "abcdef"})


@given(GRAPHS)
def test_without_the_arcs_back_there_is_no_cycle(arcs: dict[str, str]) -> None:
    book = playbook(arcs)
    graph = graph_of(book)

    assert not any(graph.reaches(step, step) for step in book.steps)


@given(GRAPHS)
def test_whoever_walks_forward_reaches(arcs: dict[str, str]) -> None:
    book = playbook(arcs)
    graph = graph_of(book)

    for source in arcs:
        found: set[str] = set()
        waiting = [source]
        while waiting:
            step = waiting.pop()
            for target in arcs[step]:
                if (step, target) not in graph.back_edges and target not in found:
                    found.add(target)
                    waiting.append(target)
        assert found <= set(ahead(book, source))


@given(GRAPHS)
def test_no_steps_wait_for_each_other_in_a_circle(arcs: dict[str, str]) -> None:
    book = playbook(arcs)
    waits_for: dict[str, set[str]] = {step: set() for step in arcs}
    for source in arcs:
        for target in ahead(book, source):
            waits_for[target].add(source)

    while free := [step for step, others in waits_for.items() if not others]:
        for step in free:
            del waits_for[step]
        for others in waits_for.values():
            others.difference_update(free)
    assert not waits_for
