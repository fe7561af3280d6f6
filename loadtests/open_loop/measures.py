"""What a run was like, with confidence intervals. Pure: the same answers and seed give the same figures.

Intervals come from a block bootstrap (Künsch, Annals of Statistics 17, 1989): stretches of consecutive requests are drawn
with replacement, not single requests, because neighbours queue behind each other and so resemble each other; drawing them
one by one gives intervals that are too narrow. Batch means would give means alone; percentiles and goodput need this. To
draw 1,000 times over millions of gaps, each stretch is first counted into bins of 0.5 %, and what is drawn are the counts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.goodput import PERCENTILES, Slo, percentiles
from loadtests.open_loop.answers import Answer, Outcome, Run
from loadtests.open_loop.strain import strains

NUM_STRETCHES = 40
NUM_DRAWS = 1000
LEVEL = 0.95
FEWEST = 10  # requests below which no interval is given
BIN = 0.005
SMALLEST_SECONDS = 1e-5

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Figure:
    """A value and its 95 % interval; the ends are None where there are too few requests to tell."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Summary:
    """Of the requests due after the warm-up. Latencies are of those that came so far, keyed p50, p90, p99 and mean;
    `attainment` and goodput are of all, failed, shed and timed-out ones too. ITL: the gaps between events of one answer.
    `num_cut_short` finished with fewer tokens than were asked for: less was offered than the rate and the lengths say."""

    num_requests: int
    num_warmup: int
    outcomes: dict[str, int]
    errors: dict[str, int]
    seconds: float
    offered_per_second: float
    finished_per_second: float
    goodput_per_second: Figure
    attainment: Figure
    tokens_per_second: float
    tokens_per_event: float
    cached_fraction: float
    ttft_seconds: dict[str, Figure]
    tpot_seconds: dict[str, Figure]
    itl_seconds: dict[str, Figure]
    e2e_seconds: dict[str, Figure]
    peak_in_flight: int
    lateness_seconds: dict[str, float]
    lag_seconds: dict[str, float]
    cpu_share: float
    strains: list[str]
    num_cut_short: int = 0

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Summary":
        found = dict(data)
        for name in ("goodput_per_second", "attainment"):
            found[name] = Figure(**data[name])
        for name in ("ttft_seconds", "tpot_seconds", "itl_seconds", "e2e_seconds"):
            found[name] = {key: Figure(**figure) for key, figure in data[name].items()}
        return cls(**found)


def met(slo: Slo, answer: Answer) -> bool:
    ttft = answer.ttft_seconds
    return answer.outcome is Outcome.FINISHED and ttft is not None and slo.met(ttft, answer.tpot_seconds)


def summarise(run: Run, slo: Slo, warmup_seconds: float, seed: int = 0) -> Summary:
    counted = [answer for answer in run.answers if answer.due >= warmup_seconds]
    finished = [answer for answer in counted if answer.outcome is Outcome.FINISHED]
    seconds = _seconds(counted)
    stretches = _stretches(counted)
    draws = _draws(len(stretches), seed)
    attainment = _fraction(stretches, lambda answer: met(slo, answer), draws, len(counted))
    offered = len(counted) / seconds if seconds else 0.0
    num_events = sum(len(answer.times) for answer in finished)
    num_prompt = sum(answer.prompt_tokens for answer in finished)

    def latencies(of: Callable[[Answer], Floats]) -> dict[str, Figure]:
        return _latencies(stretches, of, draws, len(counted))

    return Summary(
        num_requests=len(counted),
        num_warmup=len(run.answers) - len(counted),
        outcomes={str(outcome): sum(answer.outcome is outcome for answer in counted) for outcome in Outcome},
        errors=_counts(answer.error for answer in counted if answer.error),
        seconds=seconds,
        offered_per_second=offered,
        finished_per_second=_finished_per_second(run, warmup_seconds),
        goodput_per_second=_scaled(attainment, offered),
        attainment=attainment,
        tokens_per_second=_tokens_per_second(run, warmup_seconds),
        tokens_per_event=sum(answer.num_tokens for answer in finished) / num_events if num_events else 0.0,
        cached_fraction=sum(answer.cached_tokens for answer in finished) / num_prompt if num_prompt else 0.0,
        ttft_seconds=latencies(lambda answer: _one(answer.ttft_seconds)),
        tpot_seconds=latencies(lambda answer: _one(answer.tpot_seconds)),
        itl_seconds=latencies(lambda answer: np.diff(answer.times)),
        e2e_seconds=latencies(lambda answer: _one(answer.e2e_seconds if answer.outcome is Outcome.FINISHED else None)),
        peak_in_flight=run.peak_in_flight,
        lateness_seconds=percentiles(run.effort.lateness_seconds),
        lag_seconds=percentiles(run.effort.lag_seconds),
        cpu_share=run.effort.cpu_share,
        strains=strains(run.effort),
        num_cut_short=sum(answer.cut_short for answer in counted),
    )


def _one(value: float | None) -> Floats:
    return np.array([] if value is None else [value])


def _scaled(figure: Figure, factor: float) -> Figure:
    ends = (figure.low, figure.high)
    return Figure(figure.value * factor, *(None if end is None else end * factor for end in ends))


