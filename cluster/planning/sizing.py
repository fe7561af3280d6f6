"""How many workers a load needs at an SLO: the fewest that suffice by `stages`, with the reason.

Whoever sizes for arrivals: `Load.requests_per_second` are those that come, not those that are served.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from cluster.planning.load import Length, Load, Pools, Target, Worker, lengths_around
from cluster.planning.prediction import Overload, Prediction
from cluster.planning.stages import predict

__all__ = ["Idle", "Length", "Load", "Overload", "Pools", "Prediction", "Sized", "Target", "Unreachable", "Worker"]
__all__ += ["lengths_around", "predict", "size"]

MOST_WORKERS = 1 << 16
MAX_BUSY = 0.9  # nobody runs a pool closer to its limit for long: the load is never known that well


@dataclass(frozen=True, slots=True)
class Sized:
    """The fewest workers by prediction. `reason` says what the last worker of each pool is there for."""

    pools: Pools
    prediction: Prediction
    reason: str


@dataclass(frozen=True, slots=True)
class Idle:
    """Nothing comes: no worker is needed, and how many to keep is not a question of load."""


@dataclass(frozen=True, slots=True)
class Unreachable:
    """No number of workers meets this SLO: a request that has the pools to itself already misses it. `attainment` is what
    such requests reach, `ttft_seconds` and `tpot_seconds` what that share of them would have to be allowed. `too_many`:
    some number would, beyond MOST_WORKERS. `way`: of serving, where several were tried."""

    attainment: float
    ttft_seconds: float
    tpot_seconds: float
    reason: str
    too_many: bool = False
    way: str = ""

    def beyond(self, target: Target) -> float:
        """How many times as long the one or the other would have to be allowed."""
        return max(self.ttft_seconds / target.ttft_seconds, self.tpot_seconds / target.tpot_seconds)


def size(
    prefill: Worker, decode: Worker, load: Load, target: Target, *, unified: bool = False, max_busy: float = MAX_BUSY
) -> Sized | Idle | Unreachable:
    """The fewest workers of `prefill` and `decode` (or `decode` alone, as unified ones) that keep the SLO by prediction.

    No pool works more than `max_busy` of its time or of its rows. Pure and quick (milliseconds, whatever the size), so a
    controller may ask at every turn.
    """
    if load.requests_per_second <= 0:
        return Idle()

    def tried(pools: Pools) -> Prediction | None:
        found = predict(pools, prefill, decode, load, target)
        return None if isinstance(found, Overload) else found

    def holds(pools: Pools) -> bool:
        found = tried(pools)
        return (
            found is not None
            and found.attainment >= target.attainment
            and found.prefill_busy <= max_busy
            and found.decode_busy <= max_busy
        )

    many = Pools(unified=MOST_WORKERS) if unified else Pools(MOST_WORKERS, MOST_WORKERS)
    if not holds(many):
        return _unreachable(many, prefill, decode, load, target)
    if unified:
        pools = Pools(unified=_least(lambda number: holds(Pools(unified=number))))
    else:
        pools = Pools(
            _least(lambda number: holds(Pools(number, MOST_WORKERS))),
            _least(lambda number: holds(Pools(MOST_WORKERS, number))),
        )
        while not holds(pools):
            pools = max(
                (replace(pools, prefill=pools.prefill + 1), replace(pools, decode=pools.decode + 1)),
                key=lambda one: found.attainment if (found := tried(one)) is not None else 0.0,
            )
    prediction = tried(pools)
    assert prediction is not None
    return Sized(pools, prediction, _why(pools, prefill, decode, load, target))


def _least(holds: Callable[[int], bool]) -> int:
    """The least number that holds, where all above it do."""
    low, high = 0, 1
    while not holds(high):
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _why(pools: Pools, prefill: Worker, decode: Worker, load: Load, target: Target) -> str:
    """What one worker less of each pool would do."""
    said = []
    for pool in ("prefill", "decode", "unified"):
        number = getattr(pools, pool)
        if not number:
            continue
        less = replace(pools, **{pool: number - 1})
        found = predict(less, prefill, decode, load, target) if less.num_workers and number > 1 else None
        if found is None:
            said.append(f"{pool} {number}: the least there can be")
        elif isinstance(found, Overload):
            said.append(f"{pool} {number}: with {number - 1}, {found.reason}")
        else:
            said.append(
                f"{pool} {number}: with {number - 1}, {found.attainment:.1%} of requests would keep the SLO, prompts "
                f"take {found.prefill_busy:.0%} of the time of who prefills, {found.decode_busy:.0%} of rows are taken"
            )
    return "; ".join(said)


def _unreachable(many: Pools, prefill: Worker, decode: Worker, load: Load, target: Target) -> Unreachable:
    alone = predict(many, prefill, decode, replace(load, requests_per_second=1e-6), target)
    if isinstance(alone, Overload):
        return Unreachable(0.0, math.inf, math.inf, alone.reason)
    share = target.attainment
    ttft, tpot = alone.ttft_within_share(share), alone.tpot_within_share(share)
    if alone.attainment >= share:
        why = f"{load.requests_per_second:.3g} requests/s need more than {MOST_WORKERS:,} workers of a pool"
        return Unreachable(alone.attainment, ttft, tpot, why, too_many=True)
    return Unreachable(
        alone.attainment,
        ttft,
        tpot,
        f"of requests that have the pools to themselves {alone.attainment:.1%} keep TTFT {target.ttft_seconds:g} s and "
        f"TPOT {target.tpot_seconds:g} s, and {100 * share:g}% are asked for: they would need {ttft:.3g} s and "
        f"{tpot:.3g} s",
    )
