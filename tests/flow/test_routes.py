"""Which way tokens go on real services: arcs, what they bring along, admission, and editing."""

from support.flow import PLAYBOOKS, Flow


async def test_exclusive_takes_the_first_arc_that_holds(flow: Flow) -> None:
    execution = await flow.run("arcs", number=5)

    assert execution.entered() == ["begin", "first", "large"]
    assert execution.result("large") == "first step", "the arc's input goes over the step's"


async def test_exclusive_goes_on_with_the_arc_without_a_guard(flow: Flow) -> None:
    execution = await flow.run("arcs", number=2)

    assert execution.entered() == ["begin", "first", "otherwise"]


async def test_inclusive_takes_every_arc_that_holds(flow: Flow) -> None:
    execution = await flow.run("arcs", number=5, mode="inclusive")

    assert execution.entered()[:2] == ["begin", "every"]
    assert sorted(execution.entered()[2:]) == ["large", "odd"]
    assert execution.result("large") == "every step"
    assert execution.result("odd") == "every step True"


async def test_no_arc_that_holds_ends_the_branch(flow: Flow) -> None:
    execution = await flow.run("arcs", number=2.5, mode="inclusive")

    assert execution.entered() == ["begin", "every"]


async def test_a_step_that_is_not_admitted_is_skipped_and_its_token_goes_on(flow: Flow) -> None:
    execution = await flow.run("admission", admitted=False)

    assert execution.count("step.skipped", step="guarded") == 1
    assert execution.count("loop.started", "command.issued", step="guarded") == 0
    assert execution.steps["guarded"]["status"] == "SKIPPED"
    assert execution.result("after") == "here"


async def test_a_step_that_is_admitted_runs(flow: Flow) -> None:
    execution = await flow.run("admission", admitted=True)

    assert execution.count("step.skipped") == 0
    assert execution.result("guarded") == [1, 2]


async def test_an_execution_ends_as_the_playbook_was_when_it_began(flow: Flow) -> None:
    first = await flow.start("edited")
    await flow.until(first, "command.parked", step="hold")
    text = (PLAYBOOKS / "edited.yaml").read_text()
    edited = text.replace("edition: first", "edition: second").replace("[1, 2, 3]", "[1, 2]")
    await flow.stack.register(edited.replace("kind: wait, signal: go, timeout: 1m", "kind: noop"))
    second = await flow.run("edited")
    await flow.signal(first, "go")
    before = await flow.ended(first)
    await flow.stack.register(text)

    assert before.result("each") == ["first 1", "first 2", "first 3"]
    assert second.result("each") == ["second 1", "second 2"]
    assert before.view["version"] < second.view["version"]
