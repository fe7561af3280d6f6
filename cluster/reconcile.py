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
from dataclasses import dataclass, field, replace
from enum import StrEnum

from headrace.values import STABLE, ParallelLayout, Role

START_SECONDS = 600.0
STEADY_SECONDS = 60.0
FIRST_DELAY_SECONDS = 0.5
MAX_DELAY_SECONDS = 30.0
LAST_SECONDS = 30.0
FOUND_SECONDS = 10.0  # after it is ready, by when every router has found a worker and placed on it


@dataclass(frozen=True, slots=True)
class DesiredPool:
    """How many workers of which kind. `lent` of them serve the other one of prefill and decode, until they are needed here
    again: they keep their slots, weights and caches. `revision`: of the settings that its workers are to have."""

    role: Role
    replicas: int
    layout: ParallelLayout = field(default_factory=ParallelLayout)
    lent: int = 0
    revision: str = STABLE

    @property
    def num_gpus(self) -> int:
        """Ranks, on CPUs."""
        return self.replicas * self.layout.world_size

    def lent_of(self, there: int) -> int:
        """How many may be lent while only so many of the replicas are there: one stays, unless none was to."""
        return min(self.lent, there if self.lent >= self.replicas else max(there - 1, 0))


@dataclass(frozen=True, slots=True)
class Desired:
    """All pools by name. `trusted`: read from Redis as somebody wrote it, not rebuilt from the configuration."""

    pools: Mapping[str, DesiredPool]
    trusted: bool = True


