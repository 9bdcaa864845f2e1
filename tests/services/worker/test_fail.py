"""The tool that always fails."""

from noetl_core.domain.errors import ToolError
from noetl_worker.tools.fail import FailTool
from services.worker import calls


async def test_the_error_is_what_the_playbook_says() -> None:
    config = {"message": "no stock", "code": 17, "error_kind": "stock", "retryable": True}

    failed = await calls.error(FailTool(), config=config)

    assert failed == ToolError(kind="stock", message="no stock", code="17", retryable=True)


async def test_without_a_word_it_is_still_an_error() -> None:
    failed = await calls.error(FailTool())

    assert (failed.kind, failed.code, failed.retryable) == ("failed", "", False)
    assert failed.message


async def test_retryable_is_true_or_false() -> None:
    failed = await calls.error(FailTool(), config={"retryable": "maybe"})

    assert failed.code == "WRONG_FIELD"
    assert "`retryable`" in failed.message
