"""Traffic as planning and simulation need it: a load at the peak, rates by the hour, and rows to replay.

Of a trace the peak is its busiest stretch, and the simulation replays that; a made one draws log-normal lengths and Gamma
gaps, with prefixes that give the hit rate that was asked for.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random

from cluster.planning.asked import TokensAsked, TrafficAsked
from cluster.planning.load import Length, Load
from headrace import generators, traces
from headrace.errors import ConfigError
from headrace.traces import TOKENS_PER_ID, TraceRow

SAMPLE = 128  # lengths that stand for all
PREFIXES = 8  # that made traffic shares
HOURS = 24
MOST_REDRAWN = 1  # a run is seconds, and a plan is waited for
STRETCH_SECONDS = 60.0
SHORTEST_SECONDS, LONGEST_SECONDS = 1e-3, 1e10  # of a trace whose timestamps are in the unit that they are read in


@dataclass(frozen=True, slots=True)
class Traffic:
    """`by_hour`: requests a second in each hour of a day; `peak`: the load that pools are sized for, without headroom.
    `rows` is what a simulation replays, at whatever rate, `redrawn` what it might have been; `about` says it in a line.
    `num_too_long` of `num_seen` requests do not fit the context, and are in none of it."""

    peak: Load
    by_hour: Sequence[float]
    rows: Sequence[TraceRow]
    about: str
    assumptions: tuple[str, ...]
    longest_tokens: int
    num_too_long: int = 0
    num_seen: int = 0
    redrawn: tuple[Sequence[TraceRow], ...] = ()

    @property
    def drawn_anew(self) -> Iterator["Traffic"]:
        """The same traffic as chance might have made it, too. A trace was made once."""
        return (replace(self, rows=rows) for rows in self.redrawn)

    @property
    def mean_per_second(self) -> float:
        return sum(self.by_hour) / len(self.by_hour)

    @property
    def input_tokens(self) -> float:
        return self.peak.mean(lambda length: length.input_tokens)

    @property
    def output_tokens(self) -> float:
        return self.peak.mean(lambda length: length.output_tokens)

    @property
    def hit_rate(self) -> float:
        return self.peak.mean(lambda length: length.cached_tokens) / self.input_tokens

    def replay(self, per_second: float, num_requests: int) -> list[TraceRow]:
        """So many requests, at that rate."""
        rows = list(self.rows[:num_requests])
        if len(rows) < num_requests:
            rows = generators.repeated(rows, num_requests)
        return generators.scaled(rows, per_second / generators.rate(rows)) if len(rows) > 1 else rows


def of(asked: TrafficAsked, *, max_context_tokens: int, num_rows: int, seed: int) -> Traffic:
    """ConfigError when a trace cannot be read, or holds nothing that fits the context."""
    if asked.trace is not None:
        return _of_trace(asked, max_context_tokens)
    number = max(num_rows, SAMPLE)
    drawn = [_made(asked, max_context_tokens, number, seed + at) for at in range(1 + MOST_REDRAWN)]
    return replace(drawn[0], redrawn=tuple(one.rows for one in drawn[1:]))


def hours(asked: TrafficAsked, mean: float) -> tuple[list[float], str]:
    """Each hour's rate, and what was assumed of it."""
    if asked.day is not None:
        total = sum(asked.day)
        return [mean * HOURS * weight / total for weight in asked.day], "rates by the hour are as given"
    ratio = asked.peak_to_mean or 1.0
    if ratio == 1.0:
        return [mean] * HOURS, "every hour is as busy as the mean: no day curve was given"
    # A raised cosine to a power has any peak over mean; the sharper, the higher.
    low, high = 0.0, 400.0
    for _ in range(60):
        power = (low + high) / 2
        curve = [((1 + math.cos(2 * math.pi * (hour - 14) / HOURS)) / 2) ** power for hour in range(HOURS)]
        low, high = (power, high) if HOURS * max(curve) / sum(curve) < ratio else (low, power)
    return [
        mean * HOURS * one / sum(curve) for one in curve
    ], f"a smooth day whose busiest hour is {ratio:g} × its mean"