class Phase(StrEnum):
    """Where a worker is in its life. DRAINED and DEAD workers serve nothing and wait to be removed."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    DRAINED = "drained"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class ObservedWorker:
    """One worker as the controller knows it. `since` is when its phase began, in seconds of the controller's clock.
    `pending`: it starts, and has no room in the cluster yet. `leaves_at`: when its node is taken away, by that clock."""

    pool: str
    index: int
    generation: int
    role: Role
    layout: ParallelLayout
    phase: Phase
    since: float
    reason: str = ""
    pending: bool = False
    leaves_at: float | None = None
    revision: str = STABLE

    @property
    def worker_id(self) -> str:
        return worker_id(self.pool, self.index)


@dataclass(frozen=True, slots=True)
class History:
    """What is remembered of a slot: the last generation it had, how often it failed in a row, and why it last did."""

    generation: int = 0
    failures: int = 0
    failed_at: float = 0.0
    reason: str = ""

    def started(self, generation: int) -> "History":
        return replace(self, generation=generation)

    def failed(self, now: float, ready_seconds: float, reason: str) -> "History":
        """One more failure in a row, or the first one when the worker had served for STEADY_SECONDS."""
        failures = 1 if ready_seconds >= STEADY_SECONDS else self.failures + 1
        return History(self.generation, failures, now, reason)

    def served(self, ready_seconds: float) -> "History":
        """It ended in order: whoever had served for STEADY_SECONDS takes the failures before that with it."""
        return replace(self, failures=0) if ready_seconds >= STEADY_SECONDS else self

    @property
    def not_before(self) -> float:
        """When the slot may start again."""
        if not self.failures:
            return float("-inf")
        return self.failed_at + min(FIRST_DELAY_SECONDS * 2.0 ** min(self.failures - 1, 32), MAX_DELAY_SECONDS)


@dataclass(frozen=True, slots=True)
class Observed:
    """All workers that exist in any phase, and the history of every slot that ever had one (by worker id)."""

    workers: Sequence[ObservedWorker]
    history: Mapping[str, History] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Start:
    pool: str
    index: int
    generation: int
    role: Role
    layout: ParallelLayout
    revision: str = STABLE

    @property
    def worker_id(self) -> str:
        return worker_id(self.pool, self.index)


@dataclass(frozen=True, slots=True)
class SetRole:
    """The worker keeps its weights and its cache, and serves the other role."""

    worker_id: str
    generation: int
    role: Role


@dataclass(frozen=True, slots=True)
class Drain:
    """Refuse new work, finish what runs; the worker is DRAINED afterwards."""

    worker_id: str
    generation: int
    why: str


@dataclass(frozen=True, slots=True)
class Remove:
    """End all ranks, give their resources back, and forget the worker. `failed`: its slot waits before it starts again."""

    worker_id: str
    generation: int
    why: str
    failed: bool = False


Action = Start | SetRole | Drain | Remove


def worker_id(pool: str, index: int) -> str:
    return f"{pool}-{index}"


def reconcile(desired: Desired, observed: Observed, now: float, budget_gpus: int | None = None) -> list[Action]:
    """The actions that bring `observed` nearer to `desired`: removals first, starts last, those that need the most of one
    node before those that fit anywhere. None are needed when it returns none. `budget_gpus` bounds what starts in the place
    of workers that still hold theirs."""
    actions: list[Action] = []
    starts: list[Start] = []
    actions += _removals(observed.workers, now)
    gone = {action.worker_id for action in actions if isinstance(action, Remove)}
    serving = {(worker.role, worker.revision) for worker in observed.workers if _is_found(worker, now)}
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
        num_found = sum(_is_found(worker, now) for worker in staying)
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
                actions += [_leave(worker, "its pool is not wanted any more") for worker in staying]
            continue
        surplus = _surplus(staying, target) if desired.trusted else []
        actions += [_leave(worker, f"{target.replicas} wanted in its pool") for worker in surplus]
        kept = [worker for worker in staying if worker not in surplus]
        actions += _reshapes(kept, target, desired.trusted)
        starts += _starts(pool, target, kept, workers, observed.history, now, free)
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


def _is_found(worker: ObservedWorker, now: float) -> bool:
    """Whether it stays, and routers place on it by now."""
    return worker.phase is Phase.READY and worker.leaves_at is None and now - worker.since >= FOUND_SECONDS


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
                actions.append(_leave(worker, worker.reason))
            case Phase.READY if (worker.leaves_at or 0.0) - now <= LAST_SECONDS or (
                spare > 0 and (worker.role, worker.revision) in replaced
            ):
                actions.append(_leave(worker, worker.reason))
                spare -= 1
            case _:
                pass
    return actions


def _leave(worker: ObservedWorker, why: str) -> Action:
    """A worker that serves is drained first; one that never was ready holds nothing."""
    if worker.phase is Phase.STARTING:
        return Remove(worker.worker_id, worker.generation, why)
    return Drain(worker.worker_id, worker.generation, why)


def _surplus(staying: list[ObservedWorker], target: DesiredPool) -> list[ObservedWorker]:
    """Those beyond the wanted number: first who is not ready yet, then who would have to change its role to stay; of equals
    the highest index."""
    by_index = sorted(staying, key=lambda worker: -worker.index)
    ready = [worker for worker in by_index if worker.phase is Phase.READY]
    other = [worker for worker in ready if worker.role is not target.role]
    too_many = max(len(other) - target.lent, 0)
    order = [worker for worker in by_index if worker.phase is not Phase.READY]
    order += [*other[:too_many], *(worker for worker in ready if worker.role is target.role), *other[too_many:]]
    return order[: max(len(staying) - target.replicas, 0)]


def _reshapes(kept: list[ObservedWorker], target: DesiredPool, trusted: bool) -> list[Action]:
    """Roles flip in place. Another layout, or other settings, need another worker: one at a time, while all others of the
    pool serve."""
    actions: list[Action] = list(_flips(kept, target)) if trusted else []
    misfits = [worker for worker in kept if (worker.layout, worker.revision) != (target.layout, target.revision)]
    starting = [worker for worker in misfits if worker.phase is Phase.STARTING]
    whole = len(kept) == target.replicas and all(worker.phase is Phase.READY for worker in kept)
    if trusted and (starting or (misfits and whole)):
        worker = max(starting or misfits, key=lambda worker: worker.index)
        ours, theirs = (f"{its.layout}, revision {its.revision}" for its in (worker, target))
        actions.append(_leave(worker, f"its pool is {theirs} now, it is {ours}"))
    return actions


def flips(desired: Desired, workers: Sequence[ObservedWorker]) -> list[SetRole]:
    """The changes of roles alone, where others start workers and end them."""
    found: list[SetRole] = []
    for pool, target in sorted(desired.pools.items()):
        found += _flips([worker for worker in workers if worker.pool == pool], target)
    return found


def _flips(kept: list[ObservedWorker], target: DesiredPool) -> Iterator[SetRole]:
    """Workers start in their pool's own role. Who is lent already stays so; others go by the highest index, and come back
    by the lowest. While others of the pool are away (they start again), the last one is not lent, or comes back."""
    lent_role = target.role.other
    ready = sorted((worker for worker in kept if worker.phase is Phase.READY), key=lambda worker: worker.index)
    number = target.lent_of(len(ready))
    lent = [worker for worker in ready if worker.role is lent_role and lent_role is not target.role]
    staying = lent[max(len(lent) - number, 0) :]
    own = [worker for worker in ready if worker not in lent]
    going = own[max(len(own) - (number - len(staying)), 0) :]
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
    early = min(missing, len(leaving))
    if free_gpus is not None:
        room = free_gpus // target.layout.world_size - (missing - early)
        missing -= early - min(max(room, 0), early)
    free = [index for index in range(len(indices) + missing) if index not in indices][:missing]
    starts: list[Start] = []
    for index in free:
        past = history.get(worker_id(pool, index), History())
        if index not in held and now >= past.not_before:
            starts.append(Start(pool, index, past.generation + 1, target.role, target.layout, target.revision))
    return starts
