"""What comes and what it is owed, and what there is to serve it: the vocabulary of planning. Tokens, seconds, bytes."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from cluster.planning.queueing import normal_quantile
from headrace.costmodel import CostModel


@dataclass(frozen=True, slots=True)
class Length:
    """A kind of request: tokens of its prompt, of them in a cache, and of its answer."""

    input_tokens: float
    output_tokens: float
    cached_tokens: float = 0.0

    @property
    def computed_tokens(self) -> float:
        """At least the last token of a prompt is always computed."""
        return max(self.input_tokens - self.cached_tokens, 1.0)


def lengths_around(
    input_tokens: float, output_tokens: float, *, hit_rate: float = 0.0, cv: float = 1.0
) -> list[Length]:
    """Lengths where only means are known: log-normal, both with this coefficient of variation, independent."""
    inputs, outputs = _log_normal(input_tokens, cv), _log_normal(output_tokens, cv)
    return [Length(i, max(o, 1.0), i * hit_rate) for i in inputs for o in outputs]


def _log_normal(mean: float, cv: float, num_points: int = 8) -> list[float]:
    """Quantiles in the middle of equal shares, scaled to the mean."""
    sigma = math.sqrt(math.log1p(cv * cv))
    points = [math.exp(sigma * normal_quantile((at + 0.5) / num_points)) for at in range(num_points)]
    return [mean * point * num_points / sum(points) for point in points]


@dataclass(frozen=True, slots=True)
class Load:
    """What comes: requests a second, and their lengths, each as likely. `gap_scv`: squared coefficient of variation of the
    gaps between arrivals, 1 for Poisson, more where they come in bursts."""

    requests_per_second: float
    lengths: Sequence[Length]
    gap_scv: float = 1.0

    def at(self, factor: float) -> "Load":
        return replace(self, requests_per_second=self.requests_per_second * factor)

    def mean(self, of: Callable[[Length], float]) -> float:
        return sum(map(of, self.lengths)) / len(self.lengths)


@dataclass(frozen=True, slots=True)
class Target:
    """The SLO: this share of all requests keeps both limits."""

    ttft_seconds: float
    tpot_seconds: float
    attainment: float = 0.95


@dataclass(frozen=True, slots=True)
class Worker:
    """One worker of a pool: its own cost model, rows, KV tokens, and bytes of KV a token (what a hand-over moves)."""

    cost: CostModel
    kv_tokens: float
    max_num_seqs: int = 256
    max_step_tokens: int = 8192
    kv_bytes_per_token: float = 0.0


@dataclass(frozen=True, slots=True)
class Pools:
    """So many workers of each kind. `unified` beside the other two are not predicted."""

    prefill: int = 0
    decode: int = 0
    unified: int = 0

    @property
    def num_workers(self) -> int:
        return self.prefill + self.decode + self.unified

    @property
    def said(self) -> str:
        return f"{self.unified} unified" if self.unified else f"{self.prefill} + {self.decode}"
