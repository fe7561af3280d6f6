"""What routers' counters say of the time between two reports: differences, which miss nothing when a report is lost. Pure.

A router's counters begin at 0 with its id, and never shrink.
"""

from collections import Counter
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
    "denied",
    "denied_tokens",
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