def _made(asked: TrafficAsked, max_context_tokens: int, num_rows: int, seed: int) -> Traffic:
    assert asked.requests_per_second is not None
    assert asked.input_tokens is not None
    assert asked.output_tokens is not None
    scv, hit_rate = asked.burstiness or 1.0, asked.hit_rate or 0.0
    by_hour, curve = hours(asked, asked.requests_per_second)
    random = Random(seed)
    rows: list[TraceRow] = []
    seconds, num_too_long = 0.0, 0
    while len(rows) < num_rows:
        num_input, num_output = _drawn(random, asked.input_tokens), _drawn(random, asked.output_tokens)
        if num_input + num_output > max_context_tokens:
            num_too_long += 1
            if num_too_long > num_rows:
                raise ConfigError(
                    f"traffic: most requests of {asked.input_tokens.mean:g} + {asked.output_tokens.mean:g} tokens are "
                    f"longer than the {max_context_tokens} tokens that a context holds",
                    max_context_tokens=max_context_tokens,
                )
            continue
        ids: tuple[int, ...] = ()
        if hit_rate:
            num_ids = math.floor(num_input * hit_rate / TOKENS_PER_ID + random.random())
            first = random.randrange(PREFIXES) * 100_000
            ids = tuple(range(first, first + num_ids))
        rows.append(TraceRow(len(rows), seconds, num_input, num_output, ids))
        seconds += random.gammavariate(1 / scv, scv)
    wanted = (asked.input_tokens.mean, asked.output_tokens.mean)
    if not num_too_long:
        rows = _stretched(rows, *wanted, max_context_tokens)
    lengths = _sample([(row, min(len(row.prefix_ids) * TOKENS_PER_ID, row.input_tokens)) for row in rows])
    if not num_too_long:
        lengths = _to_means(lengths, *wanted, hit_rate)
    source = "" if asked.burstiness else ": burstiness was not given"
    peak = Load(max(by_hour), lengths, scv)
    means = [peak.mean(lambda length: length.input_tokens), peak.mean(lambda length: length.output_tokens)]
    cached = peak.mean(lambda length: length.cached_tokens) / means[0]
    return Traffic(
        peak=peak,
        by_hour=by_hour,
        rows=rows,
        about=f"made: {means[0]:.0f} tokens in, {means[1]:.0f} out, {cached:.0%} cached",
        assumptions=(
            f"lengths are log-normal (cv {asked.input_tokens.cv:g} and {asked.output_tokens.cv:g}), independent",
            f"arrivals within an hour: gaps of a Gamma distribution, scv {scv:g}{source}",
            curve,
            f"cached prompt tokens are prefixes that {PREFIXES} kinds of requests share"
            if hit_rate
            else "nothing is cached",
        ),
        longest_tokens=max(row.input_tokens + row.output_tokens for row in rows),
        num_too_long=num_too_long,
        num_seen=len(rows) + num_too_long,
    )


