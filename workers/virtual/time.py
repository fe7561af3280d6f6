"""Virtual time: what will happen, in order. Equal times happen in the order in which they were asked for."""

import heapq
from collections.abc import Callable


class VirtualTime:
    """Owns the clock and the heap of what is to come. `num_happened` counts what has; `on_pass` hears how many seconds
    pass before something happens."""

    def __init__(self, on_pass: Callable[[float], None] | None = None) -> None:
        self.now = 0.0
        self._on_pass = on_pass
        self.num_happened = 0
        self._number = 0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []

    def at(self, seconds: float, happen: Callable[..., None], *arguments: object) -> None:
        """`happen` at that time; never in the past."""
        if seconds < self.now:
            raise ValueError(f"{seconds} s is over: it is {self.now} s")
        self._number += 1
        heapq.heappush(self._heap, (seconds, self._number, happen, arguments))

    def after(self, seconds: float, happen: Callable[..., None], *arguments: object) -> None:
        self.at(self.now + seconds, happen, *arguments)

    def run(self, until: float = float("inf")) -> None:
        """Lets everything happen that is due up to and including `until`."""
        heap, pop = self._heap, heapq.heappop
        while heap and heap[0][0] <= until:
            seconds, _, happen, arguments = pop(heap)
            if self._on_pass is not None and seconds > self.now:
                self._on_pass(seconds - self.now)
            self.now = seconds
            self.num_happened += 1
            happen(*arguments)
        if until != float("inf"):
            self.now = max(self.now, until)
