"""From routers' reports to what comes in: differences of their counters, which miss nothing when a report is lost."""

import math
from collections import deque
from collections.abc import Mapping, Set
from dataclasses import dataclass
from statistics import median_low

from cluster.growth import COUNTED, VERDICTS, grown
from cluster.scaling.values import Traffic
from headrace.reports import RouterReport

LENGTH_WINDOWS = 5  # after so many half of what is known of lengths and hits is of them: a mix may change
BURST_MEMORY_SECONDS = 3600.0  # of burstiness, the same
GUESSED_OUTPUT_TOKENS = 256.0  # before the first answer
MIN_STEP_SECONDS = 0.05
LATE_SECONDS = 2.0  # by which two of a router's reports may be further apart than two looks
MOST_ROUTERS = 256  # that are remembered
UNHEARD_SECONDS = 3600.0  # after which a router that serves on, cut off from Redis, would have been missed by somebody
QUIET_SECONDS = 120.0  # without a request of it on any worker, after which a router that is not heard serves nobody
MIN_LOOKS, MIN_ARRIVALS = 3, 20  # of a window before any stands out; of each of them
CHANCE = 3.0  # deviations of Poisson's
SCV_STEPS = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)  # what is measured wobbles: sizes shall not


@dataclass(frozen=True, slots=True)
class _Step:
    """What happened between two looks. Not `whole`: of some router more, or less, than what came to it then."""

    ended_at: float
    seconds: float
    arrivals: float
    whole: bool
    met: int
    missed_ttft: int
    missed_tpot: int
    judged: int


