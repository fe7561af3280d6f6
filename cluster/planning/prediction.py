"""What requests will see of so many workers (`stages` finds it): how TTFT and TPOT are spread, and who keeps a target."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from cluster.planning.load import Load, Target
from cluster.planning.queueing import Wait, normal_cdf, quantile
from headrace.goodput import PERCENTILES


@dataclass(frozen=True, slots=True)
class Overload:
    """These pools never catch up with the load. `utilisation` of the pool that is short, 1 or more."""

    pool: str
    utilisation: float
    reason: str


class Prediction:
    """What requests will see. Everything is a function of the load and the pools; percentiles are worked out when asked.

    `sequences`: on a decode worker, on average; `slots`: the most it holds, by rows or KV; `busy`: the share of time that
    a prefill worker computes.
    """

    def __init__(
        self,
        load: Load,
        target: Target,
        *,
        wait: Wait,
        slot_wait: Wait,
        service: Sequence[float],
        fixed_seconds: Sequence[float],
        tpots: Sequence[tuple[float, float]],
        prefill_busy: float,
        sequences: float,
        slots: float,
        step_seconds: float,
    ) -> None:
        self.load = load
        self.target = target
        self.wait = wait
        self.slot_wait = slot_wait
        self.prefill_busy = prefill_busy
        self.sequences = sequences
        self.slots = slots
        self.step_seconds = step_seconds
        self._least = [s + f for s, f in zip(service, fixed_seconds, strict=True)]
        self._tpots = tpots
        if slot_wait.mean > wait.mean:
            self._long, self._short = slot_wait, wait.mean
        else:
            self._long, self._short = wait, slot_wait.mean

    def _ttft_within(self, least: float, seconds: float) -> float:
        """Of the two waits the longer one varies; the other is its mean."""
        return self._long.within(seconds - least - self._short)

    @staticmethod
    def _tpot_within(tpot: tuple[float, float], seconds: float) -> float:
        mean, deviation = tpot
        if mean <= 0:
            return 1.0  # one token: it has no TPOT
        return normal_cdf((seconds - mean) / deviation) if deviation > 0 else float(mean <= seconds)

    @cached_property
    def ttft_attainment(self) -> float:
        limit = self.target.ttft_seconds
        return sum(self._ttft_within(least, limit) for least in self._least) / len(self._least)

    @cached_property
    def tpot_attainment(self) -> float:
        return sum(self._tpot_within(tpot, self.target.tpot_seconds) for tpot in self._tpots) / len(self._tpots)

    @cached_property
    def attainment(self) -> float:
        """Requests that keep both, of all."""
        ttft, tpot = self.target.ttft_seconds, self.target.tpot_seconds
        both = (
            self._ttft_within(a, ttft) * self._tpot_within(b, tpot)
            for a, b in zip(self._least, self._tpots, strict=True)
        )
        return sum(both) / len(self._least)

    @property
    def goodput_per_second(self) -> float:
        return self.attainment * self.load.requests_per_second

    @property
    def decode_busy(self) -> float:
        """Rows or KV that are taken, of those there are."""
        return self.sequences / self.slots if self.slots else 1.0

    @cached_property
    def ttft_mean_seconds(self) -> float:
        return sum(self._least) / len(self._least) + self.wait.mean + self.slot_wait.mean

    @cached_property
    def tpot_mean_seconds(self) -> float:
        means = [mean for mean, _ in self._tpots if mean > 0]
        return sum(means) / len(means) if means else 0.0

    def ttft_within_share(self, share: float) -> float:
        """The TTFT within which that share of requests stays."""
        least = self._least
        return quantile(lambda seconds: sum(self._ttft_within(one, seconds) for one in least) / len(least), share)

    def tpot_within_share(self, share: float) -> float:
        """The same of TPOT, of requests that have one."""
        some = [tpot for tpot in self._tpots if tpot[0] > 0]
        if not some:
            return 0.0
        return quantile(lambda seconds: sum(self._tpot_within(one, seconds) for one in some) / len(some), share)

    @cached_property
    def ttft_seconds(self) -> dict[str, float]:
        return {f"p{p}": self.ttft_within_share(p / 100) for p in PERCENTILES}

    @cached_property
    def tpot_seconds(self) -> dict[str, float]:
        return {f"p{p}": self.tpot_within_share(p / 100) for p in PERCENTILES}