def _stretched(rows: list[TraceRow], input_tokens: float, output_tokens: float, most: int) -> list[TraceRow]:
    """Rows whose first half, which is what a run replays, has the means that they were drawn around: full pools answer a
    few per cent more traffic with twice as many more sequences."""
    half = rows[: max(len(rows) // 2, 1)]
    wide = input_tokens * len(half) / sum(row.input_tokens for row in half)
    deep = output_tokens * len(half) / sum(row.output_tokens for row in half)
    found = []
    for row in rows:
        num_output = max(min(round(row.output_tokens * deep), most - 1), 1)
        num_input = max(min(round(row.input_tokens * wide), most - num_output), 1)
        found.append(replace(row, input_tokens=num_input, output_tokens=num_output))
    return found


def _drawn(random: Random, asked: TokensAsked) -> int:
    sigma = math.sqrt(math.log1p(asked.cv**2))
    return max(round(asked.mean * math.exp(random.gauss(0, 1) * sigma - sigma * sigma / 2)), 1)


def _to_means(lengths: list[Length], input_tokens: float, output_tokens: float, hit_rate: float) -> list[Length]:
    """The sample, stretched to the means that it was drawn around."""
    number = len(lengths)
    wide = input_tokens * number / sum(length.input_tokens for length in lengths)
    deep = output_tokens * number / sum(length.output_tokens for length in lengths)
    cached = sum(length.cached_tokens for length in lengths) * wide
    warm = hit_rate * input_tokens * number / cached if cached else 0.0
    return [
        Length(
            length.input_tokens * wide,
            max(length.output_tokens * deep, 1.0),
            min(length.cached_tokens * wide * warm, length.input_tokens * wide - 1),
        )
        for length in lengths
    ]


def _length(row: TraceRow, cached_tokens: float) -> Length:
    return Length(row.input_tokens, row.output_tokens, min(cached_tokens, row.input_tokens - 1))


def _of_trace(asked: TrafficAsked, max_context_tokens: int) -> Traffic:
    assert asked.trace is not None
    try:
        every = traces.read(asked.trace)
    except (OSError, UnicodeDecodeError, traces.TraceError) as error:
        raise ConfigError(f"traffic.trace: {error}") from error
    rows, num_too_long = traces.within(every, max_context_tokens)
    if len(rows) < 2:
        raise ConfigError(
            f"traffic.trace: {asked.trace.name} holds {len(every)} requests, {num_too_long} of them longer than "
            f"{max_context_tokens} tokens: at least 2 that fit are needed"
        )
    own = generators.rate(rows)
    span = rows[-1].seconds
    if not math.isfinite(own):
        raise ConfigError(
            f"traffic.trace: all {len(rows)} requests of {asked.trace.name} come at one time: they have no rate"
        )
    if not SHORTEST_SECONDS <= span <= LONGEST_SECONDS:
        raise ConfigError(
            f"traffic.trace: the {len(rows)} requests of {asked.trace.name} come within {span:.3g} s: are its timestamps "
            "in the unit of its form (.jsonl: milliseconds)?"
        )
    factor = (asked.requests_per_second or own) / own
    first, last, busiest = _busiest(rows)
    by_hour, curve = hours(asked, own * factor)
    if asked.day is None and asked.peak_to_mean is None:
        # The trace is all that is known of a day: its busiest stretch is the peak.
        peak, curve = busiest * factor, "the trace is the whole day: its busiest stretch is the peak, its mean the mean"
    else:
        peak = max(by_hour) * busiest / own
    cached = _cached_tokens(rows)
    stretch = [(rows[at], cached[at]) for at in range(first, last)]
    scv = asked.burstiness or burstiness([row for row, _ in stretch])
    return Traffic(
        peak=Load(peak, _sample(stretch), scv),
        by_hour=by_hour,
        rows=[row for row, _ in stretch],
        about=f"{asked.trace.name}: {len(rows)} requests in {span:.3g} s, {own:.3g} a second"
        + (f", taken {factor:.3g} times as often" if asked.requests_per_second else ""),
        assumptions=(
            f"the busiest stretch of the trace (requests {first} to {last - 1}, {busiest / own:.2f} × its mean) stands for "
            "the peak",
            curve,
            f"arrivals there are as bursty as gaps of scv {scv:.2f}",
            *(
                [f"traffic × {factor:.3g} keeps the bursts of the trace; as many more users would be smoother"]
                if factor > 1.5
                else []
            ),
            "what prefixes allow is cached: an upper bound, without evictions"
            if any(row.prefix_ids for row in rows)
            else "the trace names no prefixes: nothing is cached",
        ),
        longest_tokens=max(row.input_tokens + row.output_tokens for row in rows),
        num_too_long=num_too_long,
        num_seen=len(every),
    )


def _busiest(rows: Sequence[TraceRow]) -> tuple[int, int, float]:
    """(first, past the last, requests a second) of the stretch of STRETCH_SECONDS with most arrivals; of all where the
    trace is not ten times as long."""
    span = rows[-1].seconds - rows[0].seconds
    if span < 10 * STRETCH_SECONDS:
        return 0, len(rows), len(rows) / span
    best, first = (0, 0), 0
    for past, row in enumerate(rows, 1):
        while row.seconds - rows[first].seconds > STRETCH_SECONDS:
            first += 1
        if past - first > best[1] - best[0]:
            best = (first, past)
    return (*best, (best[1] - best[0]) / STRETCH_SECONDS)


def _sample(rows: Sequence[tuple[TraceRow, float]]) -> list[Length]:
    """Every so manieth by prompt length, stretched to the means of all."""
    every = [_length(row, cached) for row, cached in rows]
    if len(every) <= SAMPLE:
        return every
    ordered = sorted(every, key=lambda length: (length.input_tokens, length.output_tokens))
    picked = [ordered[int((at + 0.5) * len(ordered) / SAMPLE)] for at in range(SAMPLE)]
    inputs = sum(length.input_tokens for length in every) / len(every)
    outputs = sum(length.output_tokens for length in every) / len(every)
    return _to_means(picked, inputs, outputs, sum(length.cached_tokens for length in every) / len(every) / inputs)


def burstiness(rows: Sequence[TraceRow]) -> float:
    """What scv of independent gaps is as bursty: the gaps' own, or how counts in longer windows vary, where that is more.
    (Of independent gaps the variance of a long window's count over its mean is their scv.)"""
    found = gap_scv(rows)
    span = rows[-1].seconds - rows[0].seconds
    for arrivals in (8, 16, 32):
        num_windows = len(rows) // arrivals
        if num_windows < 8 or span <= 0:
            break
        counts = [0] * num_windows
        for row in rows:
            counts[min(int((row.seconds - rows[0].seconds) / span * num_windows), num_windows - 1)] += 1
        mean = sum(counts) / num_windows
        found = max(found, sum((count - mean) ** 2 for count in counts) / (num_windows - 1) / mean)
    return found


def gap_scv(rows: Sequence[TraceRow]) -> float:
    """Variance over squared mean of the gaps between arrivals; 1 where there are too few to say."""
    gaps = [after.seconds - before.seconds for before, after in pairwise(rows)]
    if len(gaps) < 8 or not any(gaps):
        return 1.0
    mean = sum(gaps) / len(gaps)
    return sum((gap - mean) ** 2 for gap in gaps) / len(gaps) / mean**2


def _cached_tokens(rows: Sequence[TraceRow]) -> list[float]:
    """What of each prompt an endless cache would hold, in order."""
    seen: set[int] = set()
    found = []
    for row in rows:
        hits = 0
        for prefix_id in row.prefix_ids:
            if prefix_id not in seen:
                break
            hits += 1
        seen.update(row.prefix_ids)
        found.append(float(min(hits * TOKENS_PER_ID, row.input_tokens - 1)))
    return found
