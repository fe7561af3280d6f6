"""Whether a plan holds: the production router and schedulers under a virtual clock, on the plan's own traffic.

A cluster too large to run here is cut to a part of itself, pools and rate alike. A part queues more than the whole, so what
it holds the whole holds too.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

from cluster.planning.load import Pools, Target, Worker
from cluster.planning.traffic import Traffic
from cluster.simulation.cards import Card
from cluster.simulation.fleet import Fleet, Simulation
from cluster.simulation.results import Tally, summarise
from headrace.goodput import Slo
from headrace.values import Role

BLOCK_SIZE = 32
WARM_UP = 0.2  # of a run at least: caches and fits fill
MOST_WARM_UP = 0.6
FILL_STAYS = 1.5  # and so many times as a request stays: pools fill
SETTLED_STAYS = 2.0  # after that a run lasts at least so many more
PROPORTION = 1.04  # by which pools that are cut may differ
MOST_TIMES = 3  # as many requests as were asked for, where a run would else be too short
MOST_TOKENS = 800_000  # that a run may generate: seconds of one core


@dataclass(frozen=True, slots=True)
class Simulated:
    """What a run showed, of requests after warm-up. `scale`: the part of the pools that ran; goodput is of the whole.
    `deviation`: of `attainment`, by how few requests it was counted on. Not `settled`: the run ended before pools were as
    full as they get, and looks too well."""

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
    than `most_requests` were needed, of a part of the pools that keeps their proportions; beyond twice as many never."""
    needed = _needed(per_second, stay_seconds)
    sizes = [number for number in _sizes(pools) if number]
    shrink = min(needed / most_requests * PROPORTION, float(min(sizes)))
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
    """`pools` under `per_second` requests of this traffic."""
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
    rows = traffic.replay(rate, number)
    tally = Tally(fleet.roles)
    Simulation(fleet, "ours", tally, seed=seed).run(rows)
    begun = min(max(WARM_UP * rows[-1].seconds, FILL_STAYS * stay_seconds), MOST_WARM_UP * rows[-1].seconds)
    busy = _busy(tally, begun, rows[-1].seconds)
    tally.served = [one for one in tally.served if one.arrived_at >= begun]
    slo = Slo(target.ttft_seconds, target.tpot_seconds)
    both = summarise("ours", tally, slo)
    ttft = summarise("ours", tally, Slo(target.ttft_seconds, math.inf))
    tpot = summarise("ours", tally, Slo(math.inf, target.tpot_seconds))
    counted = max(len(tally.served), 1)
    return Simulated(
        pools=pools,
        scale=small.num_workers / pools.num_workers,
        num_requests=len(rows),
        ttft_seconds=both.ttft_seconds,
        tpot_seconds=both.tpot_seconds,
        attainment=both.attainment,
        deviation=math.sqrt(max(both.attainment * (1 - both.attainment), 1 / counted) / counted),
        ttft_attainment=ttft.attainment,
        tpot_attainment=tpot.attainment,
        goodput_per_second=both.attainment * per_second,
        hit_rate=both.hit_rate,
        prefill_busy=busy,
        handed_over=sum(one.prefill is not None for one in tally.served) / counted,
        unfinished=sum(one.outcome != "finished" for one in tally.served),
        settled=number >= _needed(rate, stay_seconds),
    )


def _busy(tally: Tally, begun: float, ended: float) -> float | None:
    """The share of time that prefill workers compute. None: there are none, and of unified ones it cannot be told apart."""
    names = [name for name, role in tally.roles.items() if role is Role.PREFILL]
    first, last = math.ceil(begun / tally.slice_seconds), math.floor(ended / tally.slice_seconds)
    if last <= first or not names:
        return None
    spent = sum(sum(tally.workers[name].busy_seconds[first:last]) for name in names)
    return spent / (last - first) / tally.slice_seconds / len(names)
