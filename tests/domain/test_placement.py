"""Which worker a command is meant for, and what a worker must have to take it."""

from collections import Counter
from typing import Any

import pytest

from noetl_core.domain.errors import PlaybookInvalidError
from noetl_core.domain.events import CommandIssued, StepAborted, StepFailed
from noetl_core.domain.ids import StepName, WorkerId
from noetl_core.domain.parse import parse_playbook
from noetl_core.domain.placement import nearest_worker, requires_of
from noetl_core.domain.playbook import Placement, Playbook, StepSpec
from noetl_core.domain.workers import NOBODY, LiveWorker, Workers
from support.running import WORKER, Run, loop_over, playbook, step

KEYS = [f"customer-{n}" for n in range(2000)]


def worker(
    name: str, *, capacity: int = 4, pools: str = "cpu", offers: str = "", limited: str = ""
) -> LiveWorker:
    return LiveWorker(
        WorkerId(name),
        frozenset(pools.split()),
        frozenset(offers.split()),
        capacity,
        frozenset(limited.split()),
    )


def targets(workers: list[LiveWorker]) -> list[WorkerId | None]:
    return [nearest_worker(key, workers) for key in KEYS]


def test_equal_keys_go_to_the_same_worker_in_whatever_order_the_workers_are_known() -> None:
    workers = [worker("a"), worker("b"), worker("c")]

    assert targets(workers) == targets(workers[::-1])
    assert len(set(targets(workers))) == 3


def test_when_a_worker_goes_only_its_own_keys_move() -> None:
    before = targets([worker("a"), worker("b"), worker("c")])
    after = targets([worker("a"), worker("b")])

    assert {new for old, new in zip(before, after, strict=True) if old == "c"} == {"a", "b"}
    assert all(new == old for old, new in zip(before, after, strict=True) if old != "c")


def test_a_worker_with_twice_the_slots_gets_twice_the_keys() -> None:
    counts = Counter(targets([worker("small", capacity=4), worker("large", capacity=8)]))

    assert 1.7 < counts[WorkerId("large")] / counts[WorkerId("small")] < 2.3


def test_without_a_live_worker_a_key_belongs_to_nobody() -> None:
    assert nearest_worker("key", []) is None


# Commands


class Placed(Run):
    """An execution whose broker knows these workers."""

    def __init__(self, book: Playbook, *workers: LiveWorker) -> None:
        self.workers = Workers(workers)
        super().__init__(book)

    def take(self, message: Any, value: Any = None) -> None:
        self.known.workers = self.workers
        super().take(message, value)

    @property
    def targets(self) -> list[tuple[str, str | None]]:
        return [(fact.command_id, fact.target_worker) for fact in self.of(CommandIssued)]


def placed(**how: Any) -> StepSpec:
    return StepSpec(placement=Placement(**how))


def test_a_named_worker_is_the_target_for_as_long_as_the_step_says() -> None:
    spec = placed(worker="{{ workload.host }}.example", wait_s=7.0)
    run = Placed(playbook(step("a", spec=spec), host="node-1"))

    (issued,) = run.of(CommandIssued)
    assert (issued.target_worker, issued.target_s) == ("node-1-example", 7.0)


def test_a_named_worker_that_is_gone_is_not_waited_for() -> None:
    book = playbook(step("a", spec=placed(worker="node-1", wait_s=60.0)))

    assert Placed(book, worker("node-2")).targets == [("a.1#1", None)]
    assert Placed(book, worker("node-1")).targets == [("a.1#1", "node-1")]
    assert Placed(book).targets == [("a.1#1", "node-1")], "nobody was seen yet: who knows"


def test_items_with_the_same_key_are_meant_for_the_same_worker() -> None:
    loop = loop_over([{"k": n % 3} for n in range(9)])
    book = playbook(step("each", loop=loop, spec=placed(affinity="k-{{ item.k }}")))
    run = Placed(book, worker("a"), worker("b"), worker("elsewhere", pools="gpu"))

    found = [target for _, target in run.targets]
    assert len(found) == 9
    assert found[:3] == found[3:6] == found[6:]
    assert set(found) <= {"a", "b"}


def test_affinity_looks_only_at_workers_that_have_the_labels() -> None:
    spec = placed(affinity="{{ execution_id }}", labels={"gpu": "true"})
    run = Placed(playbook(step("a", spec=spec)), worker("a"), worker("b", offers="gpu=true"))

    assert run.targets == [("a.1#1", "b")]


