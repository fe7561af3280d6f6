"""Where a throughput–latency curve bends: the point of greatest power, throughput ÷ latency (Kleinrock, "Power and
deterministic rules of thumb for probabilistic problems in computer communications", ICC 1979). Below it latency grows
more slowly than throughput, in proportion; above it faster. It needs no thresholds and no smooth curve, so a handful of
rates will do; for M/M/1 it is half of the capacity.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never


@dataclass(frozen=True, slots=True)
class Point:
    """One rate of a sweep: what was offered, what came out of it (both per second), and how long it took."""

    offered: float
    throughput: float
    latency_seconds: float


@dataclass(frozen=True, slots=True)
class Knee:
    """At this rate, between slower and faster ones."""

    offered: float


@dataclass(frozen=True, slots=True)
class Beyond:
    """The greatest power is at an end of the sweep; the knee lies at or past it. `end`: "lowest" or "highest"."""

    offered: float
    end: str


@dataclass(frozen=True, slots=True)
class TooFew:
    """Fewer than three rates gave an answer."""

    num_points: int


Found = Knee | Beyond | TooFew


def knee(points: Sequence[Point]) -> Found:
    usable = sorted(
        (point for point in points if point.throughput > 0 and point.latency_seconds > 0),
        key=lambda point: point.offered,
    )
    if len(usable) < 3:
        return TooFew(len(usable))
    at = max(range(len(usable)), key=lambda index: usable[index].throughput / usable[index].latency_seconds)
    if 0 < at < len(usable) - 1:
        return Knee(usable[at].offered)
    return Beyond(usable[at].offered, "lowest" if at == 0 else "highest")


def said(found: Found) -> str:
    match found:
        case Knee(offered):
            return f"knee at {offered:g} requests a second: greatest throughput ÷ mean E2E"
        case Beyond(offered, end):
            way = "lower" if end == "lowest" else "higher"
            return f"no knee: throughput ÷ mean E2E is greatest at the {end} rate, {offered:g}; sweep {way}"
        case TooFew(num_points):
            return f"no knee: {num_points} rates gave an answer, it takes 3"
        case _:
            assert_never(found)
