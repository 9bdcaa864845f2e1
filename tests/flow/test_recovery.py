"""kill -9 of the broker in the middle of a loop: it goes on from there, and runs nothing twice."""

import os
import signal
from pathlib import Path

import pytest

from chaos.stack import running_stack
from flow.conftest import PATIENT_LEASES
from support.flow import Flow

pytestmark = [pytest.mark.slow, pytest.mark.chaos, pytest.mark.timeout(600)]

ITEMS = 200

# The command leases are long: a run that is there twice was not a worker that seemed dead.
QUICK_TAKEOVER = {
    **PATIENT_LEASES,
    "NOETL_SHARD_LEASE_SECONDS": "1.5",
    "NOETL_SHARD_HEARTBEAT_SECONDS": "0.4",
}


async def test_a_broker_that_is_killed_at_half_of_a_loop_runs_no_item_twice(tmp_path: Path) -> None:
    with running_stack(
        tmp_path / "recovery", "--processes", "--workers", "2", **QUICK_TAKEOVER
    ) as stack:
        flow = Flow(stack)
        await flow.prepare()
        broker = stack.pid("broker")
        execution_id = await flow.start("loop_state_recovery", items=ITEMS)
        await stack.until_done(execution_id, ITEMS // 2)
        done_before = await stack.done(execution_id)
        os.kill(broker, signal.SIGKILL)
        execution = await flow.ended(execution_id, seconds=300.0)
        trace = await stack.query(
            "SELECT item, count(*) AS runs FROM recovery_trace WHERE execution_id = $1 "
            "GROUP BY item ORDER BY item",
            str(execution_id),
        )
        await stack.client.aclose()

    assert done_before < ITEMS, "it was over before the broker was killed"
    assert [(row["item"], row["runs"]) for row in trace] == [(item, 1) for item in range(ITEMS)]
    issued = execution.of("command.issued", step="each")
    assert [event.iter_index for event in issued] == list(range(ITEMS))
    assert {event.attempt for event in issued} == {1}
    assert execution.count("loop.done") == 1
    assert execution.result("summary") == {"total": ITEMS, "success": ITEMS, "failed": 0}
