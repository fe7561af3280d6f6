"""A week of traffic before the production autoscaler: days and nights, a weekend, surges and bursts.

Reports → meter → history → decide are production's own, by the second and every half minute as in a cluster. What serves is
a fluid (`cluster.simulation.fluid`), no event simulation: how far its formulas are from one, `cluster.planning.accuracy`
measures.

Beside it runs a clairvoyant: it knows the true rate of every five minutes, has the fewest workers for it by the same cost
model, at once and without a start, and as little reserve as keeps the same share of requests within the targets.
"""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from cluster.planning.load import Load, Pools
from cluster.planning.sizing import Sized, size
from cluster.scaling.decide import changes, decide
from cluster.scaling.forecast import History
from cluster.scaling.traffic import Meter
from cluster.scaling.values import Inputs, Memory, PoolSeen, Rules, Size
from cluster.simulation.fluid import (
    DECIDE_SECONDS,
    FLIP_SECONDS,
    HIT_RATE,
    INPUT_TOKENS,
    OUTPUT_TOKENS,
    START_SECONDS,
    Draining,
    Fluid,
    World,
)
from cluster.simulation.surplus import Surplus
from headrace.reports import ClassCounts, RouterReport
from headrace.values import Role

DAY = 86_400
CLAIRVOYANT_SECONDS = 300
RESERVES = (0.9, 0.95, 1.0, 1.03, 1.06, 1.1, 1.15, 1.2, 1.3)
NIGHT = 0.25  # of the day's peak
WEEKEND = 0.6
SURGES_A_DAY, SURGE, SURGE_SECONDS, SURGE_RAMP_SECONDS = 3, 1.4, 900, 240
BURSTS_AN_HOUR, BURST, BURST_SECONDS = 2, 3.0, 3


