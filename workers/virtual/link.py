"""Reads of a peer's blocks under virtual time: at most two at once from one peer, and no port faster than it is."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from headrace.costmodel import CostModel
from workers.virtual.time import VirtualTime

MAX_READS = 2


@dataclass(slots=True)
class Port:
    """One direction of a worker's link to all others; its bytes pass one after the other."""

    busy_until: float = 0.0


@dataclass(slots=True)
class Link:
    """What one worker reads from another. A read takes the link's latency and, once both ports are
    free, its bytes at the link's bandwidth."""

    time: VirtualTime
    cost: CostModel
    source: Port
    target: Port
    num_reading: int = 0
    waiting: deque[tuple[int, Callable[[], bool], Callable[[float], None]]] = field(default_factory=deque)

    def read(self, num_bytes: int, begin: Callable[[], bool], end: Callable[[float], None]) -> None:
        """`begin` is asked when it is the read's turn, and says whether it is still wanted; then `end` hears its
        seconds when it is over."""
        self.waiting.append((num_bytes, begin, end))
        self._next()

    def _next(self) -> None:
        while self.waiting and self.num_reading < MAX_READS:
            num_bytes, begin, end = self.waiting.popleft()
            if not begin():
                continue
            self.num_reading += 1
            now = self.time.now
            started = max(now, self.source.busy_until, self.target.busy_until)
            over = started + num_bytes / self.cost.transfer_bytes_per_second
            self.source.busy_until = self.target.busy_until = over
            over += self.cost.transfer_base_seconds
            self.time.at(over, self._end, end, over - now)

    def _end(self, end: Callable[[float], None], seconds: float) -> None:
        self.num_reading -= 1
        end(seconds)
        self._next()