def _seconds(counted: Sequence[Answer]) -> float:
    """So long did they take to come: n arrivals span n - 1 gaps, and the mean gap belongs to the last one, too."""
    if len(counted) < 2:
        return 0.0
    span = counted[-1].due - counted[0].due
    return span * len(counted) / (len(counted) - 1)


def _counts(errors: Any) -> dict[str, int]:
    """The commonest ten messages."""
    counts: dict[str, int] = {}
    for error in errors:
        counts[error] = counts.get(error, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: -item[1])[:10])


def _finished_per_second(run: Run, warmup_seconds: float) -> float:
    """Answers that ended while load came in. Those that end later say what was asked, not what was done."""
    span = run.seconds - warmup_seconds
    ends = [answer.ended for answer in run.answers if answer.outcome is Outcome.FINISHED]
    return sum(warmup_seconds <= end <= run.seconds for end in ends) / span if span > 0 else 0.0


def _tokens_per_second(run: Run, warmup_seconds: float) -> float:
    """Tokens that came between the warm-up and the last due time: later, load drains and the rate is no rate."""
    span = run.seconds - warmup_seconds
    if span <= 0:
        return 0.0
    return num_tokens_between(run.answers, warmup_seconds, run.seconds) / span


def num_tokens_between(answers: Sequence[Answer], begin: float, end: float) -> float:
    """Those of one answer are counted alike by its events: not every server says how many an event brings."""
    total = 0.0
    for answer in answers:
        if answer.times:
            times = np.asarray(answer.times)
            total += answer.num_tokens * float(((times >= begin) & (times <= end)).mean())
    return total


def _stretches(counted: Sequence[Answer]) -> list[Sequence[Answer]]:
    """Consecutive requests, as equally many as can be in each."""
    number = max(min(NUM_STRETCHES, len(counted)), 1)
    ends = [len(counted) * at // number for at in range(number + 1)]
    return [counted[start:end] for start, end in pairwise(ends)]


def _draws(num_stretches: int, seed: int) -> Floats:
    """How often each stretch is drawn, a row a draw."""
    return (
        np.random.default_rng(seed)
        .multinomial(num_stretches, np.full(num_stretches, 1 / num_stretches), size=NUM_DRAWS)
        .astype(np.float64)
    )


def _fraction(
    stretches: Sequence[Sequence[Answer]], holds: Callable[[Answer], bool], draws: Floats, num_requests: int
) -> Figure:
    sizes = np.array([len(stretch) for stretch in stretches], dtype=np.float64)
    good = np.array([sum(map(holds, stretch)) for stretch in stretches], dtype=np.float64)
    if not num_requests:
        return Figure(0.0)
    value = float(good.sum() / num_requests)
    if value in (0.0, 1.0) and num_requests >= FEWEST:
        # No draw knows the other outcome; the rule of three does (Hanley and Lippman-Hand, JAMA 249, 1983).
        unseen = 3 / num_requests
        return Figure(value, max(value - unseen, 0.0), min(value + unseen, 1.0))
    return _with_interval(value, (draws @ good) / (draws @ sizes), num_requests)


def _latencies(
    stretches: Sequence[Sequence[Answer]],
    of: Callable[[Answer], Floats],
    draws: Floats,
    num_requests: int,
) -> dict[str, Figure]:
    """Values are exact; their intervals as fine as a bin."""
    by_stretch = [np.concatenate([np.zeros(0), *map(of, stretch)]) for stretch in stretches]
    whole = np.concatenate(by_stretch)
    if not whole.size:
        return {}
    used, at = np.unique(_bins(whole), return_inverse=True)
    starts = np.cumsum([len(values) for values in by_stretch])[:-1]
    counts = np.stack([np.bincount(part, minlength=len(used)) for part in np.split(at, starts)]).astype(np.float64)
    drawn_counts = draws @ counts
    totals = draws @ np.array([values.sum() for values in by_stretch])
    sizes = drawn_counts.sum(axis=1)
    some = sizes > 0
    cumulated = np.cumsum(drawn_counts[some], axis=1)
    found = {"mean": _with_interval(float(whole.mean()), totals[some] / sizes[some], num_requests)}
    exact = percentiles(np.sort(whole).tolist())
    for percent in PERCENTILES:
        ranks = np.ceil(sizes[some] * percent / 100)
        reached = used[(cumulated < ranks[:, None]).sum(axis=1)]
        drawn = SMALLEST_SECONDS * np.exp((reached + 0.5) * BIN)
        found[f"p{percent}"] = _with_interval(exact[f"p{percent}"], drawn, num_requests)
    return found


def _bins(values: Floats) -> npt.NDArray[np.int64]:
    logs = np.log(np.maximum(values, SMALLEST_SECONDS) / SMALLEST_SECONDS)
    return (logs / BIN).astype(np.int64)


def _with_interval(value: float, drawn: Floats, num_requests: int) -> Figure:
    """The value lies within its interval even where a bin is coarser than the interval is wide."""
    if num_requests < FEWEST or not drawn.size:
        return Figure(value)
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Figure(value, min(float(low), value), max(float(high), value))