@dataclass(frozen=True, slots=True)
class Traffic:
    """`rates`: arrivals a second, expected, by the second; `arrivals`: those that came."""

    rates: np.ndarray
    arrivals: np.ndarray

    @classmethod
    def of(cls, days: float, peak: float, seed: int) -> "Traffic":
        """A cosine over each day, lower at the weekend; surges that build up over minutes and pass, at any time; bursts of
        seconds, of which nobody knows before."""
        random = np.random.default_rng(seed)
        seconds = np.arange(int(days * DAY))
        swing = NIGHT + (1 - NIGHT) * (1 - np.cos(2 * math.pi * seconds / DAY)) / 2
        rates = peak * swing * np.where(seconds // DAY % 7 >= 5, WEEKEND, 1.0)
        for at in random.uniform(0, len(seconds), int(SURGES_A_DAY * days)):
            since = seconds - at
            ramp = np.minimum(since / SURGE_RAMP_SECONDS, (SURGE_SECONDS - since) / SURGE_RAMP_SECONDS)
            rates = rates * (1 + (SURGE - 1) * np.clip(ramp, 0, 1))
        true = rates.copy()
        for at in random.integers(0, len(seconds), int(BURSTS_AN_HOUR * 24 * days)):
            true[at : at + BURST_SECONDS] *= BURST
        return cls(rates, random.poisson(true))

    @classmethod
    def constant(cls, hours: float, rate: float, seed: int) -> "Traffic":
        rates = np.full(int(hours * 3600), rate)
        return cls(rates, np.random.default_rng(seed).poisson(rates))


@dataclass
class Fleet:
    """Workers of one pool by when they are ready. They hold their GPUs from the order to the end of the drain; who starts
    has nothing to finish."""

    desired: Size
    ready_at: list[float] = field(default_factory=list)
    draining: list[Draining] = field(default_factory=list)
    lent: int = 0
    flips_until: float = 0.0

    def order(self, size: Size, now: float, drain: Callable[[int], Draining]) -> None:
        """`drain`: has one of so many that serve drain."""
        more = size.replicas - len(self.ready_at)
        self.ready_at += [now + START_SECONDS] * max(more, 0)
        for _ in range(max(-more, 0)):
            serving = self.ready(now)
            if serving == len(self.ready_at):
                self.draining.append(drain(serving))
            self.ready_at.remove(max(self.ready_at))
        if size.lent != self.lent:
            self.lent, self.flips_until = size.lent, now + FLIP_SECONDS
        self.desired = size

    def forget_gone(self) -> None:
        self.draining = [worker for worker in self.draining if not worker.is_gone]

    def ready(self, now: float) -> int:
        return sum(at <= now for at in self.ready_at)

    @property
    def num_holding(self) -> int:
        return len(self.ready_at) + len(self.draining)


@dataclass
class Outcome:
    """Of one run. `changes` by hour: decisions that changed what is desired, `moves` each with its kind; `sizes`: (since,
    prefill, decode) workers that serve; `kept`: the share of each second's arrivals that kept their targets; `surplus`: see
    `cluster.simulation.surplus`."""

    attainment: float
    gpu_hours: float
    arrivals: int
    late: float
    slow: float
    changes: Counter[int]
    kinds: Counter[str]
    most_gpus: int
    trace: list[tuple[int, float, int, int]]
    sizes: list[tuple[int, int, int]]
    moves: list[tuple[int, str]]
    kept: np.ndarray
    surplus: dict[str, float]

    def sizes_within(self, first: int, end: int) -> tuple[int, int] | None:
        """(prefill, decode) workers from `first` on; None where others served before `end`."""
        at = bisect_right(self.sizes, (first, 1 << 30, 0)) - 1
        if at < 0 or (at + 1 < len(self.sizes) and self.sizes[at + 1][0] < end):
            return None
        return self.sizes[at][1:]

    @property
    def most_changes_an_hour(self) -> int:
        return max(self.changes.values(), default=0)


def follow(world: World, traffic: Traffic, rules: Rules, start: Mapping[str, Size]) -> Outcome:
    """The production autoscaler over this traffic."""
    fleets = {name: Fleet(size, [0.0] * size.replicas) for name, size in start.items()}
    fluid, meter, history, memory = Fluid(world), Meter(rules.window_seconds), History(), Memory()
    counts, gpu_seconds, most = Totals(), 0.0, 0
    changed: Counter[int] = Counter()
    kinds: Counter[str] = Counter()
    trace: list[tuple[int, float, int, int]] = []
    changed_sizes: list[tuple[int, int, int]] = []
    moves: list[tuple[int, str]] = []
    kept_by_second = np.ones(len(traffic.arrivals))
    surplus = Surplus(world)
    sizes, ordered = (0, 0), False
    drains = {"prefill": fluid.drain_prefill, "decode": fluid.drain_decode}
    for second, arrivals in enumerate(traffic.arrivals.tolist()):
        for fleet in fleets.values():
            fleet.forget_gone()
        if ordered or second % FLIP_SECONDS == 0:
            before, sizes = sizes, _serving(fleets, second)
            if sizes != before:
                changed_sizes.append((second, *sizes))
            ordered = False
        held = sum(fleet.num_holding for fleet in fleets.values())
        gpu_seconds += held
        most = max(most, held)
        kept = kept_by_second[second] = fluid.step(arrivals, *sizes)
        counts.add(arrivals, kept, fluid)
        if second % DECIDE_SECONDS == 0:
            reports = {"r": counts.report(second, fluid)}
            history.add(meter.look(reports, float(second)), DECIDE_SECONDS if second else 0, float(second))
            heard = meter.traffic(float(second))
            pools = {name: _seen(world, fleet, second) for name, fleet in fleets.items()}
            pools["decode"] = replace(pools["decode"], decoding=fluid.decoding)
            forecast = history.forecast(heard.level, rules.lead_seconds)
            inputs = Inputs(float(second), rules, pools, heard, forecast, memory)
            decision = decide(inputs)
            memory = decision.memory
            surplus.add(inputs, decision, float(traffic.rates[second]), DECIDE_SECONDS)
            if changes(decision, inputs):
                changed[second // 3600] += 1
                kinds[decision.kind] += 1
                moves.append((second, decision.kind))
                _flip(fleets, decision.pools, second, fluid)
                for name, size_ in decision.pools.items():
                    fleets[name].order(size_, second, drains[name])
                ordered = True
        if second % CLAIRVOYANT_SECONDS == 0:
            trace.append((second, fluid.rate, *sizes))
    service = fluid.arrived or 1
    return Outcome(
        fluid.attainment,
        gpu_seconds / 3600,
        fluid.arrived,
        fluid.late / service,
        fluid.slow / service,
        changed,
        kinds,
        most,
        trace,
        changed_sizes,
        moves,
        kept_by_second,
        surplus.of(gpu_seconds / 3600),
    )


@dataclass
class Totals:
    """What the one router would have counted."""

    arrivals: int = 0
    met: float = 0.0

    def add(self, arrivals: int, kept: float, fluid: Fluid) -> None:
        self.arrivals += arrivals
        self.met += arrivals * kept

    def report(self, second: int, fluid: Fluid) -> RouterReport:
        met, late = round(self.met), round(fluid.late)
        return RouterReport(
            "r",
            "",
            float(second),
            self.arrivals,
            prompt_tokens=round(self.arrivals * INPUT_TOKENS),
            computed_tokens=round(self.arrivals * INPUT_TOKENS * (1 - HIT_RATE)),
            cached_tokens=round(self.arrivals * INPUT_TOKENS * HIT_RATE),
            generated_tokens=round(self.arrivals * OUTPUT_TOKENS),
            ended=self.arrivals,
            in_flight=fluid.decoding.sequences,
            queued=round(fluid.waiting_prompts),
            queued_tokens=round(fluid.waiting_prompts * INPUT_TOKENS),
            classes={"": ClassCounts(met=met, missed_ttft=late, missed_tpot=max(self.arrivals - met - late, 0))},
        )


def _flip(fleets: Mapping[str, Fleet], wanted: Mapping[str, Size], now: float, fluid: Fluid) -> None:
    """Who is lent from now on, or comes back, keeps what it has of the role that it served, as in a cluster."""
    prefill, decode = fleets["prefill"], fleets["decode"]
    serving = {
        Role.PREFILL: prefill.ready(now) - prefill.lent + decode.lent,
        Role.DECODE: decode.ready(now) - decode.lent + prefill.lent,
    }
    for name, role in (("prefill", Role.PREFILL), ("decode", Role.DECODE)):
        more = wanted[name].lent - fleets[name].lent
        before = role if more > 0 else role.other
        for _ in range(abs(more)):
            if serving[before] > 0:
                fluid.flip(before, serving[before])
            serving[before] -= 1
            serving[before.other] += 1


def _serving(fleets: Mapping[str, Fleet], now: float) -> tuple[int, int]:
    """(prefill, decode) workers; one that flips serves neither for the moment."""
    prefill, decode = fleets["prefill"], fleets["decode"]
    out = prefill.ready(now) - prefill.lent, decode.ready(now) - decode.lent
    lent = [fleet.lent if fleet.flips_until <= now else 0 for fleet in (decode, prefill)]
    return max(out[0], 0) + lent[0], max(out[1], 0) + lent[1]


def _seen(world: World, fleet: Fleet, now: float) -> PoolSeen:
    ready = fleet.ready(now)
    warming = sum(now - 60 < at <= now and at > 0 for at in fleet.ready_at)
    return PoolSeen(
        fleet.desired,
        world.worker,
        ready,
        min(fleet.lent, ready),
        len(fleet.ready_at) - ready,
        leaving=len(fleet.draining),
        warming=warming,
    )


def clairvoyant(world: World, traffic: Traffic, attainment: float) -> tuple[float, float]:
    """(GPU-hours, its own attainment) of the fewest workers in each stretch by the true rate, with the least of RESERVES
    that keeps `attainment`. It keeps no worker for one that may die: nor do we (what must suffice without one more is the
    load of now, docs/autoscaling.md), and nobody dies in a week."""
    at = RESERVES.index(1.0)
    found = _knowing(world, traffic, RESERVES[at])
    if found[1] < attainment:
        while found[1] < attainment and at + 1 < len(RESERVES):
            at += 1
            found = _knowing(world, traffic, RESERVES[at])
        return found
    while at and (less := _knowing(world, traffic, RESERVES[at - 1]))[1] >= attainment:
        at, found = at - 1, less
    return found


def _knowing(world: World, traffic: Traffic, reserve: float) -> tuple[float, float]:
    fluid, gpu_seconds = Fluid(world), 0.0
    for second, arrivals in enumerate(traffic.arrivals.tolist()):
        if second % CLAIRVOYANT_SECONDS == 0:
            rate = float(traffic.rates[second : second + CLAIRVOYANT_SECONDS].max()) * reserve
            sized = fewest(world, coarse_up(rate))
        fluid.step(arrivals, sized.prefill, sized.decode)
        gpu_seconds += sized.num_workers
    return gpu_seconds / 3600, fluid.attainment


def coarse_up(rate: float) -> float:
    return 1.005 ** math.ceil(math.log(rate, 1.005))


@lru_cache(maxsize=4096)
def fewest(world: World, rate: float) -> Pools:
    sized = size(world.worker, world.worker, Load(rate, world.lengths), world.target)
    assert isinstance(sized, Sized), sized
    return sized.pools
