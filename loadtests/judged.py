"""What runs of disagg were worth at an SLO: goodput per GPU, the best rate and chunk budget of each pool, and the TPOT
below which two pools beat one. Pure: from what was kept of each run."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.goodput import Slo

# (TTFT s, TPOT s, the request's P99 ITL s where it counts too)
SLOS: dict[str, tuple[float, float, float | None]] = {
    "chat": (0.5, 0.030, None),
    "code": (1.0, 0.020, None),
    "long": (3.0, 0.050, None),
    "tight": (1.0, 0.012, None),
    "smooth": (1.0, 0.020, 0.040),
}
TIGHT_TTFT_SECONDS = {"mooncake": 3.0}
TPOTS_MS = tuple(range(6, 61))
PAYS = 1.05  # less is within what two runs of the same differ by


@dataclass(frozen=True, slots=True)
class Point:
    """One run: a trace at a rate (requests a second, all GPUs together) on a deployment. `answers`: of each request due
    after the warm-up (TTFT, TPOT or None, P99 ITL or None), or None where it did not finish."""

    trace: str
    deployment: str
    chunk: int
    num_gpus: int
    rate: float
    seconds: float
    num_too_long: int
    answers: tuple[tuple[float, float | None, float | None] | None, ...]
    strains: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[str, str, int, float]:
        return self.trace, self.deployment, self.chunk, self.rate

    @property
    def aggregated(self) -> bool:
        return "U" in self.deployment

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> "Point":
        answers = tuple(None if each is None else tuple(each) for each in found["answers"])
        return cls(**{**found, "answers": answers, "strains": tuple(found.get("strains", ()))})

    def goodput_per_gpu(self, slo: Slo, itl_seconds: float | None = None) -> float:
        """Requests a second that met the SLO; those that failed count as none."""
        met = sum(
            each is not None
            and slo.met(each[0], each[1])
            and (itl_seconds is None or each[2] is None or each[2] <= itl_seconds)
            for each in self.answers
        )
        return met / self.seconds / self.num_gpus


@dataclass(frozen=True, slots=True)
class Verdict:
    """The best of one pool, over rates and chunk budgets, beside the best of two pools, over rates and splits."""

    trace: str
    slo: str
    aggregated: float
    split: float
    aggregated_by: str
    split_by: str

    @property
    def ratio(self) -> float | None:
        return self.split / self.aggregated if self.aggregated else None


def slo_of(name: str, trace: str) -> tuple[Slo, float | None]:
    ttft, tpot, itl = SLOS[name]
    return Slo(TIGHT_TTFT_SECONDS.get(trace, ttft) if name in ("tight", "smooth") else ttft, tpot), itl


def verdicts(points: Iterable[Point]) -> list[Verdict]:
    found = []
    for trace, of_trace in _by_trace(points).items():
        for name in SLOS:
            slo, itl = slo_of(name, trace)
            found.append(_verdict(trace, name, of_trace, slo, itl))
    return found


def _by_trace(points: Iterable[Point]) -> dict[str, list[Point]]:
    by_trace: defaultdict[str, list[Point]] = defaultdict(list)
    for point in points:
        by_trace[point.trace].append(point)
    return dict(sorted(by_trace.items()))


def _verdict(trace: str, name: str, points: Sequence[Point], slo: Slo, itl: float | None) -> Verdict:
    best: dict[bool, tuple[float, str]] = {True: (0.0, ""), False: (0.0, "")}
    for point in points:
        value = point.goodput_per_gpu(slo, itl)
        if value > best[point.aggregated][0]:
            best[point.aggregated] = value, f"{point.deployment}, chunks of {point.chunk}, {point.rate:g} requests/s"
    (aggregated, by), (split, split_by) = best[True], best[False]
    return Verdict(trace, name, aggregated, split, by, split_by)


def by_tpot(points: Sequence[Point], trace: str, ttft_seconds: float) -> list[tuple[int, float, float]]:
    """(TPOT target in ms, best goodput per GPU of one pool, of two pools), over all targets."""
    mine = [point for point in points if point.trace == trace]
    found = []
    for tpot_ms in TPOTS_MS:
        verdict = _verdict(trace, "", mine, Slo(ttft_seconds, tpot_ms / 1e3), None)
        found.append((tpot_ms, verdict.aggregated, verdict.split))
    return found


def crossover_ms(curve: Sequence[tuple[int, float, float]]) -> int | None:
    """The largest TPOT target at which two pools are better by PAYS; None: at none."""
    return max((tpot_ms for tpot_ms, aggregated, split in curve if split and split >= aggregated * PAYS), default=None)
