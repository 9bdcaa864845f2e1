"""One running stack with two workers for the tests that only run playbooks on it."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from chaos.stack import running_stack
from support.flow import Flow
from support.mock_api import Clinic, Trouble, running_mock_api

# A busy machine must not look like a dead worker while nobody is killed.
PATIENT_LEASES = {
    "NOETL_SHARD_LEASE_SECONDS": "10",
    "NOETL_SHARD_HEARTBEAT_SECONDS": "2",
    "NOETL_LEASE_SECONDS": "30",
    "NOETL_HEARTBEAT_SECONDS": "2",
}
A_MOMENT = Trouble(slow=1.0, slow_ms_min=300, slow_ms_max=300)


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def flow(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Flow]:
    directory = tmp_path_factory.mktemp("flow")
    with (
        running_mock_api(Clinic(facilities=2, patients=2), A_MOMENT) as api,
        running_stack(directory, "--workers", "2", **PATIENT_LEASES) as stack,
    ):
        flow = Flow(stack, api)
        await flow.prepare()
        yield flow
        await stack.client.aclose()
