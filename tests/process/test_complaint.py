"""process/complaint.py: the first failure is told, then one in a while, with the count."""

from noetl_core.process.complaint import Complaint
from support.clock import FakeClock


def test_the_first_failure_is_told_and_then_one_every_so_often() -> None:
    clock = FakeClock()
    complaint = Complaint(every_seconds=30, clock=clock)
    told = []

    for _ in range(100):
        told += [complaint.failures] if complaint.failed() else []
        clock.advance(1)

    assert told == [1, 31, 61, 91]


def test_after_a_recovery_the_first_failure_is_told_again() -> None:
    complaint = Complaint(every_seconds=30, clock=FakeClock())
    assert [complaint.failed() for _ in range(3)] == [True, False, False]

    assert complaint.recovered() == 3

    assert complaint.failed()
    assert complaint.failures == 1
