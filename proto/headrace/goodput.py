"""What a request was promised, and percentiles: counted alike of simulated requests and of real ones."""

from collections.abc import Sequence
from dataclasses import dataclass

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Slo:
    """What clients were promised. TPOT: mean seconds per token after the first."""

    ttft_seconds: float = 3.0
    tpot_seconds: float = 0.05

    def met(self, ttft_seconds: float, tpot_seconds: float | None) -> bool:
        """Of a request that finished; without a TPOT (it had one token) the TTFT alone counts."""
        return ttft_seconds <= self.ttft_seconds and (tpot_seconds is None or tpot_seconds <= self.tpot_seconds)


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """By nearest rank; empty where there are no values."""
    ordered = sorted(values)
    return {f"p{p}": ordered[max(-(-len(ordered) * p // 100) - 1, 0)] for p in PERCENTILES} if ordered else {}
