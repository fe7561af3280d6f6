"""What becomes of a canary: a pure function of what it was, its workers, and what was counted."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from cluster.canary.evidence import begun, encode_sides
from cluster.canary.judge import is_due, judge, said, smaller
from cluster.canary.values import Event, Evidence, Judgement, Phase, State, Verdict
from cluster.lifecycle import Desired, DesiredPool, ObservedWorker
from cluster.lifecycle import Phase as WorkerPhase
from headrace.config import CanaryConfig
from headrace.revisions import Split


@dataclass(frozen=True, slots=True)
class Seen:
    """All that a turn rests on. `deaths`: why workers of the canary ended since the last turn. `room_gpus`: what the budget
    leaves it; None: there is no budget."""

    now: float
    state: State
    evidence: Evidence
    workers: Sequence[ObservedWorker] = ()
    deaths: Sequence[str] = ()
    room_gpus: int | None = None
    pending_seconds: float = 120.0
    worker_now: float = 0.0  # the clock of ObservedWorker.since
    num_wanted: int = 0  # workers of the cluster's own pools
    unlike: str = ""  # in what its workers differ from what serves so that no router takes them

    @property
    def own(self) -> list[ObservedWorker]:
        """The workers of the canary's pools."""
        return [worker for worker in self.workers if worker.pool in self.state.canary.pools]


@dataclass(frozen=True, slots=True)
class Turned:
    state: State
    evidence: Evidence
    events: tuple[Event, ...] = field(default=())


def turn(seen: Seen) -> Turned:
    state, evidence = seen.state, seen.evidence
    if not state.phase.under_way:
        return Turned(state, evidence)
    state = replace(state, failures=state.failures + len(seen.deaths))
    if evidence.number != state.number:
        evidence = Evidence(state.number, seen.now, state.percent)
    elif evidence.percent != state.percent:
        evidence = begun(evidence, seen.now, state.percent)  # with another share the sides weigh other times
    its = state.canary
    if state.failures >= its.max_failures:
        last = seen.deaths[-1] if seen.deaths else "see its log"
        return _changed(seen, state, evidence, Phase.ROLLED_BACK, f"its workers failed {state.failures} times: {last}")
    match state.phase:
        case Phase.STARTING:
            return _starting(seen, state, evidence)
        case Phase.PROMOTING:
            if _is_promoted(seen):
                return _changed(seen, state, evidence, Phase.PROMOTED, "all workers are of this revision")
            return Turned(state, evidence)
        case _:
            return _compared(seen, state, evidence)


def _starting(seen: Seen, state: State, evidence: Evidence) -> Turned:
    its, own = state.canary, seen.own
    ready = {name: sum(w.pool == name and w.phase is WorkerPhase.READY for w in own) for name in its.pools}
    if seen.unlike:
        return _changed(seen, state, evidence, Phase.ROLLED_BACK, seen.unlike)
    if all(ready[name] >= pool.replicas for name, pool in its.pools.items()):
        reason = f"its workers are ready: {state.percent:g} % of the conversations"
        turned = _changed(seen, replace(state, shared_since=seen.now), begun(evidence, seen.now), Phase.LIVE, reason)
        return turned
    pending = [worker for worker in own if worker.pending and seen.worker_now - worker.since > seen.pending_seconds]
    if pending:
        why = (
            f"{pending[0].worker_id} found no room in the cluster for {seen.pending_seconds:.0f} s: {pending[0].reason}"
        )
        return _changed(seen, state, evidence, Phase.ROLLED_BACK, why)
    if seen.now - state.since > its.start_seconds:
        missing = ", ".join(f"{name} has {ready[name]} of {pool.replicas}" for name, pool in its.pools.items())
        why = f"not ready {its.start_seconds:.0f} s after its start: {missing}{_short(its, seen.room_gpus)}"
        return _changed(seen, state, evidence, Phase.ROLLED_BACK, why)
    return Turned(replace(state, reason=_short(its, seen.room_gpus).lstrip("; ") or "its workers start"), evidence)


def _short(its: CanaryConfig, room: int | None) -> str:
    if room is None or room >= its.num_gpus:
        return ""
    return f"; it needs {its.num_gpus} GPUs, and the budget has {room} for it"


