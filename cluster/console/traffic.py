"""What routers' counters say of the time between two looks, and what is kept of it. Pure.

A router's counters begin at 0 with its id. Of a router that was there before the first look nothing is known but what it
counts from then on; one that comes later is counted from its start. One that leaves takes away nothing that was counted.
"""

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields

from headrace.reports import ClassCounts, RouterReport

COUNTED = (
    "arrivals",
    "prompt_tokens",
    "computed_tokens",
    "cached_tokens",
    "generated_tokens",
    "ended",
    "ttft_seconds",
)
VERDICTS = tuple(its.name for its in fields(ClassCounts))


@dataclass(frozen=True, slots=True)
class Growth:
    """What was counted over `seconds`; fields as in RouterReport. `classes`: by (class, verdict)."""

    seconds: float = 0.0
    counts: Mapping[str, float] = field(default_factory=dict)
    classes: Mapping[tuple[str, str], int] = field(default_factory=dict)
    pairs: Mapping[tuple[str, str], int] = field(default_factory=dict)

    def of(self, name: str) -> float:
        return self.counts.get(name, 0)

    def per_second(self, name: str) -> float:
        return self.of(name) / self.seconds if self.seconds else 0.0

    @property
    def hit_rate(self) -> float | None:
        """Of the prompt tokens whose computation was asked of workers, those that they had; None where there were none."""
        cached = self.of("cached_tokens")
        wanted = cached + self.of("computed_tokens")
        return cached / wanted if wanted else None

    @property
    def mean_ttft_seconds(self) -> float | None:
        answered = sum(self.pairs.values())
        return self.of("ttft_seconds") / answered if answered else None

    def outcomes(self, name: str) -> ClassCounts:
        return ClassCounts(**{verdict: self.classes.get((name, verdict), 0) for verdict in VERDICTS})

    @property
    def all_outcomes(self) -> ClassCounts:
        """Of all classes together."""
        sums: Counter[str] = Counter()
        for (_, verdict), number in self.classes.items():
            sums[verdict] += number
        return ClassCounts(**sums)


NOTHING = Growth()


def attainment(counts: ClassCounts) -> float | None:
    """Which part of the requests met their targets; None of none."""
    ended = num_ended(counts)
    return counts.met / ended if ended else None


def num_ended(counts: ClassCounts) -> int:
    return sum(getattr(counts, verdict) for verdict in VERDICTS)


def grown(before: RouterReport | None, after: RouterReport) -> Growth:
    """One router's counters, from `before` (None: its start) to `after`. A counter never shrinks: where it seems to,
    something was left out of a report, and nothing is counted."""
    counts = {name: max(getattr(after, name) - (getattr(before, name) if before else 0), 0) for name in COUNTED}
    old_classes = before.classes if before else {}
    old_pairs = before.pairs if before else {}
    classes = {
        (name, verdict): more
        for name, its in after.classes.items()
        for verdict in VERDICTS
        if (more := getattr(its, verdict) - getattr(old_classes.get(name, ClassCounts()), verdict)) > 0
    }
    pairs = {pair: more for pair, number in after.pairs.items() if (more := number - old_pairs.get(pair, 0)) > 0}
    return Growth(0.0, counts, classes, pairs)


def together(growths: Iterable[Growth], seconds: float) -> Growth:
    counts: Counter[str] = Counter()
    classes: Counter[tuple[str, str]] = Counter()
    pairs: Counter[tuple[str, str]] = Counter()
    for growth in growths:
        for name, number in growth.counts.items():
            counts[name] += number  # type: ignore[assignment]
        classes.update(growth.classes)
        pairs.update(growth.pairs)
    return Growth(seconds, counts, classes, pairs)


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
