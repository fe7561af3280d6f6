"""Traffic that no published trace has in pure form, and traces bent into other shapes. Deterministic for a seed.

shared-block  one first block of 512 tokens in every request
hot-prefix    90 % of the requests begin with one and the same 4,096 tokens
paced         one distinct cold prompt after another, each when the one before is long over
long-among    one prompt of 8,192 tokens at a time among endless short ones
short-among   the reverse: one short prompt at a time among endless long ones
smooth        chat-like lengths that share nothing, Poisson arrivals

Lengths and gaps are drawn; what is asked of a generator is how many requests, and how many a second on average.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from math import pi, sin, sqrt
from random import Random

from headrace.errors import ConfigError
from headrace.traces import TraceRow

BURST_FACTOR = 26.0
HOT_FRACTION = 0.9
Lengths = Callable[[Random, int], tuple[int, int, tuple[int, ...]]]


def scaled(rows: Iterable[TraceRow], factor: float) -> list[TraceRow]:
    """The same requests, `factor` times as many a second."""
    if factor <= 0:
        raise ConfigError.out_of_range("rate factor", factor, "above 0")
    return [replace(row, seconds=row.seconds / factor) for row in rows]


def at_rate(rows: list[TraceRow], num_requests: int, per_second: float) -> list[TraceRow]:
    """The first so many requests, as far as there are, and at least two; their time is stretched to the rate, so that
    arrivals keep their shape."""
    chosen = rows[: max(2, num_requests)]
    scale = (len(chosen) - 1) / per_second / chosen[-1].seconds
    return [replace(row, seconds=row.seconds * scale) for row in chosen]


def rate(rows: list[TraceRow]) -> float:
    """Requests a second, on average."""
    seconds = rows[-1].seconds - rows[0].seconds
    return len(rows) / seconds if seconds else float("inf")


def window(rows: list[TraceRow], num_requests: int, seed: int) -> list[TraceRow]:
    """So many requests in a row, from a place that the seed chooses (0: from the first), with times from 0 on."""
    latest = max(len(rows) - num_requests, 0)
    first = Random(seed).randrange(latest + 1) if seed else 0
    start = rows[first].seconds if rows else 0.0
    return [replace(row, seconds=row.seconds - start) for row in rows[first : first + num_requests]]


def repeated(rows: list[TraceRow], num_requests: int) -> list[TraceRow]:
    """The rows over and over until there are so many, each round with prefixes of its own."""
    if not rows:
        return []
    gap = 1 / rate(rows) if len(rows) > 1 else 1.0
    seconds = rows[-1].seconds - rows[0].seconds + gap
    most = 1 + max((max(row.prefix_ids) for row in rows if row.prefix_ids), default=0)
    found: list[TraceRow] = []
    for number in range(num_requests):
        round_number, at = divmod(number, len(rows))
        row = rows[at]
        found.append(
            replace(
                row,
                number=number,
                seconds=row.seconds - rows[0].seconds + round_number * seconds,
                prefix_ids=tuple(prefix_id + round_number * most for prefix_id in row.prefix_ids),
            )
        )
    return found


def salted(rows: Iterable[TraceRow], salt: int) -> list[TraceRow]:
    """The same requests with other tokens: what one salt brought into a cache serves no other. Who shares a prefix still
    does."""
    if not 0 <= salt < 2**30:
        raise ConfigError.out_of_range("salt", salt, "from 0 and below 2**30")
    base = salt << 32
    return [
        replace(
            row,
            number=base + row.number,
            prefix_ids=tuple(base + prefix_id for prefix_id in row.prefix_ids),
        )
        for row in rows
    ]


def bursts(rows: list[TraceRow], every_seconds: float = 60.0, factor: float = BURST_FACTOR) -> list[TraceRow]:
    """In each stretch of `every_seconds` the requests of its first `factor` mean seconds come within its first second;
    the others stay. Needs stretches longer than `factor` seconds."""
    if every_seconds <= factor:
        raise ConfigError.out_of_range("burst interval", every_seconds, f"above {factor:g} s")

    def moved(seconds: float) -> float:
        begun = seconds - seconds % every_seconds
        return begun + (seconds - begun) / factor if seconds - begun < factor else seconds

    return [replace(row, seconds=moved(row.seconds)) for row in rows]


def day_curve(rows: list[TraceRow], day_seconds: float = 600.0, swing: float = 0.8) -> list[TraceRow]:
    """Arrivals whose rate swings by ± `swing` of its mean over a day of `day_seconds`, as many as before over a day."""
    if not 0 <= swing < 1:
        raise ConfigError.out_of_range("swing", swing, "from 0 and below 1")
    turn = 2 * pi / day_seconds

    def passed(seconds: float) -> float:
        return seconds - swing * sin(turn * seconds) / turn

    def inverse(target: float) -> float:
        low, high = target - day_seconds, target + day_seconds
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if passed(middle) < target else (low, middle)
        return max(high, 0.0)

    return [replace(row, seconds=inverse(row.seconds)) for row in rows]


def ramp(rows: list[TraceRow], swing: float = 0.9) -> list[TraceRow]:
    """Arrivals whose rate climbs evenly from 1 - `swing` to 1 + `swing` of its mean, over the same time."""
    if not 0 < swing <= 1:
        raise ConfigError.out_of_range("swing", swing, "above 0 and at most 1")
    seconds = rows[-1].seconds if rows else 0.0

    def moved(passed: float) -> float:
        """Where the integral of the rate, (1 - swing)·x + swing·x², is as large as before."""
        return (sqrt((1 - swing) ** 2 + 4 * swing * passed) - (1 - swing)) / (2 * swing)

    return [replace(row, seconds=seconds * moved(row.seconds / seconds)) if seconds else row for row in rows]


def _chat(random: Random) -> tuple[int, int]:
    return 1 + round(min(random.lognormvariate(6.2, 0.9), 8000)), 1 + round(min(random.lognormvariate(4.8, 0.7), 1000))


def _smooth(random: Random, number: int) -> tuple[int, int, tuple[int, ...]]:
    return (*_chat(random), ())


def _shared_block(random: Random, number: int) -> tuple[int, int, tuple[int, ...]]:
    num_prompt, num_output = _chat(random)
    return 512 + num_prompt, num_output, (0,)


def _hot_prefix(random: Random, number: int) -> tuple[int, int, tuple[int, ...]]:
    num_prompt, num_output = _chat(random)
    first = 0 if random.random() < HOT_FRACTION else 8 * (1 + random.randrange(1_000_000))
    return 4096 + num_prompt, num_output, tuple(range(first, first + 8))


def _long_among(random: Random, number: int) -> tuple[int, int, tuple[int, ...]]:
    return (8192, 64, ()) if number % 50 == 25 else (64 + random.randrange(128), 32 + random.randrange(64), ())


def _short_among(random: Random, number: int) -> tuple[int, int, tuple[int, ...]]:
    return (64, 32, ()) if number % 50 == 25 else (8192, 32 + random.randrange(64), ())


def _paced(random: Random, number: int) -> tuple[int, int, tuple[int, ...]]:
    return 1024, 32, ()


SHAPES: dict[str, Lengths] = {
    "smooth": _smooth,
    "shared-block": _shared_block,
    "hot-prefix": _hot_prefix,
    "long-among": _long_among,
    "short-among": _short_among,
    "paced": _paced,
}


def generate(shape: str, num_requests: int, per_second: float, seed: int = 0) -> list[TraceRow]:
    """Poisson arrivals of a shape; those of `paced` come at equal distances."""
    if shape not in SHAPES:
        raise ConfigError.out_of_range("shape", shape, f"one of {', '.join(SHAPES)}")
    if per_second <= 0:
        raise ConfigError.out_of_range("rate", per_second, "above 0")
    random, lengths = Random(f"{shape} {seed}"), SHAPES[shape]
    rows: list[TraceRow] = []
    seconds = 0.0
    for number in range(num_requests):
        rows.append(TraceRow(number, seconds, *lengths(random, number)))
        seconds += 1 / per_second if shape == "paced" else random.expovariate(per_second)
    return rows
