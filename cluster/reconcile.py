"""What must change so that the observed pools become the desired ones. Pure: takes `now`, returns actions.

A worker is named by its slot, `<pool>-<index>`, and its generation grows with every start of that slot. A slot is given
out again only when nothing of its last worker is left. Workers that serve are drained before they go, which may take as
long as a request: where one that was too many is needed again meanwhile, another starts in the next free slot, as far as
the budget of GPUs goes. Workers that are dead are removed at once and their slot starts again after a delay that doubles
with every failure in a row.

Missing data takes nothing away: while `Desired.trusted` is false (Redis had none, so it was rebuilt from the
configuration), no worker is drained, none changes its role, and no pool is made smaller.

A worker whose node is about to go (`leaves_at`) counts as gone: another starts in the next free slot at once, as far as the
budget of GPUs goes. It is drained, trusted or not; but who serves its role alone serves on until routers have found
another of its revision (a canary may have no share, and is not to have all), and of a pool no more than one is away before
others serve in their places: a node may hold all of it. Where the budget lets nothing start beside those that go, one of
several makes the beginning. In any case it is drained when no more than LAST_SECONDS are left for its streams to end in.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set

from cluster.lifecycle import (
    Action,
    Desired,
    DesiredPool,
    Drain,
    History,
    Observed,
    ObservedWorker,
    Phase,
    Remove,
    SetRole,
    Start,
    leave,
    worker_id,
)
from cluster.rollouts import Rollouts, departures, misfits, num_beside, surge_gpus, waiting
from headrace.values import Role

START_SECONDS = 600.0
LAST_SECONDS = 30.0
ONE_BY_ONE = Rollouts()


def reconcile(
    desired: Desired,
    observed: Observed,
    now: float,
    budget_gpus: int | None = None,
    rollouts: Rollouts = ONE_BY_ONE,
) -> list[Action]:
    """The actions that bring `observed` nearer to `desired`: removals first, starts last, those that need the most of one
    node before those that fit anywhere. None are needed when it returns none. `budget_gpus` bounds what starts in the place
    of workers that still hold theirs; `rollouts`, who goes for another layout or other settings."""
    actions: list[Action] = []
    starts: list[Start] = []
    beside = waiting(desired, observed.workers) if desired.trusted else []
    actions += _removals([worker for worker in observed.workers if worker not in beside], now)
    gone = {action.worker_id for action in actions if isinstance(action, Remove)}
    serving = {(worker.role, worker.revision) for worker in observed.workers if worker.is_found(now)}
    beside_gpus = surge_gpus(desired, [its for its in observed.workers if its.worker_id not in gone], rollouts)
    for worker in beside:
        if beside_gpus is not None and beside_gpus < 0:
            actions.append(leave(worker, "the budget has its GPUs for others, and it has no room yet"))
            gone.add(worker.worker_id)
            beside_gpus += worker.layout.world_size
    for pool in sorted({*desired.pools, *(worker.pool for worker in observed.workers)}):
        workers = [worker for worker in observed.workers if worker.pool == pool]
        staying = [
            worker
            for worker in workers
            if worker.phase in (Phase.STARTING, Phase.READY)
            and worker.worker_id not in gone
            and worker.leaves_at is None
        ]
        target = desired.pools.get(pool)
        num_found = sum(worker.is_found(now) for worker in staying)
        needed = not desired.trusted or (target is not None and num_found < target.replicas)
        leaving = [worker for worker in workers if worker.leaves_at is not None and worker.worker_id not in gone]
        here = {(worker.role, worker.revision) for worker in leaving}
        serve_on = sum(worker.phase is Phase.READY for worker in leaving)
        spare = num_found + serve_on - target.replicas + 1 if target is not None and needed else serve_on
        held = sum(worker.layout.world_size for worker in observed.workers if worker.worker_id not in gone)
        held += sum(start.layout.world_size for start in starts)
        free = None if budget_gpus is None else budget_gpus - held
        replaced = serving if needed else here
        if target is not None and needed and free is not None and free < target.layout.world_size:
            several = _several(leaving)
            replaced, spare = replaced | several, min(spare, 1) if several else spare
        actions += _departures(leaving, replaced, spare, now)
        if target is None:
            if desired.trusted:
                actions += [leave(worker, "its pool is not wanted any more") for worker in staying]
            continue
        surplus = _surplus(staying, target, rollouts) if desired.trusted else []
        actions += [leave(worker, _surplus_reason(worker, target)) for worker in surplus]
        kept = [worker for worker in staying if worker not in surplus]
        if desired.trusted:
            actions += [*_flips(kept, target), *departures(kept, target, rollouts, now)]
        starting = _starts(pool, target, kept, workers, observed.history, now, free)
        starts += starting
        if desired.trusted and rollouts.max_surge:
            number = num_beside(kept, workers, len(starting), target, rollouts, beside_gpus)
            taken = {worker.index for worker in workers if worker.worker_id not in gone}
            slots = _lowest(number, taken | {start.index for start in starting})
            free_slots = [index for index in slots if worker_id(pool, index) not in gone]
            starts += _in_slots(pool, target, free_slots, observed.history, now)
            if beside_gpus is not None:
                beside_gpus -= number * target.layout.world_size
    return [*actions, *sorted(starts, key=lambda start: -start.layout.tp)]


def headless(actions: Sequence[Action], workers: Sequence[ObservedWorker]) -> list[Action]:
    """Those of them for which nobody need ask Ray's head, which does not answer. What takes a worker away waits too, as
    none can come in its place: but not the drain of one whose node goes."""
    leaving = {worker.worker_id for worker in workers if worker.leaves_at is not None}
    return [
        action
        for action in actions
        if isinstance(action, SetRole) or (isinstance(action, Drain) and action.worker_id in leaving)
    ]


def _removals(workers: Sequence[ObservedWorker], now: float) -> list[Action]:
    removals: list[Action] = []
    for worker in workers:
        match worker.phase:
            case Phase.DEAD | Phase.DRAINED:
                removals.append(Remove(worker.worker_id, worker.generation, worker.reason or worker.phase))
            case Phase.STARTING if now - worker.since > START_SECONDS:
                why = f"not ready {START_SECONDS:.0f} s after its start" + (worker.reason and f": {worker.reason}")
                removals.append(Remove(worker.worker_id, worker.generation, why, failed=True))
            case _:
                pass
    return removals


def _several(leaving: Sequence[ObservedWorker]) -> set[tuple[Role, str]]:
    """What more than one of them serve."""
    serve = Counter((worker.role, worker.revision) for worker in leaving if worker.phase is Phase.READY)
    return {its for its, number in serve.items() if number > 1}


def _departures(
    leaving: Sequence[ObservedWorker], replaced: Set[tuple[Role, str]], spare: int, now: float
) -> list[Action]:
    """Of workers whose nodes go: those that do not serve yet at once, those that do once somebody else serves their role
    with their settings (`replaced`), so many as the pool can spare, or their time is nearly over. Whose ends first goes
    first."""
    actions: list[Action] = []
    for worker in sorted(leaving, key=lambda worker: (worker.leaves_at or 0.0, worker.index)):
        match worker.phase:
            case Phase.STARTING:
                actions.append(leave(worker, worker.reason))
            case Phase.READY if (worker.leaves_at or 0.0) - now <= LAST_SECONDS or (
                spare > 0 and (worker.role, worker.revision) in replaced
            ):
                actions.append(leave(worker, worker.reason))
                spare -= 1
            case _:
                pass
    return actions


def _surplus(staying: list[ObservedWorker], target: DesiredPool, rollouts: Rollouts) -> list[ObservedWorker]:
    """Those beyond the wanted number: first who is not ready yet, then who is to be replaced anyway, then who would have to
    change its role to stay; of equals whose leaving costs least."""
    old = misfits(staying, target)
    by_price = sorted(staying, key=lambda worker: worker.price)
    ready = [worker for worker in by_price if worker.phase is Phase.READY]
    other = [worker for worker in ready if worker.role is not target.role]
    too_many_lent = max(len(other) - target.lent, 0)
    order = sorted(
        (worker for worker in by_price if worker.phase is not Phase.READY),
        key=lambda worker: (not worker.pending, -worker.since),  # the youngest has the longest way to go
    )
    serving = [
        *other[:too_many_lent],
        *(worker for worker in ready if worker.role is target.role),
        *other[too_many_lent:],
    ]
    order += sorted(serving, key=lambda worker: (not worker.failing, worker not in old))
    too_many = len(staying) - target.replicas - min(rollouts.max_surge, len(old), target.replicas)
    return order[: max(too_many, len(old) - target.replicas, 0)]


def _surplus_reason(worker: ObservedWorker, target: DesiredPool) -> str:
    its = f"; it has {worker.held}" if worker.held is not None and worker.phase is Phase.READY else ""
    return f"{target.replicas} wanted in its pool{its}"


def flips(desired: Desired, workers: Sequence[ObservedWorker]) -> list[SetRole]:
    """The changes of roles alone, where others start workers and end them."""
    found: list[SetRole] = []
    for pool, target in sorted(desired.pools.items()):
        found += _flips([worker for worker in workers if worker.pool == pool], target)
    return found


def _flips(kept: list[ObservedWorker], target: DesiredPool) -> Iterator[SetRole]:
    """Workers start in their pool's own role. Who is lent already stays so; others go who have the least to finish beside
    their new role (one that fails would be no help there), and come back by the lowest index. While others of the pool are
    away (they start again), the last one is not lent, or comes back; beside those that fail it is not lent."""
    lent_role = target.role.other
    ready = sorted((worker for worker in kept if worker.phase is Phase.READY), key=lambda worker: worker.index)
    number = target.lent_of(len(ready))
    lent = [worker for worker in ready if worker.role is lent_role and lent_role is not target.role]
    staying = lent[max(len(lent) - number, 0) :]
    own = sorted((worker for worker in ready if worker not in lent), key=lambda its: (its.failing, its.price))
    working = sum(not worker.failing for worker in ready)
    going = own[: max(min(number, target.lent_of(working)) - len(staying), 0)]
    for worker in ready:
        wanted = lent_role if worker in staying or worker in going else target.role
        if worker.role is not wanted:
            yield SetRole(worker.worker_id, worker.generation, wanted)


def _starts(
    pool: str,
    target: DesiredPool,
    kept: list[ObservedWorker],
    workers: list[ObservedWorker],
    history: Mapping[str, History],
    now: float,
    free_gpus: int | None,
) -> list[Start]:
    """The lowest slots that nobody keeps, as many as are missing; a slot still held or in its delay is waited for, but not
    that of a worker whose node goes, or that was too many and drains, as long as there are `free_gpus` for another."""
    wanted = target.layout, target.revision
    leaving = {
        worker.index
        for worker in workers
        if worker.leaves_at is not None
        or (worker.phase is Phase.DRAINING and (worker.layout, worker.revision) == wanted)
    }
    indices = {worker.index for worker in kept} | leaving
    held = {worker.index for worker in workers}
    missing = max(target.replicas - len(kept), 0)
    if free_gpus is not None:
        missing = min(missing, max(free_gpus, 0) // target.layout.world_size)
    free = [index for index in _lowest(missing, indices) if index not in held]
    return _in_slots(pool, target, free, history, now)


def _lowest(number: int, taken: Set[int]) -> list[int]:
    """So many slots that are not taken."""
    return [index for index in range(len(taken) + number) if index not in taken][:number]


def _in_slots(
    pool: str, target: DesiredPool, indices: Sequence[int], history: Mapping[str, History], now: float
) -> list[Start]:
    """Of the slots those that wait for nothing after a failure."""
    past = {index: history.get(worker_id(pool, index), History()) for index in indices}
    return [
        Start(pool, index, its.generation + 1, target.role, target.layout, target.revision)
        for index, its in past.items()
        if now >= its.not_before
    ]
