import asyncio

import pytest

from headrace.errors import InvalidRequest, TransferFailed
from workers.faults import Fault, Faults


async def test_without_faults_every_point_is_passed() -> None:
    assert await Faults().reach("step")


async def test_a_fault_holds_so_many_times() -> None:
    faults = Faults([Fault("ticket", "drop", times=2)])
    assert [await faults.reach("ticket") for _ in range(3)] == [False, False, True]


async def test_a_fault_without_times_holds_until_replaced() -> None:
    faults = Faults([Fault("announce", "drop")])
    assert [await faults.reach("announce") for _ in range(5)] == [False] * 5
    assert faults.replace([]) == 0
    assert await faults.reach("announce")


async def test_a_block_fault_holds_where_its_block_is_read() -> None:
    faults = Faults([Fault("transfer.block", "raise", at=5)])
    assert await faults.reach("transfer.block", 0, 5)
    with pytest.raises(TransferFailed):
        await faults.reach("transfer.block", 4, 2)


async def test_a_paused_point_goes_on_when_faults_are_cleared() -> None:
    faults = Faults([Fault("step", "pause")])
    paused = asyncio.create_task(faults.reach("step"))
    await asyncio.sleep(0)
    assert not paused.done()
    faults.replace([])
    assert await paused


@pytest.mark.parametrize(
    ("point", "action", "seconds", "field"),
    [
        ("nowhere", "drop", 0, "point"),
        ("step", "explode", 0, "action"),
        ("step", "delay", -1, "seconds"),
        ("step", "shrink", 0, "action"),
        ("pool", "drop", 0, "action"),
        ("pool", "shrink", 0, "at"),
        ("sequence", "preempt", 0, "times"),
    ],
)
def test_an_unknown_fault_is_refused(point: str, action: str, seconds: float, field: str) -> None:
    with pytest.raises(InvalidRequest, match=field):
        Fault(point, action, seconds=seconds)


def test_what_acts_on_the_scheduler_is_found_before_it_is_used_up() -> None:
    shrink, preempt = Fault("pool", "shrink", at=8), Fault("sequence", "preempt", at=20, times=1)
    faults = Faults([shrink, preempt])
    assert (faults.find("pool"), faults.find("sequence")) == (shrink, preempt)
    assert faults.take("sequence") == preempt
    assert (faults.find("pool"), faults.find("sequence")) == (shrink, None)
