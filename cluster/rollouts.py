"""How many workers of a pool are replaced at a time, where its layout or its settings change: Kubernetes' maxUnavailable
and maxSurge. Pure; `cluster.reconcile` asks.

    drains   so many that `replicas` − max_unavailable others serve; who drains takes nothing new
    surges   as long as old ones are there, or drain, no more than `replicas` + max_surge workers hold GPUs

A pool of N takes N ÷ (max_unavailable + max_surge) rounds of a drain and a start.

Who surges and finds no room in the cluster waits for it, and holds nothing else up: with max_unavailable old ones drain
without it, and it takes theirs; without, the rollout waits with it, and held_up() says so, for none may be missing. So it
does where as many as may be are missing already, for want of room.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.lifecycle import Action, Desired, DesiredPool, ObservedWorker, Phase, leave


@dataclass(frozen=True, slots=True)
class Rollouts:
    """`budget_gpus`: of all pools together; what surges fits into it beside all that pools hold or are to hold."""

    max_unavailable: int = 1
    max_surge: int = 0
    budget_gpus: int | None = None


def misfits(workers: Sequence[ObservedWorker], target: DesiredPool) -> list[ObservedWorker]:
    """Those of another layout, or with other settings: they need another worker in their place."""
    return [worker for worker in workers if (worker.layout, worker.revision) != (target.layout, target.revision)]


def departures(kept: Sequence[ObservedWorker], target: DesiredPool, rollouts: Rollouts, now: float) -> list[Action]:
    """Of the old ones: who does not serve yet goes at once, of the others as many as the pool may be without, first those
    whose leaving costs least. Where it may be without none, a new one counts once routers had the time to find it. Who
    fails is missing already: an old one goes as one that may be missing, and a new one is nobody in an old one's place."""
    old = sorted(misfits(kept, target), key=lambda worker: worker.price)
    serving = [worker for worker in old if worker.phase is Phase.READY]
    num_serving = sum(worker.failing for worker in serving) + sum(
        worker.is_found(now) if not rollouts.max_unavailable else worker.phase is Phase.READY and not worker.failing
        for worker in kept
    )
    going = [worker for worker in old if worker.phase is Phase.STARTING]
    going += serving[: max(num_serving - (target.replicas - rollouts.max_unavailable), 0)]
    theirs = f"{target.layout}, revision {target.revision}"
    return [
        leave(worker, f"its pool is {theirs} now, it is {worker.layout}, revision {worker.revision}")
        for worker in going
    ]


def num_beside(
    kept: Sequence[ObservedWorker],
    workers: Sequence[ObservedWorker],
    num_starting: int,
    target: DesiredPool,
    rollouts: Rollouts,
    free_gpus: int | None,
) -> int:
    """How many new ones start beside the old ones, those of its `workers` that are `kept` and those that drain.
    `num_starting` start by themselves now; who is missing for another reason than that an old one drains does sooner or
    later."""
    draining = [worker for worker in workers if worker.phase is Phase.DRAINING and worker.leaves_at is None]
    num_staying, num_leaving = len(misfits(kept, target)), len(misfits(draining, target))
    if not (num_staying or num_leaving):
        return 0
    num_new = len(kept) - num_staying + max(target.replicas - len(kept) - num_leaving, num_starting)
    num_holding = num_staying + num_leaving + num_new
    number = min(target.replicas - num_new, rollouts.max_surge - max(num_holding - target.replicas, 0))
    return max(number if free_gpus is None else min(number, free_gpus // target.layout.world_size), 0)


def waiting(desired: Desired, workers: Sequence[ObservedWorker]) -> list[ObservedWorker]:
    """Those that surge and have no room in the cluster yet: of each pool's that have none as many as are beyond its size
    with the old ones that drain, or are over and not removed yet, the youngest first."""
    found: list[ObservedWorker] = []
    for pool, target in sorted(desired.pools.items()):
        its = [worker for worker in workers if worker.pool == pool and worker.leaves_at is None]
        staying = [worker for worker in its if worker.phase in (Phase.STARTING, Phase.READY)]
        without = sorted((one for one in staying if one.pending), key=lambda one: (-one.since, -one.index))
        leaving = misfits([worker for worker in its if worker not in staying], target)
        if leaving or misfits(staying, target):
            found += without[: max(len(staying) + len(leaving) - target.replicas, 0)]
    return found


def held_up(
    desired: Desired, workers: Sequence[ObservedWorker], rollouts: Rollouts, now: float, patience_seconds: float
) -> str:
    """Why the workers of some pool cannot be replaced: who is to come first has had no room for longer than
    `patience_seconds`, and nobody more may be missing, or the budget has none for it, and nobody may be. Empty where
    nothing is held up."""
    if not desired.trusted:
        return ""
    said, beside, free = [], waiting(desired, workers), surge_gpus(desired, workers, rollouts)
    for pool, target in sorted(desired.pools.items()):
        its = [worker for worker in workers if worker.pool == pool and worker.leaves_at is None]
        old = misfits([worker for worker in its if worker.phase is Phase.READY], target)
        if rollouts.max_unavailable:
            theirs = _missing(its, target, rollouts, now)
        else:
            theirs = [worker for worker in beside if worker.pool == pool]
        theirs = [worker for worker in theirs if now - worker.since > patience_seconds]
        if old and theirs:
            first = theirs[-1]
            why = f"{first.worker_id} {first.reason} beside them for {now - first.since:.0f} s"
        elif old and not rollouts.max_unavailable and len(its) == target.replicas and _is_full(free, target):
            why = f"the budget of {rollouts.budget_gpus} GPUs holds none of {target.layout} beside them"
        else:
            continue
        said.append(
            f"{pool}: {len(old)} to be replaced, {why}, and rollouts.max_unavailable is {rollouts.max_unavailable}"
        )
    return "; ".join(said)


def _missing(
    its: Sequence[ObservedWorker], target: DesiredPool, rollouts: Rollouts, now: float
) -> list[ObservedWorker]:
    """Those without room, the youngest first, for whom the others wait: none of them goes, or comes."""
    without = sorted((worker for worker in its if worker.pending), key=lambda worker: (-worker.since, -worker.index))
    others = [worker for worker in its if not worker.pending]
    turning = any(worker.phase is not Phase.READY or worker.failing for worker in others)
    return [] if turning or departures(its, target, rollouts, now) else without


def _is_full(free_gpus: int | None, target: DesiredPool) -> bool:
    return free_gpus is not None and free_gpus < target.layout.world_size


def surge_gpus(desired: Desired, workers: Sequence[ObservedWorker], rollouts: Rollouts) -> int | None:
    """What the budget leaves beside all that pools hold, or are to hold; less than nothing where those that surge hold what
    another pool is to have by now."""
    if rollouts.budget_gpus is None:
        return None
    held = Counter[str]()
    for worker in workers:
        held[worker.pool] += worker.layout.world_size
    taken = held | Counter({name: pool.num_gpus for name, pool in desired.pools.items()})  # of each pool the most
    return rollouts.budget_gpus - taken.total()
