"""One decision: the inputs as they are recorded → sizes and lent workers, with reasons and alternatives.

    nothing is known      hold; what found no room is still given up
    roll back             workers that wait for room longer than they may
    bounds                sizes within what the configuration allows, and within the budget
    grow                  flips, then replicas (`moves`), to what is needed (`needs`)
    shrink                only where nothing grew, and all is known

Equal inputs give equal decisions, in any process: what was recorded is decided again by this very function.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from cluster.scaling.in_flight import in_flight
from cluster.scaling.moves import FLIP_SHARE, Plan, grow, is_blocked, shrink
from cluster.scaling.needs import accounted, attainment, boosted, needs
from cluster.scaling.values import (
    ROLES,
    Alternative,
    Blocked,
    Decision,
    Inputs,
    Memory,
    Needs,
    Past,
    PoolRules,
    Size,
)
from headrace.values import Role

FIRST_BLOCK_SECONDS = 300.0
MAX_BLOCK_SECONDS = 3600.0
PARTS = 12  # of the hold, each remembered by its most
WHATEVER_THERE_IS = 1e9  # workers


def decide(inputs: Inputs) -> Decision:
    rules = inputs.rules
    current = {name: seen.desired for name, seen in inputs.pools.items()}
    if not inputs.traffic.routers:
        return _without_reports(inputs, current)
    found = replace(needs(inputs), in_flight=in_flight(inputs))
    past = _remember(inputs, found)
    plan = _plan(inputs, rules.pools, current, found, past)
    advised = plan.sizes
    if rules.mode == "external":
        advising = _advising(inputs, found, past)
        advised = _not_fewer(inputs, advising.sizes) if inputs.traffic.unheard else advising.sizes
        fixed = {name: replace(pool, least=0, most=current[name].replicas) for name, pool in rules.pools.items()}
        plan = _plan(inputs, fixed, current, found, past, flips_alone=True)
        plan.grown, plan.shrunk = advising.grown, advising.shrunk
    memory = _next(inputs, plan, found, past, advised)
    pools = {name: plan.sizes[name] for name in current}
    kind = _kind(plan, current)
    notes = [*_evictions(inputs), *plan.notes]
    if inputs.traffic.unheard:
        notes.append(
            f"routers that are silent with requests in flight: {inputs.traffic.unheard}; nothing is taken away"
        )
    if found.unreachable:
        notes.insert(0, f"no size meets the targets: {found.unreachable}")
    return Decision(
        kind,
        "; ".join([*plan.steps, found.reason]),
        pools,
        advised,
        found,
        memory,
        tuple(notes),
        _alternatives(inputs, plan, current, found),
    )


def changes(decision: Decision, inputs: Inputs) -> bool:
    """Whether other sizes are to be than are desired now."""
    return any(decision.pools[name] != seen.desired for name, seen in inputs.pools.items())


def _plan(
    inputs: Inputs,
    bounds: Mapping[str, PoolRules],
    current: Mapping[str, Size],
    found: Needs,
    past: tuple[Past, ...],
    *,
    flips_alone: bool = False,
) -> Plan:
    plan = Plan(inputs, bounds, dict(current))
    if not flips_alone:
        _roll_back(plan)
        _bound(plan)
    hold = inputs.rules.hold_seconds
    lately = _most(inputs, past, hold * FLIP_SHARE)
    standby = {Role.DECODE: inputs.rules.standby_workers}
    if not flips_alone:
        _within_budget(plan, found)
    grow(plan, found, lambda role: max(lately(role) - standby.get(role, 0), found.running(role)))
    if not (plan.steps or flips_alone) and inputs.trusted and not inputs.traffic.unheard:
        if found.workers:
            shrink(plan, found, _most(inputs, past, hold), _most(inputs, past, hold, with_margin=True))
        else:
            _to_zero(plan)
    return plan


def _advising(inputs: Inputs, found: Needs, past: tuple[Past, ...]) -> Plan:
    """Where others set sizes: from what was advised last to what is needed now, as if all of that were there. A pod that
    starts again is no smaller pool, and advice that followed each of them would have an HPA take it away."""
    last = inputs.memory.advised
    sizes, pools = {}, {}
    for name, seen in inputs.pools.items():
        number = last.get(name, seen.desired.replicas)
        sizes[name] = Size(number, min(seen.desired.lent, number))
        pools[name] = replace(
            seen, desired=sizes[name], ready=number, ready_lent=sizes[name].lent, starting=0, pending=0, failing=0
        )
    there = replace(inputs, pools=pools)
    return _plan(there, inputs.rules.pools, sizes, found, past)


def _without_reports(inputs: Inputs, current: Mapping[str, Size]) -> Decision:
    plan = Plan(inputs, inputs.rules.pools, dict(current))
    if inputs.rules.mode != "external":
        _roll_back(plan)
    found = Needs(reason="no router reports: nothing is known of the load, and nothing is taken away")
    advised = _not_fewer(inputs, plan.sizes)
    memory = _next(inputs, plan, found, inputs.memory.past, advised)
    kind = _kind(plan, current)
    notes = _evictions(inputs)
    return Decision(kind, "; ".join([*plan.steps, found.reason]), plan.sizes, advised, found, memory, tuple(notes))


def _not_fewer(inputs: Inputs, sizes: Mapping[str, Size]) -> dict[str, Size]:
    """Where others set sizes, at least what was advised last: who is not there just now (its pod starts again, its node
    died) is still to be, while nobody knows the load; an HPA would take away what is not advised."""
    last = inputs.memory.advised if inputs.rules.mode == "external" else {}
    return {name: replace(size, replicas=max(size.replicas, last.get(name, 0))) for name, size in sizes.items()}


def _roll_back(plan: Plan) -> None:
    """Who waits for room longer than it may is given up; its pool is left alone for a while, twice as long each time."""
    for name, seen in plan.inputs.pools.items():
        if seen.pending and seen.pending_seconds > plan.inputs.rules.pending_seconds:
            size = plan.sizes[name]
            # Who found room stays, though fewer are wanted by now than there are with those that did not.
            number = min(seen.pending, max(size.replicas - seen.ready - seen.starting, 0))
            plan.given_up.add(name)
            if not number:
                continue
            plan.sizes[name] = Size(size.replicas - number, min(size.lent, size.replicas - number))
            plan.steps.append(f"{name}: {number} found no room within {seen.pending_seconds:.0f} s and are given up")


def _bound(plan: Plan) -> None:
    for name, rules in plan.bounds.items():
        size = plan.sizes[name]
        least = 0 if name in plan.given_up or is_blocked(plan.inputs, name) else rules.least
        number = min(max(size.replicas, least), rules.most if plan.inputs.trusted else max(rules.most, size.replicas))
        if number > size.replicas:
            # Others may hold the GPUs that its least takes, for as long as they leave.
            budget = plan.inputs.rules.budget_gpus
            free = budget - plan.committed_gpus if budget is not None else number * rules.gpus
            number = min(number, size.replicas + max(free, 0) // rules.gpus)
        if number != size.replicas:
            plan.sizes[name] = Size(number, min(size.lent, number))
            plan.steps.append(f"{name}: {number}, between {rules.least} and {rules.most}")


def _within_budget(plan: Plan, found: Needs) -> None:
    """Where more is desired than the budget holds (it was made smaller, or somebody else wrote more): workers of the role
    that is the least short go, whatever the load."""
    budget = plan.inputs.rules.budget_gpus
    if budget is None or not plan.inputs.trusted:
        return

    def relative(name: str) -> float:
        role = plan.bounds[name].role
        return plan.supply(role) / found.of(role) if found.of(role) else math.inf

    while plan.gpus > budget:
        names = [name for name, rules in plan.bounds.items() if plan.sizes[name].replicas > rules.least]
        if not names:
            return
        name = max(names, key=relative)
        size = plan.sizes[name]
        plan.sizes[name] = Size(size.replicas - 1, min(size.lent, size.replicas - 1))
        plan.steps.append(f"{name}: {size.replicas - 1}, for the budget of {budget} GPUs")
        plan.shrunk.add(name)


def _to_zero(plan: Plan) -> None:
    """Nothing has come for a long time: as few as each pool may have."""
    for name, rules in plan.bounds.items():
        size, seen = plan.sizes[name], plan.inputs.pools[name]
        if size.replicas > rules.least and not (seen.starting or seen.pending):
            plan.sizes[name] = Size(rules.least, 0)
            plan.steps.append(f"{name}: {rules.least}")
            plan.shrunk.add(name)


# -- what is remembered


def _remember(inputs: Inputs, found: Needs) -> tuple[Past, ...]:
    """The most of each part of the hold, the running one with what is needed now."""
    part = inputs.rules.hold_seconds / PARTS
    past = list(_since(inputs.memory.past, inputs.now - inputs.rules.hold_seconds))
    if past and past[-1].since > inputs.now - part:
        last = past.pop()
        return (
            *past,
            Past(last.since, _larger(last.workers, found.workers), _larger(last.with_margin, found.with_margin)),
        )
    return (*past, Past(inputs.now, dict(found.workers), dict(found.with_margin)))


def _since(past: Sequence[Past], start: float) -> Sequence[Past]:
    """Those that reach beyond `start`: each lasts until the next, however far apart the turns are."""
    ended = sum(following.since <= start for following in past[1:])
    return past[ended:]


def _larger(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    return {role: max(one.get(role, 0.0), other.get(role, 0.0)) for role in sorted(one.keys() | other.keys())}


def _most(
    inputs: Inputs, past: tuple[Past, ...], seconds: float, *, with_margin: bool = False
) -> Callable[[Role], float]:
    """The most of a role that was needed within so many seconds. Less than that is known: whatever there is."""
    known = bool(past) and past[0].since <= inputs.now - seconds + 1e-9
    within = _since(past, inputs.now - seconds)

    def most(role: Role) -> float:
        if not known:
            return WHATEVER_THERE_IS
        return max((one.with_margin if with_margin else one.workers).get(role.value, 0.0) for one in within)

    return most


def _next(inputs: Inputs, plan: Plan, found: Needs, past: tuple[Past, ...], advised: Mapping[str, Size]) -> Memory:
    memory, now = inputs.memory, inputs.now
    supplies = {role.value: plan.supply(role) for role in ROLES}
    boost, boosted_at, missing_since = memory.boost, memory.boosted_at, None
    if found.workers:
        boost, boosted_at, missing_since = boosted(inputs, supplies, found)
    blocked = {
        name: block
        for name, block in memory.blocked.items()
        if now < block.until + block.seconds and _short(inputs, name)
    }
    for name in sorted(plan.given_up):
        before = memory.blocked.get(name)
        seconds = min(2 * before.seconds, MAX_BLOCK_SECONDS) if before is not None else FIRST_BLOCK_SECONDS
        blocked[name] = Blocked(now + seconds, seconds)
    return Memory(
        past,
        {**memory.grown_at, **dict.fromkeys(sorted(plan.grown), now)},
        {**memory.shrunk_at, **dict.fromkeys(sorted(plan.shrunk), now)},
        {**memory.flipped_at, **dict.fromkeys(sorted(plan.flipped), now)},
        blocked,
        boost,
        boosted_at,
        missing_since,
        accounted(inputs),
        {name: size.replicas for name, size in advised.items()} if inputs.rules.mode == "external" else {},
    )


def _short(inputs: Inputs, name: str) -> bool:
    """A pool that got workers after all is blocked no longer."""
    seen, block = inputs.pools[name], inputs.memory.blocked[name]
    return not (inputs.now >= block.until and seen.settled and seen.desired.replicas > 0 and not seen.pending)


# -- what is said


def _evictions(inputs: Inputs) -> list[str]:
    """Not decided here, but on record: the controller starts others in the places of those that go."""
    return [
        f"{name}: {seen.evicted} of its workers drain, for their nodes are taken away; as many start elsewhere"
        for name, seen in inputs.pools.items()
        if seen.evicted
    ]


def _kind(plan: Plan, current: Mapping[str, Size]) -> str:
    kinds = []
    for name, size in plan.sizes.items():
        if size.replicas > current[name].replicas:
            kinds.append("grow")
        elif size.replicas < current[name].replicas:
            kinds.append("rollback" if name in plan.given_up else "shrink")
        if size.lent != current[name].lent and size.replicas >= current[name].replicas:
            kinds.append("flip")
    return "+".join(sorted(set(kinds))) or "hold"


def _alternatives(inputs: Inputs, plan: Plan, current: Mapping[str, Size], found: Needs) -> tuple[Alternative, ...]:
    """What stays as it is, and each pool one more, one fewer, one lent: what that would give, and why it is not done."""
    if not found.workers:
        return ()
    rate = max(inputs.forecast.peak, inputs.traffic.level)
    tried: dict[str, dict[str, Size]] = {"as it is": dict(current)}
    for name, size in current.items():
        rules = inputs.rules.pools[name]
        tried[f"{name} one more"] = {**current, name: Size(size.replicas + 1, size.lent)}
        if size.replicas > size.lent:
            tried[f"{name} one fewer"] = {**current, name: Size(size.replicas - 1, size.lent)}
            if rules.role.other is not rules.role:
                tried[f"{name} one lent"] = {**current, name: Size(size.replicas, size.lent + 1)}
    alternatives = []
    for what, sizes in tried.items():
        if sizes == plan.sizes:
            continue
        other = Plan(inputs, inputs.rules.pools, sizes)
        given = attainment(inputs, {role: other.supply(role) for role in ROLES}, rate)
        alternatives.append(Alternative(what, other.gpus, given, _why_not(inputs, other, found, plan)))
    return tuple(alternatives)


def _why_not(inputs: Inputs, other: Plan, found: Needs, plan: Plan) -> str:
    for name, size in other.sizes.items():
        rules = inputs.rules.pools[name]
        if not rules.least <= size.replicas <= rules.most:
            return f"{name} has between {rules.least} and {rules.most}"
    budget = inputs.rules.budget_gpus
    if budget is not None and other.committed_gpus > budget and other.gpus > plan.gpus:
        return f"{other.committed_gpus} GPUs, the budget is {budget}"
    for role in ROLES:
        if other.supply(role) < found.of(role) - 1e-6:
            return f"{role.value}: {found.of(role):.1f} needed, {other.supply(role):.1f} there"
        if other.supply(role) < found.running(role) - 1e-6:
            return f"{role.value}: {found.in_flight[role.value].reason}, {other.supply(role):.1f} there"
    if other.gpus > plan.gpus:
        return f"{other.gpus - plan.gpus} GPUs more than needed"
    return "enough now, but not for as long as it must have been" if other.gpus < plan.gpus else "no gain"