def test_previous_is_the_worker_whose_result_led_to_the_step() -> None:
    run = Placed(playbook(step("a", "b"), step("b", spec=placed(affinity="previous"))))
    run.done("a.1#1")

    assert run.targets == [("a.1#1", None), ("b.1#1", WORKER)]


def test_a_command_that_was_lost_is_for_anybody_at_once() -> None:
    run = Placed(playbook(step("a", spec=placed(worker="w9"))))
    run.expire("a.1#1")

    assert run.targets == [("a.1#1", "w9"), ("a.1#2", None)]


def test_an_empty_key_is_no_wish() -> None:
    spec = placed(affinity="{{ workload.key }}")
    run = Placed(playbook(step("a", spec=spec), key=""), worker("a"))

    assert run.targets == [("a.1#1", None)]


def test_a_template_that_fails_ends_the_step_and_says_where() -> None:
    spec = placed(affinity="{{ workload.missing.key }}")
    run = Placed(playbook(step("a", spec=spec), other=1))

    (failed,) = run.of(StepFailed)
    assert failed.error.kind == "template_rendering"
    assert failed.error.details["field"] == "spec.placement.affinity"
    assert run.open == []


def test_a_template_that_fails_in_a_loop_issues_none_of_its_items() -> None:
    spec = placed(affinity="{{ item.key }}")
    run = Placed(playbook(step("a", spec=spec, loop=loop_over([{"key": 1}, {}]))))

    assert run.of(CommandIssued) == []
    assert len(run.of(StepAborted)) == 1
    assert run.said[-1] == "execution.failed"


# Requirements


def test_labels_and_tools_of_other_packages_are_required() -> None:
    spec = placed(labels={"gpu": "true", "zone": "eu"})
    book = playbook(step("a", spec=spec, kind="acme.mailer"), step("b"))

    required = requires_of(book, StepName("a"), NOBODY)
    assert required == {"gpu=true", "zone=eu", "tool:acme.mailer"}
    assert requires_of(book, StepName("b"), NOBODY) == frozenset()


def test_a_tool_that_every_worker_has_is_required_where_one_limits_it() -> None:
    book = playbook(step("a", kind="python"))
    workers = Workers([worker("a"), worker("b", limited="python http")])

    assert requires_of(book, StepName("a"), workers) == {"tool:python"}
    assert requires_of(book, StepName("a"), Workers([worker("a")])) == frozenset()


# The document

DOCUMENT = """
apiVersion: noetl.io/v2
kind: Playbook
metadata: {{name: t}}
workload: {{host: h}}
workflow:
  - step: a
    spec:
      placement: {placement}
    tool: {{kind: noop}}
"""


def read(placement: str) -> Placement | None:
    text = DOCUMENT.format(placement=placement)
    return parse_playbook(text, file="t.yaml").steps[StepName("a")].spec.placement


def test_labels_are_texts_however_they_are_written() -> None:
    found = read('{labels: {gpu: true, level: 3, zone: "eu"}, worker: "{{ workload.host }}"}')

    assert found == Placement(
        labels={"gpu": "true", "level": "3", "zone": "eu"}, worker="{{ workload.host }}", wait_s=30
    )


def test_the_wait_is_a_duration() -> None:
    assert read("{affinity: previous, wait: 2m}") == Placement(affinity="previous", wait_s=120)


@pytest.mark.parametrize(
    ("placement", "problem"),
    [
        ("{worker: a, affinity: b}", "either `worker` or `affinity`"),
        ("{lables: {}}", "unknown key `lables` in `placement`"),
        ("{labels: [gpu]}", "`labels` must be a mapping"),
        ("{labels: {gpu: [1]}}", "`gpu` is no label"),
        ("{wait: soon}", "`wait` must be a duration"),
        ('{affinity: "{{ output.data }}"}', "`output` is not there before the step has run"),
        ('{affinity: "{{ iter.item }}"}', "`iter.item` is not there in this step"),
        ('{worker: "{{ keychain.x }}"}', "`keychain` is there for the tool only"),
    ],
)
def test_a_placement_that_cannot_be_meant_is_refused(placement: str, problem: str) -> None:
    with pytest.raises(PlaybookInvalidError) as refused:
        read(placement)

    assert problem in str(refused.value)
