"""When a step is given to the device behind one that it computes. Pure: told what happened and when, it says until when.

At once, the step after the next is fixed while its predecessor has hardly begun: what becomes runnable meanwhile waits
for the rest of the one and for all of the other. Shortly before its predecessor's end, it joins. What is too late leaves
the device idle, which every sequence pays for; so the time kept in hand is learnt from what it would have taken, and
where nothing is known, or nothing is gained, a step is launched at once.

What it would have taken has a long tail: a host that stands still now and then, launches of other rows, launches that
wait for the device whatever they are given. To cover all of it holds nothing, ever. So a tail may cost
IDLE_FRACTION, steps of other rows have a lead of their own, and what a launch waited for the device is not what it needed.
"""

from bisect import insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import NamedTuple

from headrace.costmodel import CostModel
from workers.scheduling.plan import StepResult
from workers.scheduling.work import StepKind, StepWork

MIN_SAMPLES = 16
WINDOW = 256
IDLE_FRACTION = 0.005  # of the device's time, for what becomes runnable to wait for one step and not for two
RECENT = 9  # steps, by whose median the fit is corrected
MARGIN_SECONDS = 5e-4  # so late is an end heard of
LAUNCH_SECONDS = 2e-3  # of a launch that waits for nothing, until it is seen


class Lead:
    """The time kept in hand for one sort of steps. Owned by a Pacing."""

    def __init__(self) -> None:
        self._needed: deque[float] = deque(maxlen=WINDOW)
        self._most: deque[float] = deque(maxlen=WINDOW)
        self._rising: list[float] = []  # what is in _needed: to sort it for every step takes longer than all the rest
        self.seconds: float | None = None

    def add(self, needed: float, most: float) -> None:
        """A step should have been given `needed`; `most`, its predecessor's length, is all that it could have been: what
        it lacks then no lead gives."""
        if len(self._needed) == WINDOW:
            self._rising.remove(self._needed[0])
        self._needed.append(min(max(needed, 0.0), most))
        self._most.append(most)
        insort(self._rising, self._needed[-1])
        if len(self._needed) >= MIN_SAMPLES:
            self.seconds = least_lead(self._rising, sum(self._most))


def least_lead(rising: Sequence[float], step_seconds: float) -> float:
    """The shortest with which the device would have waited for at most IDLE_FRACTION of all these steps' time. `rising`:
    what each needed."""
    total = -IDLE_FRACTION * step_seconds
    lead = 0.0
    for count, needed in enumerate(reversed(rising), 1):
        if needed <= lead:
            break
        total += needed
        lead = max(lead, total / count)
    return lead


@dataclass(frozen=True, slots=True)
class Paced:
    """Of a step that was launched while another computed, in seconds: for how long it was held, the time that it was given
    until that one's expected end, what was left of it when it had been launched (negative: the device waited), the time
    kept in hand for its sort, None while that is unknown, and its predecessor's expected length; how long the launch took.
    `alike`: the rows of its predecessor and no others."""

    alike: bool
    held: float
    given: float
    most: float
    lead: float | None
    ahead: float = 0.0
    launch: float = 0.0


class _Step(NamedTuple):
    """One in flight. `expected`: how long it takes, by the fit as it was when the step was launched."""

    number: int
    work: StepWork
    launched_at: float
    expected: float
    paced: Paced | None


def needed(paced: Paced) -> float:
    """What it should have been given. A launch that took half a step and ended as that did waited for it: given more time
    it would have waited longer, and given less it shows what it takes by itself."""
    lacked = paced.given - paced.ahead + MARGIN_SECONDS
    if paced.launch > paced.most / 2 and abs(paced.ahead) <= 2 * MARGIN_SECONDS:
        return lacked - (paced.launch - LAUNCH_SECONDS)
    return lacked


class Pacing:
    """Owned by one engine. From some step on each is launched() and then landed(), in one order; of two in flight the first
    computes.

    Only behind a step of decodes alone is anything held: a prompt's length is known less well, and its chunks should
    follow each other. What a step needed: the time that it should have been given before the expected end to be launched
    at the true one: planning, the way to the ranks, their launch, the late timer, and by how much that end was expected too
    late. That end is the fit's, corrected by how long the last RECENT steps took: the fit is of all batches. `last`: of
    the last that landed, where it was behind another."""

    def __init__(self) -> None:
        self.last: Paced | None = None
        self._leads = {True: Lead(), False: Lead()}
        self._flights: deque[_Step] = deque()
        self._errors: deque[float] = deque(maxlen=RECENT)
        self._ended_at = 0.0
        self._held_since: float | None = None
        self._release_at: float | None = None

    def lead_seconds(self, *, alike: bool) -> float | None:
        """The time kept in hand; None: not known yet."""
        return self._leads[alike].seconds

    def release_at(self, now: float, *, alike: bool) -> float | None:
        """When the next step should be planned and launched; None: at once. `alike`: as far as is known now, it has the
        rows of the one in flight. To be asked again when that changes."""
        if self._held_since is None:
            self._held_since = now
        self._release_at = None
        end, lead = self._expected_end(), self._leads[alike].seconds
        if end is None or lead is None:
            return None
        self._release_at = max(end - lead, now)
        return self._release_at

    def launched(self, number: int, work: StepWork, cost: CostModel, began: float, now: float, *, starts: bool) -> None:
        """`began`: its planning, where it was not held. One that was held began when that ended, however late it woke.
        `starts`: a row is taken by another sequence."""
        end, release, since = self._expected_end(), self._release_at, self._held_since
        self._release_at = self._held_since = None
        paced = None
        if end is not None:
            before = self._flights[0]
            alike = not starts and work.kind is StepKind.DECODE and work.num_sequences == before.work.num_sequences
            paced = Paced(
                alike,
                held=began - since if since is not None else 0.0,
                given=end - (began if release is None else min(release, began)),
                most=end - max(self._ended_at, before.launched_at),
                lead=self._leads[alike].seconds,
            )
        self._flights.append(_Step(number, work, now, work.seconds(cost), paced))

    def landed(self, result: StepResult, ended_at: float) -> None:
        """`ended_at`: when it was first heard that it had ended."""
        self._ended_at, self.last = ended_at, None
        if not self._flights or self._flights[0].number != result.number:
            return
        step = self._flights.popleft()
        paced = step.paced
        if step.work.kind is StepKind.DECODE and step.expected > 0 and (paced is None or result.ahead_seconds >= 0):
            self._errors.append(result.seconds / step.expected)
        if paced is not None:
            self.last = replace(paced, ahead=result.ahead_seconds, launch=result.launch_seconds)
            self._leads[paced.alike].add(needed(self.last), paced.most)

    def _expected_end(self) -> float | None:
        """Of the one step in flight, where it decodes alone, and enough such have shown how good the fit is."""
        if len(self._flights) != 1 or len(self._errors) < RECENT:
            return None
        step = self._flights[0]
        if step.work.kind is not StepKind.DECODE:
            return None
        return max(self._ended_at, step.launched_at) + step.expected * median(self._errors)
