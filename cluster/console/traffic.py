"""What was counted between looks, and what is kept of it. Pure.

Of a router that was there before the first look nothing is known but what it counts from then on; one that comes later is
counted from its start. One that leaves takes away nothing that was counted.
"""

from collections import deque
from collections.abc import Mapping

from cluster.growth import Growth, grown, together
from headrace.reports import RouterReport


class Traffic:
    """Mutable, owned by the watcher: the growth between looks of the last `keep_seconds`."""

    def __init__(self, keep_seconds: float) -> None:
        self._keep_seconds = keep_seconds
        self._last: dict[str, RouterReport] = {}
        self._steps: deque[tuple[float, Growth]] = deque()
        self._heard_at: float | None = None
        self._began_at: float | None = None

    def hear(self, now: float, reports: Mapping[str, RouterReport]) -> None:
        """All reports that there are, as they stand at `now`."""
        if self._heard_at is not None:
            growths = [grown(self._last.get(router), report) for router, report in reports.items()]
            self._steps.append((now, together(growths, now - self._heard_at)))
        else:
            self._began_at = now
        # One whose report is late counts on from where it was.
        self._last = {**self._last, **reports}
        self._heard_at = now
        while self._steps and self._steps[0][0] <= now - self._keep_seconds:
            self._steps.popleft()
        if len(self._last) > 4 * len(reports) + 16:
            self._last = dict(reports)

    def last(self, now: float, seconds: float) -> Growth:
        """What grew in the last `seconds`, or since there is anything to compare."""
        began = self._began_at if self._began_at is not None else now
        steps = []
        for at, growth in reversed(self._steps):
            if at <= now - seconds:
                break
            steps.append(growth)
        return together(steps, min(seconds, now - began))


class Ring:
    """Points at least `step_seconds` apart, the last `length` of them. Mutable, owned by the watcher."""

    def __init__(self, step_seconds: float, length: int) -> None:
        self.step_seconds = step_seconds
        self.points: deque[dict[str, object]] = deque(maxlen=length)
        self._last_at: float | None = None

    def due(self, now: float) -> bool:
        return self._last_at is None or now - self._last_at >= self.step_seconds

    def add(self, now: float, point: dict[str, object]) -> None:
        self._last_at = now
        self.points.append(point)
