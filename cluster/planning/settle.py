"""Which of the ways to take: within budget, and grown until the simulation keeps the SLO."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from cluster.planning.asked import PlanAsked
from cluster.planning.check import Simulated, simulate
from cluster.planning.load import Load, Pools, Target
from cluster.planning.options import Kind, Option
from cluster.planning.prediction import Overload, Prediction
from cluster.planning.traffic import Traffic
from headrace.errors import ConfigError

MOST_ROUNDS = 8  # of growing a pool by simulation
GROWTH = 0.1
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Round:
    """One run of settling: which pools, what came of it."""

    pools: Pools
    simulated: Simulated
    predicted: Prediction | Overload


@dataclass(frozen=True, slots=True)
class Settled:
    """A way to serve whose `needed` pools kept the SLO in simulation (`holds`), after these rounds. Without simulation
    there are none, and prediction alone says so. `full`: the run with the spare workers. `no_better`: the largest pools
    that more rounds might have come to, where they do not keep it either."""

    option: Option
    rounds: tuple[Round, ...]
    holds: bool
    full: Simulated | None = None
    no_better: Round | None = None


def within(asked: PlanAsked, ways: list[Option], available: dict[str, int | None]) -> list[Option]:
    """The ways that the budget and the GPUs there are allow, by prediction."""
    found = [option for option in ways if over_budget(asked, option, available) is None]
    if not found:
        # What is short says which way is the least: GPUs, where those that are there or the budget's are too few.
        of_gpus = min(ways, key=lambda option: (option.num_gpus, option.per_hour))
        cheapest = min(ways, key=lambda option: (option.per_hour, option.num_gpus))
        least = of_gpus if asked.budget.per_month is None else cheapest
        others = "" if of_gpus == least else f"; the fewest GPUs are {described(of_gpus)}"
        raise ConfigError(
            f"{over_budget(asked, least, available)}; the least that keeps the SLO is {described(least)}{others}",
            gpus=least.num_gpus,
            per_month=round(least.per_month, 2),
        )
    return found


def over_budget(asked: PlanAsked, option: Option, available: dict[str, int | None]) -> str | None:
    there = available.get(option.gpu.name)
    if asked.budget.gpus is not None and option.num_gpus > asked.budget.gpus:
        return f"a budget of {asked.budget.gpus} GPUs is below the {option.num_gpus} that are needed"
    if there is not None and option.num_gpus > there:
        return f"{there} {option.gpu.name} are there, and {option.num_gpus} are needed"
    if asked.budget.per_month is not None and option.per_month > asked.budget.per_month:
        return f"a budget of {asked.budget.per_month:,.0f} a month is below the {option.per_month:,.0f} that are needed"
    return None


def check_budget(asked: PlanAsked, option: Option, available: dict[str, int | None]) -> None:
    over = over_budget(asked, option, available)
    if over is not None:
        raise ConfigError(f"{over}, after simulation: {described(option)}", gpus=option.num_gpus)


def described(option: Option) -> str:
    pools = option.pools
    if option.kind == "aggregated":
        workers = f"{pools.unified} unified workers of {option.layouts}"
    else:
        workers = f"{pools.prefill} prefill and {pools.decode} decode workers of {option.layouts}"
    return f"{option.num_gpus} {option.gpu.name} ({workers}), {option.per_month:,.0f} a month"


def best(ways: list[Option], kind: Kind) -> Option | None:
    return next((option for option in ways if option.kind == kind), None)


def settle(
    asked: PlanAsked, option: Option, traffic: Traffic, load: Load, target: Target, context: int, say: Say
) -> Settled:
    """Grows what the simulation finds too small. The pool whose limit was missed more often grows. Where that changed no
    more than chance does, the largest pools that all rounds might come to are run at once: what is short there, by more
    than chance, holds nowhere on the way. By chance it may: each worker has its prefixes to compute first."""
    rounds: list[Round] = []
    spare, looked_ahead = asked.headroom.spare_workers, False
    if not asked.simulate.requests:
        return Settled(option, (), True)

    def run(pools: Pools) -> Round:
        found = _simulated(asked, option, pools, traffic, load, target, context)
        say(f"{option.kind} {_short(pools)}: {found.attainment:.1%} of simulated requests keep the SLO")
        return Round(pools, found, option.predict(pools, load, target))

    while True:
        needed = option.needed
        rounds.append(run(needed))
        found = rounds[-1].simulated
        if found.holds(target) or len(rounds) == MOST_ROUNDS:
            return Settled(option, tuple(rounds), found.holds(target))
        if not looked_ahead and len(rounds) > 1 and _is_equal(rounds[-2].simulated, found):
            looked_ahead = True
            largest = run(_largest(needed, MOST_ROUNDS - len(rounds)))
            if largest.simulated.attainment + largest.simulated.deviation < target.attainment:
                return Settled(option, tuple(rounds), False, no_better=largest)
        option = option.with_needed(_grown(needed, found, target), spare)


def _is_equal(before: Simulated, after: Simulated) -> bool:
    return after.attainment - before.attainment <= max(before.deviation, after.deviation)


def _largest(needed: Pools, rounds: int) -> Pools:
    """That so many rounds come to at most, whichever pools they grow and however much."""
    for _ in range(rounds):
        needed = Pools(*(_more(number, 2.5 * GROWTH) if number else 0 for number in _numbers(needed)))
    return needed


def _numbers(pools: Pools) -> tuple[int, int, int]:
    return pools.prefill, pools.decode, pools.unified


def _more(number: int, step: float) -> int:
    return number + max(1, int(number * step))


def _grown(needed: Pools, found: Simulated, target: Target) -> Pools:
    """A tenth more, or a quarter where most of what was asked for is missing."""
    step = GROWTH if found.attainment > target.attainment / 2 else 2.5 * GROWTH
    if needed.unified:
        return replace(needed, unified=_more(needed.unified, step))
    if found.ttft_attainment <= found.tpot_attainment:
        return replace(needed, prefill=_more(needed.prefill, step))
    return replace(needed, decode=_more(needed.decode, step))


def _short(pools: Pools) -> str:
    return f"{pools.unified}" if pools.unified else f"{pools.prefill} + {pools.decode}"


def with_full(
    asked: PlanAsked, settled: Settled, traffic: Traffic, load: Load, target: Target, context: int, say: Say
) -> Settled:
    """The run with all workers there, which is what most hours are like."""
    option = settled.option
    if not settled.rounds:
        return settled
    if option.pools == option.needed:
        return replace(settled, full=settled.rounds[-1].simulated)
    found = _simulated(asked, option, option.pools, traffic, load, target, context)
    say(f"{option.kind} {_short(option.pools)}, none missing: {found.attainment:.1%}")
    return replace(settled, full=found)


def _simulated(
    asked: PlanAsked, option: Option, pools: Pools, traffic: Traffic, load: Load, target: Target, context: int
) -> Simulated:
    predicted = option.predict(pools, load, target)
    stay = 1.0
    if isinstance(predicted, Prediction):
        stay = predicted.ttft_mean_seconds + predicted.tpot_mean_seconds * traffic.output_tokens
    return simulate(
        pools,
        option.prefill,
        option.decode,
        traffic,
        load.requests_per_second,
        target,
        num_requests=asked.simulate.requests,
        max_context_tokens=max(context, traffic.longest_tokens + 512),
        stay_seconds=stay,
        seed=asked.simulate.seed,
    )
