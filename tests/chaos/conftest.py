"""What these tests share: an API to call, and what a load records when nothing happens."""

from collections.abc import Iterator

import pytest
import pytest_asyncio

from chaos import mixed_load
from chaos.mixed_load import Log
from chaos.stack import running_stack
from flow.conftest import PATIENT_LEASES
from support.flow import Flow
from support.mock_api import running_mock_api


@pytest.fixture(scope="package")
def api() -> Iterator[str]:
    """The address of an API that answers, and fails when it is asked to."""
    with running_mock_api() as address:
        yield address


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def usual(api: str, tmp_path_factory: pytest.TempPathFactory) -> Log:
    """What the mixed load records when nothing happens."""
    directory = tmp_path_factory.mktemp("usual")
    with running_stack(directory, "--workers", "2", **PATIENT_LEASES) as stack:
        flow = Flow(stack, api)
        await mixed_load.prepare(flow)
        run = await mixed_load.run(flow)
        await stack.client.aclose()
    print(f"\nundisturbed: {run}")
    assert not [key for log in run.log.values() for key in log if key[0] == "command.expired"]
    return run.log
