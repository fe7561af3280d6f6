"""When a step is given to the device behind one that it computes. Pure: told what happened and when, it says until when.

At once, the step after the next is fixed while its predecessor has hardly begun: what becomes runnable meanwhile waits
for the rest of the one and for all of the other. Shortly before its predecessor's end, it joins. What is too late leaves
the device idle, which every sequence pays for; so the time kept in hand is learnt from what it would have taken, and
where nothing is known, or nothing is gained, a step is launched at once.
"""

from collections import deque
from dataclasses import dataclass
from heapq import nlargest

from headrace.costmodel import CostModel
from workers.scheduling.work import StepKind, StepWork

MIN_SAMPLES = 16
WINDOW = 64
MARGIN_SECONDS = 1e-3  # timers of an event loop are as coarse


@dataclass(frozen=True, slots=True)
class _Behind:
    """Of a step that was launched while another computed: the time it was given until that one's expected end."""

    given_seconds: float


class Pacing:
    """Owned by one engine. Every step is launched() and then landed(), in one order; of two in flight the first computes.

    Only behind a step of decodes alone is anything held: a prompt's length is known less well, and its chunks should
    follow each other. `needed`: of each step that was launched behind another, the time it should have been given before
    the expected end to be launched at the true one: planning, the way to the ranks, their launch, the late timer, and by
    how much that end was expected too late. Of the last WINDOW the most but one is kept in hand, and MARGIN_SECONDS more.
    """

    def __init__(self) -> None:
        self._needed: deque[float] = deque(maxlen=WINDOW)
        self._flights: deque[tuple[StepWork, float, _Behind | None]] = deque()
        self._ended_at = 0.0
        self._release_at: float | None = None

    @property
    def lead_seconds(self) -> float | None:
        """The time kept in hand; None: not known yet."""
        if len(self._needed) < MIN_SAMPLES:
            return None
        return max(nlargest(2, self._needed)[1], 0.0) + MARGIN_SECONDS

    def release_at(self, cost: CostModel) -> float | None:
        """When the next step should be planned and launched; None: at once."""
        self._release_at = None
        end, lead = self._expected_end(cost), self.lead_seconds
        if end is None or lead is None:
            return None
        self._release_at = end - lead
        return self._release_at

    def launched(self, work: StepWork, cost: CostModel, began: float, now: float) -> None:
        """`began`: its planning, where it was not held. One that was held began when that ended, however late it woke."""
        end, release, self._release_at = self._expected_end(cost), self._release_at, None
        behind = None
        if end is not None:
            behind = _Behind(end - (began if release is None else min(release, began)))
        self._flights.append((work, now, behind))

    def landed(self, ahead_seconds: float, now: float) -> None:
        """`ahead_seconds`: how long before its predecessor's end all ranks had launched it; negative: the device waited."""
        _, _, behind = self._flights.popleft()
        self._ended_at = now
        if behind is not None:
            self._needed.append(behind.given_seconds - ahead_seconds)

    def _expected_end(self, cost: CostModel) -> float | None:
        """Of the one step in flight, where it decodes alone."""
        if len(self._flights) != 1:
            return None
        work, launched_at, _ = self._flights[0]
        if work.kind is not StepKind.DECODE:
            return None
        return max(self._ended_at, launched_at) + work.seconds(cost)
