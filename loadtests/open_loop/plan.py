"""What a bench is to send where, validated once; and the traffic that follows from it. Pure but for reading the trace."""

import json
import math
import pathlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from hashlib import blake2b
from typing import Any

from headrace import generators, traces
from headrace.errors import ConfigError
from headrace.goodput import Slo
from headrace.traces import TraceRow

VOCAB_SIZE = 400  # ids that every vocabulary has
WARMUP_FRACTION = 0.1
SLO_KEYS = ("ttft", "tpot")
BENDS: Mapping[str, Callable[[list[TraceRow]], list[TraceRow]]] = {
    "none": lambda rows: rows,
    "bursts": generators.bursts,
    "ramp": generators.ramp,
    "day": lambda rows: generators.day_curve(rows, day_seconds=max(rows[-1].seconds, 1.0)),
}


@dataclass(frozen=True, slots=True)
class Plan:
    """`edge` is grpc or http, `address` where that is. `rates` empty: the trace's own. `seconds` of traffic at each rate,
    unless `requests` says how many. `input_tokens` and `output_tokens` stand in for the traffic's own lengths. `warmup`
    and `timeout` in seconds; without a warm-up it is a tenth of the time. `salt` sets tokens, `seed` all else."""

    edge: str
    address: str
    model: str | None = None
    trace: str | None = None
    shape: str = "smooth"
    bend: str = "none"
    rates: tuple[float, ...] = ()
    seconds: float = 60.0
    requests: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    seed: int = 0
    salt: int = 0
    slo: Slo = field(default_factory=Slo)
    warmup: float | None = None
    timeout: float = 600.0

    def __post_init__(self) -> None:
        for name, value, low in (("seconds", self.seconds, 0.0), ("timeout", self.timeout, 0.0)):
            if not (math.isfinite(value) and value > low):
                raise ConfigError.out_of_range(name, value, "above 0")
        for rate in self.rates:
            if not (math.isfinite(rate) and rate > 0):
                raise ConfigError.out_of_range("rate", rate, "above 0")
        if self.bend not in BENDS:
            raise ConfigError.out_of_range("bend", self.bend, f"one of {', '.join(BENDS)}")
        for name in ("requests", "input_tokens", "output_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError.out_of_range(name, value, "at least 1")
        if self.warmup is not None and not self.warmup >= 0:
            raise ConfigError.out_of_range("warmup", self.warmup, "at least 0")

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "Plan":
        """From what a command line gives; texts of rates and SLOs are read here."""
        unknown = given.keys() - {one.name for one in fields(cls)}
        if unknown:
            raise ConfigError(f"{min(unknown)}: no such key")
        said = dict(given)
        given_rates = said.get("rates", ())
        said["rates"] = rates(given_rates) if isinstance(given_rates, str) else tuple(given_rates)
        if isinstance(said.get("slo"), str):
            said["slo"] = slo(said["slo"])
        return cls(**said)

    @property
    def identity(self) -> dict[str, Any]:
        """All that results depend on, but for the rates: points of one identity are of one sweep."""
        found = asdict(self)
        del found["rates"]
        return dict(json.loads(json.dumps(found)))

    def warmup_seconds(self, span: float) -> float:
        return WARMUP_FRACTION * span if self.warmup is None else self.warmup


@dataclass(frozen=True, slots=True)
class Traffic:
    """What goes out at one rate. `num_removed`: requests that the context has no room for."""

    rate: float
    rows: list[TraceRow]
    num_removed: int

    @property
    def seconds(self) -> float:
        return self.rows[-1].seconds if self.rows else 0.0


class Source:
    """The plan's requests before they have a rate; a trace is read once."""

    def __init__(self, plan: Plan, max_context_tokens: int = 0) -> None:
        self._plan = plan
        self._max_context_tokens = max_context_tokens
        self._trace: list[TraceRow] | None = None
        self._num_removed = 0
        if plan.trace is not None:
            try:
                whole = traces.read(pathlib.Path(plan.trace))
            except (OSError, UnicodeDecodeError, traces.TraceError) as error:
                raise ConfigError(f"trace: {error}") from error
            self._trace, self._num_removed = self._fitting(whole)
            if len(self._trace) > 1:
                _rate(self._trace)  # refused here, before anything is sent

    @property
    def rates(self) -> tuple[float, ...]:
        if self._plan.rates:
            return self._plan.rates
        if self._trace is None:
            return (1.0,)
        return (_rate(self._trace),)

    def at(self, rate: float) -> Traffic:
        """ConfigError when it cannot be had."""
        plan = self._plan
        number = plan.requests or max(math.ceil(rate * plan.seconds), 1)
        if self._trace is None:
            rows, num_removed = self._fitting(generators.generate(plan.shape, number, rate, plan.seed))
        else:
            num_removed = self._num_removed
            rows = self._trace
            rows = (
                generators.window(rows, number, plan.seed) if number <= len(rows) else generators.repeated(rows, number)
            )
            if len(rows) > 1:
                rows = generators.scaled(rows, rate / _rate(rows))
        rows = BENDS[plan.bend](rows)
        return Traffic(rate, generators.salted(rows, salt_of(plan.salt, rate)), num_removed)

    def _fitting(self, rows: list[TraceRow]) -> tuple[list[TraceRow], int]:
        plan = self._plan
        rows = [
            replace(
                row,
                input_tokens=plan.input_tokens or row.input_tokens,
                output_tokens=plan.output_tokens or row.output_tokens,
            )
            for row in rows
        ]
        if not self._max_context_tokens:
            return rows, 0
        kept, num_removed = traces.within(rows, self._max_context_tokens)
        if not kept:
            raise ConfigError(
                f"none of {len(rows)} requests fits the context of {self._max_context_tokens} tokens: the shortest has "
                f"{min(row.input_tokens + row.output_tokens for row in rows)} with its answer; "
                "input_tokens and output_tokens set other lengths"
            )
        return kept, num_removed


def _rate(rows: list[TraceRow]) -> float:
    found = generators.rate(rows)
    if math.isfinite(found):
        return found
    raise ConfigError(f"trace: {len(rows)} requests at one moment have no rate to scale")


def salt_of(salt: int, rate: float) -> int:
    """Rates of a sweep send other tokens, so that none finds an earlier one's prompts in a cache."""
    return int.from_bytes(blake2b(f"{salt} {rate!r}".encode(), digest_size=4).digest()) & (2**30 - 1)


def rates(text: str) -> tuple[float, ...]:
    """`1,2,4`."""
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError.out_of_range("rates", text, "numbers with commas between them, such as 1,2,4") from None
    if len(set(found)) < len(found):
        raise ConfigError.out_of_range("rates", text, "different numbers")
    return found


def slo(text: str) -> Slo:
    """`ttft=0.5,tpot=50ms`; what is not said keeps its default."""
    found: dict[str, float] = {}
    for part in text.split(","):
        key, equals, value = (word.strip() for word in part.partition("="))
        if not equals or key not in SLO_KEYS:
            raise ConfigError.out_of_range("slo", part, f"KEY=SECONDS with KEY one of {', '.join(SLO_KEYS)}")
        scale, number = (1e-3, value[:-2]) if value.endswith("ms") else (1.0, value.removesuffix("s"))
        try:
            seconds = float(number) * scale
        except ValueError:
            seconds = math.nan
        if not (math.isfinite(seconds) and seconds > 0):
            raise ConfigError.out_of_range(f"slo {key}", value, "seconds above 0, such as 0.5 or 500ms")
        found[f"{key}_seconds"] = seconds
    return Slo(**found)