class Meter:
    """Owns what was last heard of each router, and the sums. A router that is heard of for the first time counts from
    then on. One that was not heard of for a while has lost nothing; of one that was silent for more than the window,
    what came meanwhile is spread over that time, and is no rush of now. Who was denied has not arrived: more workers
    would change nothing for him."""

    def __init__(self, window_seconds: float) -> None:
        self._window_seconds = window_seconds
        self._last: dict[str, RouterReport] = {}
        self._present: Mapping[str, RouterReport] = {}
        self._steps: deque[_Step] = deque()
        self._looked_at: float | None = None
        self._sums = dict.fromkeys((*COUNTED, "answered"), 0.0)
        self._squares = 0.0
        self._means = 0.0
        self._busy_at: float | None = None
        self._unheard: dict[str, float] = {}
        self._at_work_at: dict[str, float] = {}
        self._cut = 0.0
        self._cut_seconds = 0.0

    def look(
        self,
        reports: Mapping[str, RouterReport],
        now: float,
        ended: Set[str] = frozenset(),
        at_work: Set[str] | None = None,
    ) -> float:
        """Takes the reports as they are now; returns how many requests arrived since the last look. `ended`: routers that
        ended in order. `at_work`: those of which some worker has a request; None: not every worker says."""
        seconds = now - self._looked_at if self._looked_at is not None else 0.0
        if seconds < 0:  # the clock was set back: what is later than now is of no window
            self._steps.clear()
        new = dict.fromkeys(COUNTED, 0.0)
        whole = self._present.keys() <= reports.keys()
        counts = dict.fromkeys(VERDICTS, 0)
        for name, report in reports.items():
            last = self._last.get(name)
            if last is None or report.arrivals < last.arrivals:
                continue
            # By the router's own clock, which runs on while nobody hears it.
            silent = report.seconds - last.seconds
            whole = whole and silent <= seconds + LATE_SECONDS
            share = seconds / silent if silent > max(self._window_seconds, seconds + LATE_SECONDS) else 1.0
            growth = grown(last, report)
            for counter in COUNTED:
                new[counter] += growth.of(counter) * share
            if share < 1:
                continue  # what it kept long ago is no attainment of now
            for (_, verdict), number in growth.classes.items():
                counts[verdict] += number
        new["arrivals"] = max(new["arrivals"] - new["denied"], 0.0)
        new["prompt_tokens"] = max(new["prompt_tokens"] - new["denied_tokens"], 0.0)
        begins = self._busy_at is None and bool(reports)
        if begins or new["arrivals"] or any(report.queued or report.in_flight for report in reports.values()):
            self._busy_at = now
        for name, report in reports.items():
            self._last.pop(name, None)
            self._last[name] = report
        while len(self._last) > max(MOST_ROUTERS, len(reports)):
            del self._last[next(iter(self._last))]
        self._miss(reports, now, ended, at_work)
        self._present = reports
        self._looked_at = now
        if seconds < MIN_STEP_SECONDS:
            return new["arrivals"]
        self._learn(new, counts, seconds, whole=whole)
        self._steps.append(
            _Step(
                now,
                seconds,
                new["arrivals"],
                whole,
                counts["met"],
                counts["missed_ttft"] + counts["missed_both"],
                counts["missed_tpot"] + counts["missed_both"],
                sum(counts.values()),
            )
        )
        while self._steps and self._steps[0].ended_at <= now - self._window_seconds:
            self._steps.popleft()
        self._remember_cut(self._steps[-1])
        return new["arrivals"]

    def _miss(self, reports: Mapping[str, RouterReport], now: float, ended: Set[str], at_work: Set[str] | None) -> None:
        """Who is not heard any more, had requests in flight and has not said that it ends died, or cannot reach Redis. The
        one has no request on any worker within seconds; the other has, while it serves."""
        gone = [name for name, last in self._present.items() if name not in reports and (last.in_flight or last.queued)]
        self._unheard = {
            name: since
            for name, since in {**dict.fromkeys(gone, now), **self._unheard}.items()
            if name not in reports and name not in ended and 0 <= now - since < UNHEARD_SECONDS
        }
        self._at_work_at = {
            name: now if at_work is None or name in at_work else self._at_work_at.get(name, now)
            for name in self._unheard
        }
        for name, at in self._at_work_at.items():
            if now - at >= QUIET_SECONDS:
                del self._unheard[name]

    def _learn(self, new: Mapping[str, float], counts: Mapping[str, int], seconds: float, *, whole: bool) -> None:
        keep = 0.5 ** (seconds / (LENGTH_WINDOWS * self._window_seconds))
        for counter in COUNTED:
            self._sums[counter] = self._sums[counter] * keep + new[counter]
        self._sums["answered"] = self._sums["answered"] * keep + max(
            new["ended"] - counts["failed"] - new["denied"], 0.0
        )
        if whole and self._steps and self._steps[-1].whole and abs(self._steps[-1].seconds / seconds - 1) < 0.2:
            # Neighbours' differences: what changes slowly is no burst.
            keep = 0.5 ** (seconds / BURST_MEMORY_SECONDS)
            last = self._steps[-1].arrivals
            self._squares = self._squares * keep + (new["arrivals"] - last) ** 2 / 2
            self._means = self._means * keep + (new["arrivals"] + last) / 2

    def traffic(self, now: float) -> Traffic:
        sums, steps, reports = self._sums, self._steps, self._present.values()
        seconds = sum(step.seconds for step in steps)
        judged = sum(step.judged for step in steps)
        prompts = sums["computed_tokens"] + sums["cached_tokens"]
        answered = sums["answered"]
        return Traffic(
            routers=len(self._present) if steps else 0,
            per_second=sum(step.arrivals for step in steps) / seconds if seconds else 0.0,
            input_tokens=sums["prompt_tokens"] / sums["arrivals"] if sums["arrivals"] else 0.0,
            output_tokens=sums["generated_tokens"] / answered if answered >= 1 else GUESSED_OUTPUT_TOKENS,
            hit_rate=sums["cached_tokens"] / prompts if prompts else 0.0,
            gap_scv=self._gap_scv(),
            queued=sum(report.queued for report in reports),
            queued_tokens=sum(report.queued_tokens for report in reports),
            oldest_queued_seconds=max((report.oldest_queued_seconds for report in reports), default=0.0),
            in_flight=sum(report.in_flight for report in reports),
            idle_seconds=now - self._busy_at if self._busy_at is not None else 0.0,
            judged=judged,
            attainment=sum(step.met for step in steps) / judged if judged else 1.0,
            missed_ttft=sum(step.missed_ttft for step in steps) / judged if judged else 0.0,
            missed_tpot=sum(step.missed_tpot for step in steps) / judged if judged else 0.0,
            unburst_per_second=self._unburst_per_second(),
            unheard=len(self._unheard),
        )

    def _unburst_per_second(self) -> float | None:
        """Each look counts as what is usual for the window and chance on top, at most. A load that stays higher is usual
        after half a window; until then what it piles up speaks for it. Bursts that come again and again are load: what was
        cut off lately is added as the mean that it was."""
        usual, seconds = self._usual(), sum(step.seconds for step in self._steps)
        if usual is None:
            return None
        least = sum(min(step.arrivals, _most(usual, step.seconds)) for step in self._steps)
        again = self._cut / max(self._cut_seconds, LENGTH_WINDOWS * self._window_seconds)
        return float(min(least / seconds + again, sum(step.arrivals for step in self._steps) / seconds))

    def _usual(self) -> float | None:
        """Arrivals a second of a look of this window; None: so few come that no look stands out."""
        rates = [step.arrivals / step.seconds for step in self._steps]
        if len(rates) < MIN_LOOKS:
            return None
        usual = median_low(rates)
        few = usual * sum(step.seconds for step in self._steps) < MIN_ARRIVALS * len(rates)
        return None if few else usual

    def _remember_cut(self, step: _Step) -> None:
        keep, usual = 0.5 ** (step.seconds / (LENGTH_WINDOWS * self._window_seconds)), self._usual()
        cut = max(step.arrivals - _most(usual, step.seconds), 0.0) if usual is not None else 0.0
        self._cut = self._cut * keep + cut
        self._cut_seconds = self._cut_seconds * keep + step.seconds

    def _gap_scv(self) -> float:
        """Variance over mean of arrivals in equal times: 1 of Poisson's, and what a queue feels of bursts."""
        found = self._squares / self._means if self._means > 100 else 1.0
        return min(SCV_STEPS, key=lambda step: abs(step - found))


def _most(usual: float, seconds: float) -> float:
    """Arrivals of so many seconds that chance alone may bring."""
    return usual * seconds + CHANCE * math.sqrt(usual * seconds)
