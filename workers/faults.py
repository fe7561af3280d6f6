"""Faults on demand, for tests of what happens when things go wrong. Only a worker started with fault hooks takes any.

Points: `step` (before a step is handed to the ranks), `ticket`, `announce`, `release` (before that message is sent),
`pull` (before blocks are read), `transfer.block` (before block `at` of a request is read).
Actions: `delay` (go on after so many seconds), `pause` (wait until the faults are cleared), `drop` (the message is not
sent; the read never ends), `raise`.

Two more act on the scheduler, before each plan: `pool`: `shrink` (it has `at` blocks, or those that are held if they are
more) and `sequence`: `preempt` (the oldest that has come to position `at`; so many `times`, since one that is preempted
every time never gets on).
"""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

from headrace.errors import InvalidRequest, TransferFailed

_WAYS = ("delay", "pause", "drop", "raise")
ACTIONS = dict.fromkeys(("step", "ticket", "announce", "release", "pull", "transfer.block"), _WAYS) | {
    "pool": ("shrink",),
    "sequence": ("preempt",),
}


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens at a point. `times` 0: every time; `at` counts for transfer.block, pool and sequence."""

    point: str
    action: str
    at: int = 0
    seconds: float = 0.0
    times: int = 0

    def __post_init__(self) -> None:
        if self.point not in ACTIONS:
            raise InvalidRequest.out_of_range("point", self.point, f"one of {', '.join(ACTIONS)}")
        if self.action not in ACTIONS[self.point]:
            raise InvalidRequest.out_of_range("action", self.action, f"one of {', '.join(ACTIONS[self.point])}")
        if self.point == "pool" and self.at < 1:
            raise InvalidRequest.out_of_range("at", self.at, "at least 1 block")
        if self.point == "sequence" and self.times < 1:
            raise InvalidRequest.out_of_range("times", self.times, "at least 1")
        if not 0 <= self.seconds <= 3600:
            raise InvalidRequest.out_of_range("seconds", self.seconds, "from 0 to 3600")


class Faults:
    """The faults in force. Owned by the worker's service; the points only ask."""

    def __init__(self, faults: Iterable[Fault] = ()) -> None:
        self._left: list[tuple[Fault, int]] = []
        self._cleared = asyncio.Event()
        self.replace(faults)

    def replace(self, faults: Iterable[Fault]) -> int:
        """From now on these and no others hold; whoever is paused goes on. Returns how many there are."""
        self._left = [(fault, fault.times) for fault in faults]
        self._cleared.set()
        self._cleared = asyncio.Event()
        return len(self._left)

    def find(self, point: str) -> Fault | None:
        """The fault that holds at this point; none of its times is used up."""
        return next((fault for fault, _ in self._left if fault.point == point), None)

    def take(self, point: str, first: int = 0, count: int = 1) -> Fault | None:
        """The fault that holds at this point for indices first … first + count - 1; uses up one of its times."""
        for position, (fault, times) in enumerate(self._left):
            if fault.point != point or (point == "transfer.block" and not first <= fault.at < first + count):
                continue
            if times == 1:
                del self._left[position]
            elif times > 1:
                self._left[position] = (fault, times - 1)
            return fault
        return None

    async def reach(self, point: str, first: int = 0, count: int = 1) -> bool:
        """Acts out the fault at this point, if there is one. False: the message is to be dropped."""
        if not self._left or (fault := self.take(point, first, count)) is None:
            return True
        match fault.action:
            case "delay":
                await asyncio.sleep(fault.seconds)
            case "pause":
                await self._cleared.wait()
            case "raise":
                raise TransferFailed(f"fault: {point}", point=point)
            case _:
                return False
        return True
