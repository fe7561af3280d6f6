"""Whether a plan holds: the production router and schedulers under a virtual clock, on the plan's own traffic.

A cluster too large to run here is cut to a part of itself, pools and rate alike. A part queues more than the whole, so what
it holds the whole holds too.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from cluster.planning.chance import deviation, of_all
from cluster.planning.load import Pools, Target, Worker
from cluster.planning.traffic import Traffic
from cluster.simulation.cards import Card
from cluster.simulation.fleet import Fleet, Simulation
from cluster.simulation.results import Served, Tally, met, summarise, ttft_seconds
from headrace.goodput import Slo, percentiles
from headrace.traces import TraceRow
from headrace.values import Role

BLOCK_SIZE = 32
WARM_UP = 0.2  # of a run at least: caches and fits fill
MOST_WARM_UP = 0.6
FILL_STAYS = 1.5  # and so many times as a request stays: pools fill
SETTLED_STAYS = 2.0  # after that a run lasts at least so many more
PROPORTION = 1.04  # by which pools that are cut may differ
MOST_TIMES = 3  # as many requests as were asked for, where a run would else be too short
MOST_TOKENS = 800_000  # that a run may generate: seconds of one core
MOST_RUN_WORKERS = 1500  # each is megabytes
NEAR = 2.0  # deviations between what a run shows and what is asked for, within which it does not tell


@dataclass(frozen=True, slots=True)
class Simulated:
    """What a run showed, of requests after warm-up. `scale`: the part of the pools that ran; goodput is of the whole.
    `deviation`: of `attainment`, by chance, and `ttft_p90_deviation` of that percentile; `num_draws`: of how many runs,
    each with the traffic drawn anew, these are the requests. Not `settled`: the run ended before pools were as full as they
    get, and looks too well."""

    pools: Pools
    scale: float
    num_requests: int
    ttft_seconds: dict[str, float]
    tpot_seconds: dict[str, float]
    attainment: float
    deviation: float
    ttft_attainment: float
    tpot_attainment: float
    goodput_per_second: float
    hit_rate: float
    prefill_busy: float | None
    handed_over: float
    unfinished: int
    settled: bool
    ttft_p90_deviation: float = 0.0
    num_draws: int = 1

    def holds(self, target: Target) -> bool:
        return self.attainment >= target.attainment

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def card(worker: Worker, name: str) -> Card:
    """A worker as the simulator's: one card that does what its whole layout does."""
    num_blocks = int(worker.kv_tokens // BLOCK_SIZE)
    return Card(name, "planned", worker.cost, num_blocks, round(worker.kv_bytes_per_token * BLOCK_SIZE))


def part(
    pools: Pools, per_second: float, num_requests: int, most_requests: int, stay_seconds: float
) -> tuple[Pools, float, int]:
    """(pools, requests a second, requests) of a run that lasts as long as it must, of at least `num_requests`. Where more
    than `most_requests` were needed, or there are more workers than may run, of a part of the pools that keeps their
    proportions; beyond twice as many requests never."""
    needed = _needed(per_second, stay_seconds)
    sizes = [number for number in _sizes(pools) if number]
    shrink = max(needed / most_requests * PROPORTION, sum(sizes) / MOST_RUN_WORKERS)
    shrink = min(shrink, float(min(sizes)))
    while shrink > 1:
        small = Pools(*(round(number / shrink) for number in (pools.prefill, pools.decode, pools.unified)))
        kept = [new / old for new, old in zip(_sizes(small), _sizes(pools), strict=True) if old]
        if max(kept) <= PROPORTION * min(kept):
            # The rate follows the pool that was cut least, so that none is let off.
            return (
                small,
                per_second * max(kept),
                max(num_requests, min(math.ceil(needed * max(kept)), 2 * most_requests)),
            )
        shrink *= 0.97
    return pools, per_second, max(num_requests, min(needed, 2 * most_requests))


def _needed(per_second: float, stay_seconds: float) -> int:
    """Requests until pools have filled and shown what they do then."""
    return math.ceil((FILL_STAYS + SETTLED_STAYS) * per_second * stay_seconds)


def _sizes(pools: Pools) -> tuple[int, int, int]:
    return pools.prefill, pools.decode, pools.unified


def simulate(
    pools: Pools,
    prefill: Worker,
    decode: Worker,
    traffic: Traffic,
    per_second: float,
    target: Target,
    *,
    num_requests: int,
    max_context_tokens: int,
    stay_seconds: float,
    seed: int = 0,
) -> Simulated:
    """`pools` under `per_second` requests of this traffic; where they keep about as much as is asked for, and the traffic
    can be drawn anew, of it all together: one draw is by chance heavier than another, and at the edge that decides."""
    most = max(int(MOST_TOKENS / traffic.output_tokens), 200)
    few, most = min(num_requests, most), max(min(MOST_TIMES * num_requests, most), 200)
    small, rate, number = part(pools, per_second, few, most, stay_seconds)
    fleet = Fleet(
        card(decode, "decode"),
        prefill=small.prefill,
        decode=small.decode,
        unified=small.unified,
        block_size=BLOCK_SIZE,
        max_num_seqs=decode.max_num_seqs,
        max_step_tokens=decode.max_step_tokens,
        max_context_tokens=max_context_tokens,
        prefill_card=card(prefill, "prefill"),
    )
    slo = Slo(target.ttft_seconds, target.tpot_seconds)
    stretch = math.ceil(rate * stay_seconds)
    runs: list[_Run] = []
    for drawn in (traffic, *traffic.drawn_anew):
        runs.append(_run(fleet, drawn.replay(rate, number), slo, stay_seconds, stretch, seed + len(runs)))
        attainment = sum(run.attainment for run in runs) / len(runs)
        off = of_all([run.attainment for run in runs], [run.deviation for run in runs])
        if abs(attainment - target.attainment) > NEAR * off:
            break
    tally = Tally(fleet.roles)
    tally.served = [one for run in runs for one in run.served]
    both = summarise("ours", tally, slo)
    ttft = summarise("ours", tally, Slo(target.ttft_seconds, math.inf))
    tpot = summarise("ours", tally, Slo(math.inf, target.tpot_seconds))
    counted = max(len(tally.served), 1)
    busy = [run.busy for run in runs if run.busy is not None]
    return Simulated(
        pools=pools,
        scale=small.num_workers / pools.num_workers,
        num_requests=number * len(runs),
        ttft_seconds=both.ttft_seconds,
        tpot_seconds=both.tpot_seconds,
        attainment=both.attainment,
        deviation=max(off, 1 / counted),
        ttft_attainment=ttft.attainment,
        tpot_attainment=tpot.attainment,
        goodput_per_second=both.attainment * per_second,
        hit_rate=both.hit_rate,
        prefill_busy=sum(busy) / len(busy) if busy else None,
        handed_over=sum(one.prefill is not None for one in tally.served) / counted,
        unfinished=sum(one.outcome != "finished" for one in tally.served),
        settled=number >= _needed(rate, stay_seconds),
        ttft_p90_deviation=of_all([run.ttft_p90 for run in runs], [run.ttft_p90_deviation for run in runs]),
        num_draws=len(runs),
    )


@dataclass(frozen=True, slots=True)
class _Run:
    """Of one draw of the traffic: who was counted, in order of arrival."""

    served: list[Served]
    attainment: float
    deviation: float
    ttft_p90: float
    ttft_p90_deviation: float
    busy: float | None


def _run(fleet: Fleet, rows: list[TraceRow], slo: Slo, stay_seconds: float, stretch: int, seed: int) -> _Run:
    longest = max(row.input_tokens + row.output_tokens for row in rows)
    fleet = replace(fleet, max_context_tokens=max(fleet.max_context_tokens, longest))
    tally = Tally(fleet.roles)
    Simulation(fleet, "ours", tally, seed=seed).run(rows)
    begun = min(max(WARM_UP * rows[-1].seconds, FILL_STAYS * stay_seconds), MOST_WARM_UP * rows[-1].seconds)
    served = sorted((one for one in tally.served if one.arrived_at >= begun), key=lambda one: one.arrived_at)
    kept = [float(met(slo, one)) for one in served]
    ttfts = [ttft_seconds(one) for one in served if one.outcome == "finished"]
    return _Run(
        served,
        _mean(kept),
        deviation(kept, _mean, stretch),
        _p90(ttfts),
        deviation(ttfts, _p90, stretch),
        _busy(tally, begun, rows[-1].seconds),
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _p90(values: Sequence[float]) -> float:
    return percentiles(values)["p90"] if values else 0.0


def _busy(tally: Tally, begun: float, ended: float) -> float | None:
    """The share of time that prefill workers compute. None: there are none, and of unified ones it cannot be told apart."""
    names = [name for name, role in tally.roles.items() if role is Role.PREFILL]
    first, last = math.ceil(begun / tally.slice_seconds), math.floor(ended / tally.slice_seconds)
    if last <= first or not names:
        return None
    spent = sum(sum(tally.workers[name].busy_seconds[first:last]) for name in names)
    return spent / (last - first) / tally.slice_seconds / len(names)
