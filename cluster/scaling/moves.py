"""From what there is to what is needed, in the fewest and cheapest steps: flips of roles first, then replicas.

A flip keeps the GPUs and takes seconds: it is done where the other role can spare the worker for what it needed at most in
the last FLIP_SHARE of the hold, and for what decodes there now. A new worker must fit its pool's bounds, and the budget
together with all that still hold GPUs, those that leave too. A worker is taken away when those that remain would have
sufficed at every time of the hold, and suffice for as many sequences as decode now (`in_flight`).
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

from cluster.scaling.needs import reference, weight
from cluster.scaling.values import Inputs, Needs, PoolRules, Size
from headrace.values import Role

FLIP_SHARE = 1 / 6
UNCLEAR_HOLDS = 6  # after it grew, where a little more load would need it again: chance would swing it
EPSILON = 1e-6


@dataclass
class Plan:
    """Sizes while they are worked out. Owned by one decision."""

    inputs: Inputs
    bounds: Mapping[str, PoolRules]
    sizes: dict[str, Size]
    steps: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    grown: set[str] = field(default_factory=set)
    shrunk: set[str] = field(default_factory=set)
    flipped: set[str] = field(default_factory=set)
    given_up: set[str] = field(default_factory=set)

    def supply(self, role: Role) -> float:
        """Workers of the role, in those of its reference pool; without those that start again and again."""
        total = 0.0
        for name, size in self.sizes.items():
            own = self.bounds[name].role
            if own is role:
                there = size.replicas - size.lent
                total += (there - min(self.inputs.pools[name].failing, there)) * weight(self.inputs, name, role)
            elif own.other is role and size.lent:
                total += size.lent * weight(self.inputs, name, role)
        return total

    def serving(self, role: Role) -> float:
        """As `supply`, of those alone that serve by now: who starts, waits for room or fails again and again does not."""
        total = 0.0
        for name, size in self.sizes.items():
            own, seen = self.bounds[name].role, self.inputs.pools[name]
            there = min(size.replicas, seen.ready)
            if own is role:
                total += max(there - size.lent, 0) * weight(self.inputs, name, role)
            elif own.other is role and size.lent:
                total += min(size.lent, there) * weight(self.inputs, name, role)
        return total

    @property
    def gpus(self) -> int:
        return sum(size.replicas * self.bounds[name].gpus for name, size in self.sizes.items())

    @property
    def committed_gpus(self) -> int:
        """Of what is to be, of what goes for it and is not gone yet, of what leaves already, and of pools that are none any
        more."""
        return self.inputs.other_gpus + sum(
            (max(size.replicas, self.inputs.pools[name].staying) + self.inputs.pools[name].leaving)
            * self.bounds[name].gpus
            for name, size in self.sizes.items()
        )


def serving_pools(plan: Plan, role: Role) -> Iterable[str]:
    return [name for name, rules in plan.bounds.items() if rules.role is role]


def grow(plan: Plan, found: Needs, spare: Callable[[Role], float]) -> None:
    """Meets what is needed, as far as it can be. `spare(role)`: what the role must keep when it lends."""
    _share_out(plan, found)
    for role in sorted((Role.PREFILL, Role.DECODE, Role.UNIFIED), key=lambda role: _relative(plan, found, role)):
        short = reference(plan.inputs, role) is not None
        while short and plan.supply(role) < found.of(role) - EPSILON:
            short = any(step() for step in _in_order(plan, role, found, spare))
        if reference(plan.inputs, role) is not None and plan.supply(role) < found.of(role) - EPSILON:
            _note_short(plan, role, found)


def _share_out(plan: Plan, found: Needs) -> None:
    """Where the budget has too little for two roles that are short, each gets its part of what there is: prompts that are
    computed at once by who had all of it wait for those that decode."""
    budget = plan.inputs.rules.budget_gpus
    if budget is None:
        return
    free, missing = budget - plan.committed_gpus, dict[Role, float]()
    for role in (Role.PREFILL, Role.DECODE):
        name = reference(plan.inputs, role)
        if name is not None and (short := found.of(role) - plan.supply(role)) > EPSILON:
            missing[role] = short * plan.bounds[name].gpus
    if len(missing) < 2 or sum(missing.values()) <= free:
        return
    for role, gpus in missing.items():
        name = reference(plan.inputs, role)
        part = int(free * gpus / sum(missing.values()) / plan.bounds[name].gpus) if name is not None else 0
        if part > 0:
            _add(plan, role, found, most=part)


def _in_order(
    plan: Plan, role: Role, found: Needs, spare: Callable[[Role], float]
) -> tuple[Callable[[], bool], Callable[[], bool]]:
    """Flips first; but what was flipped the other way within the hold comes back only where nothing else is to be had."""
    flip, add = partial(_flip, plan, role, spare), partial(_add, plan, role, found)
    other_way = plan.inputs.memory.flipped_at.get(role.other.value)
    swings = other_way is not None and plan.inputs.now - other_way < plan.inputs.rules.hold_seconds
    return (add, flip) if swings else (flip, add)


def _relative(plan: Plan, found: Needs, role: Role) -> float:
    return plan.supply(role) / found.of(role) if found.of(role) else 1e9


def _flip(plan: Plan, role: Role, spare: Callable[[Role], float]) -> bool:
    """One worker of the other role comes: one that was lent there first, then one that is lent here."""
    other = role.other
    if other is role:
        return False
    # Who is not ready cannot flip, and does not serve in the place of who does.
    left = min(plan.supply(other), plan.serving(other)) - max(spare(other), 1.0 if other is Role.DECODE else 0.0)
    candidates = [
        (name, Size(size.replicas, size.lent - 1), f"{name}: a lent worker is back at {role.value}")
        for name, size in plan.sizes.items()
        if plan.bounds[name].role is role and size.lent
    ]
    candidates += [
        (name, Size(size.replicas, size.lent + 1), f"{name}: a worker is lent to {role.value}")
        for name, size in plan.sizes.items()
        if plan.bounds[name].role is other and size.replicas > size.lent
    ]
    for name, size, said in candidates:
        if weight(plan.inputs, name, other) <= left + EPSILON:
            plan.sizes[name] = size
            plan.steps.append(said)
            plan.flipped.add(role.value)
            return True
    return False


def _add(plan: Plan, role: Role, found: Needs, most: int | None = None) -> bool:
    """As many workers as are missing (at most `most`), to the pool that gives the most for a GPU."""
    pools = sorted(serving_pools(plan, role), key=lambda name: plan.bounds[name].gpus / weight(plan.inputs, name, role))
    for name in pools:
        room = _room(plan, name)
        if room <= 0:
            continue
        missing = (found.of(role) - plan.supply(role)) / weight(plan.inputs, name, role)
        number = min(room, max(int(missing - EPSILON) + 1, 1))
        number = number if most is None else min(number, most)
        size = plan.sizes[name]
        plan.sizes[name] = Size(size.replicas + number, size.lent)
        plan.steps.append(f"{name}: {number} more, {size.replicas + number} in all")
        plan.grown.add(name)
        return True
    return False


def _room(plan: Plan, name: str) -> int:
    """How many workers the pool may have more."""
    rules, size, seen = plan.bounds[name], plan.sizes[name], plan.inputs.pools[name]
    if name in plan.given_up or is_blocked(plan.inputs, name) or seen.failing:
        return 0
    room = rules.most - size.replicas
    budget = plan.inputs.rules.budget_gpus
    if budget is not None:
        free = budget - plan.committed_gpus
        room = min(room, free // rules.gpus + max(seen.staying - size.replicas, 0))
    return room


def is_blocked(inputs: Inputs, name: str) -> bool:
    blocked = inputs.memory.blocked.get(name)
    return blocked is not None and inputs.now < blocked.until


def _note_short(plan: Plan, role: Role, found: Needs) -> None:
    why = []
    for name in serving_pools(plan, role):
        if name in plan.given_up:
            why.append(f"{name} found no room in the cluster")
        elif is_blocked(plan.inputs, name):
            seconds = plan.inputs.memory.blocked[name].until - plan.inputs.now
            why.append(f"{name} found no room in the cluster and is tried again in {seconds:.0f} s")
        elif failing := plan.inputs.pools[name].failing:
            why.append(f"{failing} of {name} fail to start, and no more are tried")
        elif plan.sizes[name].replicas >= plan.bounds[name].most:
            why.append(f"{name} may have at most {plan.bounds[name].most}")
        else:
            why.append(f"{plan.committed_gpus} of the budget's {plan.inputs.rules.budget_gpus} GPUs are taken")
    supply, needed = plan.supply(role), found.of(role)
    plan.notes.append(f"{role.value}: {needed:.1f} workers are needed and {supply:.1f} are to be had: {'; '.join(why)}")


def shrink(plan: Plan, found: Needs, most: Callable[[Role], float], with_margin: Callable[[Role], float]) -> None:
    """Takes away what was not needed at any time of the hold. `most(role)`: the most that was, or would have been if a
    little more had come."""
    for role in (Role.PREFILL, Role.DECODE, Role.UNIFIED):
        names = sorted(
            (name for name in plan.sizes if _serves(plan, name, role)),
            key=lambda name: (
                plan.bounds[name].role is role,
                -plan.bounds[name].gpus / weight(plan.inputs, name, role),
            ),
        )
        for name in names:
            _shrink_pool(plan, name, role, most(role), with_margin(role), found)


def _serves(plan: Plan, name: str, role: Role) -> bool:
    own = plan.bounds[name].role
    return own is role or (own.other is role and plan.sizes[name].lent > 0)


def _shrink_pool(plan: Plan, name: str, role: Role, needed: float, with_margin: float, found: Needs) -> None:
    size, rules, seen = plan.sizes[name], plan.bounds[name], plan.inputs.pools[name]
    if seen.starting or seen.pending:
        return
    lent = rules.role is not role
    # One that leaves by itself (a spot notice), or fails, is not to spare twice.
    there, must = min(plan.supply(role), plan.serving(role)), _must_keep(plan, name, needed, with_margin)
    most = min(size.replicas - rules.least, size.lent if lent else size.replicas - size.lent)

    def number_beyond(kept: float) -> int:
        return max(min(int(max((there - kept) / weight(plan.inputs, name, role) + EPSILON, 0.0)), most), 0)

    number = number_beyond(max(must, found.running(role)))
    if number < number_beyond(must):
        plan.notes.append(
            f"{name}: {number_beyond(must)} fewer would do for what comes, {number} for what runs: "
            f"{found.in_flight[role.value].reason}"
        )
    if not number:
        return
    plan.sizes[name] = Size(size.replicas - number, size.lent - number if lent else size.lent)
    plan.steps.append(f"{name}: {number} fewer, {size.replicas - number} in all")
    plan.shrunk.add(name)


def _must_keep(plan: Plan, name: str, needed: float, with_margin: float) -> float:
    """A pool does not breathe with chance: after it grew it goes down as far as is clear, and only much later further."""
    inputs, hold = plan.inputs, plan.inputs.rules.hold_seconds
    grown = inputs.memory.grown_at.get(name)
    if grown is None or inputs.now - grown >= UNCLEAR_HOLDS * hold:
        return needed
    return with_margin if inputs.now - grown >= hold else math.inf
