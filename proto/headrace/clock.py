"""Time as a dependency: deciding code takes `now`, acting code asks a Clock, tests own one."""

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds on a monotonic scale of this process alone; two hosts' clocks are never compared."""

    def now(self) -> float: ...


class SystemClock:
    """The host's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock that stands still until it is advanced: for tests and the simulator."""

    def __init__(self, start_seconds: float = 0.0) -> None:
        self._now = start_seconds

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"a clock cannot go back: {seconds} s")
        self._now += seconds