def _compared(seen: Seen, state: State, evidence: Evidence) -> Turned:
    its = state.canary
    if is_due(its, evidence, state.base):
        judgement = judged(state, evidence)
        evidence = replace(evidence, look=evidence.look + 1, num_looked_at=smaller(its, evidence, state.base))
        if judgement.worse:
            why = "; ".join(map(said, judgement.worse))
            return _changed(seen, state, evidence, Phase.ROLLED_BACK, f"worse than {state.base}: {why}", judgement)
    old_enough = state.shared_since is not None and seen.now - state.shared_since >= its.good_after_seconds
    if state.phase is Phase.LIVE and old_enough:
        judgement = judged(state, evidence)
        if judgement.verdict in (Verdict.NO_WORSE, Verdict.UNDECIDED):
            return _changed(seen, state, evidence, Phase.GOOD, _good(judgement), judgement)
    return Turned(state, evidence)


def judged(state: State, evidence: Evidence) -> Judgement:
    """As its next look would find it."""
    its = state.canary
    return judge(its, evidence.of(state.base), evidence.of(its.revision), evidence.look)


def _good(judgement: Judgement) -> str:
    open_ = [test.name for test in judgement.tests if test.verdict is Verdict.UNDECIDED]
    shown = len(judgement.tests) - len(open_)
    rest = f"; not decided by {judgement.num_canary} requests: {', '.join(open_)}" if open_ else ""
    return f"nothing was worse for long enough; {shown} of {len(judgement.tests)} comparisons are shown no worse{rest}"


def _changed(
    seen: Seen, state: State, evidence: Evidence, phase: Phase, reason: str, judgement: Judgement | None = None
) -> Turned:
    after = replace(state, phase=phase, since=seen.now, reason=reason)
    event = Event(seen.now, seen.state.phase.value, after, judgement, encode_sides(evidence.sides))
    return Turned(after, evidence, (event,))


# -- what follows from a state


def promoted_part(seen: Seen) -> float:
    """Of the ready workers of the cluster's own pools, by their ranks, those of the canary's revision; 0 of none."""
    revision, own = seen.state.canary.revision, seen.state.canary.pools
    others = [worker for worker in seen.workers if worker.pool not in own]
    ready = [worker for worker in others if worker.phase is WorkerPhase.READY]
    new = sum(worker.layout.world_size for worker in ready if worker.revision == revision)
    ranks = sum(worker.layout.world_size for worker in ready)
    return new / ranks if ranks else 0.0


def _is_promoted(seen: Seen) -> bool:
    revision, own = seen.state.canary.revision, seen.state.canary.pools
    others = [worker for worker in seen.workers if worker.pool not in own]
    new = sum(worker.phase is WorkerPhase.READY and worker.revision == revision for worker in others)
    return new == len(others) >= seen.num_wanted


def split_of(seen: Seen, state: State) -> Split:
    """What routers are told. The canary keeps its name until its last worker is gone: until then nobody else is placed
    there."""
    its, beat = state.canary, int(1000 * seen.now)
    if state.phase is Phase.PROMOTED:
        return Split(state.number, its.revision, "", 0.0, beat)
    exists = state.phase.under_way or any(worker.revision == its.revision for worker in seen.workers)
    if not exists:
        return Split(state.number, state.base, "", 0.0, beat)
    shared = state.percent if state.phase.under_way and state.phase is not Phase.STARTING else 0.0
    # Workers of the cluster's own pools that are replaced, forth or back, take their part with them.
    percent = min(max(shared, 100 * promoted_part(replace(seen, state=state))), 100.0)
    return Split(state.number, state.base, its.revision, percent, beat)


def with_canary(desired: Desired, state: State, room_gpus: int | None) -> Desired:
    """All pools: the cluster's own, of the revision that they are to have, and the canary's, as far as its room goes."""
    pools = {name: replace(pool, revision=state.serving) for name, pool in desired.pools.items()}
    if state.phase.under_way:
        its, left = state.canary, room_gpus
        for name, pool in its.pools.items():
            if name in desired.pools:
                continue  # a name that is taken by now: it never becomes ready, and ends by that
            replicas = pool.replicas
            if left is not None:
                replicas = min(replicas, max(left, 0) // pool.layout.world_size)
                left -= replicas * pool.layout.world_size
            pools[name] = DesiredPool(pool.worker_role, replicas, pool.layout, revision=its.revision)
    return Desired(pools, desired.trusted)
