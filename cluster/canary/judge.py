"""Whether a canary is worse than what serves beside it, beyond chance. Pure.

Conversations are drawn to one side by a hash, so the two sides see the same traffic over the same time, and what differs is
the revision or chance. Six tests: the part that fails, the part that misses its targets, TTFT and TPOT at the median and at
90 %.

    parts       difference of two proportions, interval of Newcombe (1998, method 10), made of two Wilson intervals: it
                holds at few requests and at 0 or 100 %, where the textbook's normal interval does not
    latencies   ratio of quantiles, from the order statistics that bound each with the binomial's normal approximation:
                nothing is assumed of how latencies are distributed, which is skewed, of several peaks, and never normal

A side is worse where the whole interval is beyond the threshold. The confidence is over the whole life of a canary: it is
looked at again and again, which by itself would find a fault sooner or later, so look k may err with error / ((k+1)(k+2)),
all of which sum to `error`, split among the tests (Bonferroni). Looks come as evidence grows by LOOK_GROWTH. What no
interval knows: requests that wait in one queue are not independent; the thresholds are there for that.
"""

from math import inf, sqrt
from statistics import NormalDist

from cluster.canary.values import Evidence, Judgement, Test, Verdict
from headrace.config import CanaryConfig
from headrace.reports import RevisionCounts, seconds_of

LOOK_GROWTH = 1.25
QUANTILES = (0.5, 0.9)
NUM_TESTS = 2 + 2 * len(QUANTILES)
Histogram = dict[int, int]


def is_due(its: CanaryConfig, evidence: Evidence, base: str) -> bool:
    """Whether there is enough new evidence for another look."""
    return smaller(its, evidence, base) >= max(its.min_requests, LOOK_GROWTH * evidence.num_looked_at)


def smaller(its: CanaryConfig, evidence: Evidence, base: str) -> int:
    return min(evidence.of(base).ended, evidence.of(its.revision).ended)


def judge(its: CanaryConfig, base: RevisionCounts, canary: RevisionCounts, look: int) -> Judgement:
    """At look number `look`, from 0."""
    error = (1 - its.confidence) / ((look + 1) * (look + 2))
    if min(base.ended, canary.ended) < its.min_requests:
        return Judgement(look, Verdict.FEW, base.ended, canary.ended, error)
    z = NormalDist().inv_cdf(1 - error / NUM_TESTS)
    each = NormalDist().inv_cdf(1 - error / NUM_TESTS / 2)  # of two quantiles, either of which may be off
    tests = [
        _parts("failed", base.failed, base.ended, canary.failed, canary.ended, its.max_error_increase, z),
        _parts(
            "missed targets",
            base.ended - base.met,
            base.ended,
            canary.ended - canary.met,
            canary.ended,
            its.max_attainment_drop,
            z,
        ),
    ]
    for name, ours, theirs, limit in (
        ("TTFT", base.ttft, canary.ttft, its.max_ttft_ratio),
        ("TPOT", base.tpot, canary.tpot, its.max_tpot_ratio),
    ):
        for part in QUANTILES:
            what = f"{name} at {'the median' if part == 0.5 else f'{part:.0%}'}"
            tests.append(_latencies(what, dict(ours), dict(theirs), part, limit, each, its.min_requests))
    verdicts = {test.verdict for test in tests}
    verdict = next(one for one in (Verdict.WORSE, Verdict.UNDECIDED, Verdict.NO_WORSE) if one in verdicts)
    return Judgement(look, verdict, base.ended, canary.ended, error, tuple(tests))


def _verdict(low: float, high: float, limit: float) -> Verdict:
    if low > limit:
        return Verdict.WORSE
    return Verdict.NO_WORSE if high <= limit else Verdict.UNDECIDED


def timed(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 0.9995 else f"{seconds:,.2f} s"


def said(test: Test) -> str:
    """A comparison in words, with its numbers."""
    if test.change is None or test.base is None or test.canary is None or test.low is None:
        return f"{test.name}: {test.verdict.value}"
    if test.name.startswith(("TTFT", "TPOT")):
        return (
            f"{test.name} {timed(test.canary)} against {timed(test.base)}, at least {test.low:.2f} times as "
            f"long, {test.limit:g} is allowed"
        )
    return (
        f"{test.name} {test.canary:.1%} against {test.base:.1%}, at least {100 * test.low:.1f} points more, "
        f"{100 * test.limit:g} are allowed"
    )


# -- parts


def _parts(name: str, ours: int, of: int, theirs: int, of_theirs: int, limit: float, z: float) -> Test:
    base, canary = ours / of, theirs / of_theirs
    low, high = difference(ours, of, theirs, of_theirs, z)
    return Test(name, base, canary, canary - base, low, high, limit, _verdict(low, high, limit))


def difference(ours: int, of: int, theirs: int, of_theirs: int, z: float) -> tuple[float, float]:
    """Newcombe's interval of theirs/of_theirs − ours/of; one side of it holds with the probability of z."""
    base, canary = ours / of, theirs / of_theirs
    base_low, base_high = wilson(ours, of, z)
    canary_low, canary_high = wilson(theirs, of_theirs, z)
    change = canary - base
    return (
        change - sqrt((canary - canary_low) ** 2 + (base_high - base) ** 2),
        change + sqrt((canary_high - canary) ** 2 + (base - base_low) ** 2),
    )


def wilson(number: int, of: int, z: float) -> tuple[float, float]:
    part, square = number / of, z * z
    middle = (part + square / (2 * of)) / (1 + square / of)
    half = z / (1 + square / of) * sqrt(part * (1 - part) / of + square / (4 * of * of))
    return max(middle - half, 0.0), min(middle + half, 1.0)


# -- latencies


def _latencies(name: str, base: Histogram, canary: Histogram, part: float, limit: float, z: float, least: int) -> Test:
    ours, theirs = quantile(base, part), quantile(canary, part)
    if ours is None or theirs is None or min(sum(base.values()), sum(canary.values())) < least:
        return Test(name, ours, theirs, None, None, None, limit, Verdict.UNDECIDED)
    base_low, base_high = bounds(base, part, z)
    canary_low, canary_high = bounds(canary, part, z)
    low, high = canary_low / base_high, (canary_high / base_low if base_low else inf)
    return Test(name, ours, theirs, theirs / ours, low, high, limit, _verdict(low, high, limit))


def bounds(histogram: Histogram, part: float, z: float) -> tuple[float, float]:
    """Between these the true quantile lies: by the ranks that it has among as many drawn ones, each at the outer end of
    its bucket."""
    number = sum(histogram.values())
    middle, half = number * part, z * sqrt(number * part * (1 - part)) + 1
    low, high = max(int(middle - half), 1), int(middle + half) + 1
    upper = inf if high > number else seconds_of(_bucket(histogram, high) + 1)
    return seconds_of(_bucket(histogram, low)), upper


def quantile(histogram: Histogram, part: float) -> float | None:
    """The middle of its bucket; None of none."""
    number = sum(histogram.values())
    if not number:
        return None
    bucket = _bucket(histogram, max(int(number * part + 0.5), 1))
    return sqrt(seconds_of(bucket) * seconds_of(bucket + 1))


def _bucket(histogram: Histogram, rank: int) -> int:
    """Of the `rank`th smallest, from 1."""
    for bucket in sorted(histogram):
        rank -= histogram[bucket]
        if rank <= 0:
            return bucket
    return max(histogram)
