"""What `headrace status` shows: the controller's `observed` beside what each worker says of itself, as one value."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from cluster.leased import Leased, leased_workers
from cluster.lifecycle import Phase
from cluster.session import Session
from cluster.state import ControlState, ObservedState, WorkerRecord
from cluster.worker_client import WorkerClient, WorkerReport
from headrace.errors import InternalError, WorkerLost
from headrace.keys import Keys
from headrace.store import Store, StoreUnavailable, connect
from router.decisions.self_check import decode_result

BUDGET_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """`report` is None for a worker that does not answer, or is not ready; `record.reason` or `silence` says why.
    `check`: how the last self-check of its generation ended, "" before one did."""

    record: WorkerRecord
    report: WorkerReport | None = None
    silence: str = ""
    check: str = ""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """`controller` says what is wrong with the control plane; empty when nothing is. Where none ever was (workers under
    StatefulSets), `workers` are those that hold a lease, and nobody says how many are `desired`. `failures`: why workers
    that are desired and not ready last ended, by worker id. `blind`: Redis did not answer, so that nothing is known."""

    session: Session
    desired: dict[str, int]
    workers: tuple[WorkerStatus, ...]
    controller: str = ""
    failures: Mapping[str, str] = field(default_factory=dict)
    blind: bool = False


async def take(session: Session) -> Snapshot:
    """One look at the cluster. Redis or workers that do not answer are part of the picture, never an error."""
    store = connect(session.redis_url, BUDGET_SECONDS)
    observed, controller, blind = ObservedState(""), "", False
    checks: Mapping[str, str] = {}
    try:
        observed, controller = await control_plane(store, session.cluster)
        checks = await _self_checks(store, session.cluster, observed.workers)
    except StoreUnavailable as error:
        controller, blind = error.message, True
    finally:
        await store.close()
    asked = await asyncio.gather(*(_ask(record) for record in observed.workers))
    workers = [replace(worker, check=checks.get(worker.record.worker_id, "")) for worker in asked]
    return Snapshot(session, dict(observed.desired or {}), tuple(workers), controller, failures_of(observed), blind)


async def _self_checks(store: Store, cluster: str, workers: Sequence[WorkerRecord]) -> dict[str, str]:
    """What routers found of these, as they are now."""
    if not workers:
        return {}
    names = [Keys(cluster).self_check(worker.worker_id) for worker in workers]
    results = map(decode_result, await store.call(lambda redis: redis.mget(names)))
    return {
        worker.worker_id: str(result.verdict)
        for worker, result in zip(workers, results, strict=True)
        if result is not None and result.generation == worker.generation
    }


async def control_plane(store: Store, cluster: str) -> tuple[ObservedState, str]:
    """What the controller last saw, and what is wrong with the controller; without one, the workers that hold a lease.
    StoreUnavailable when Redis does not answer."""
    state = ControlState(store, cluster)
    observed = await state.observed()
    if observed is None:
        leased = await leased_workers(store, cluster)
        why = f"none has said anything yet{'; these workers hold a lease' if leased else ''}"
        return ObservedState("", tuple(map(_leased, leased))), why
    return (
        observed,
        observed.trouble if await state.has_leader() else "none leads just now; this is what the last one saw",
    )


def failures_of(observed: ObservedState) -> dict[str, str]:
    """A worker that is dead just now says it by its own record."""
    known = {record.worker_id for record in observed.workers if record.phase in (Phase.READY, Phase.DEAD)}
    return {
        worker: f"ended: {reason}" if count == 1 else f"failed {count} times in a row, the last time: {reason}"
        for worker, (_, count, reason) in (observed.history or {}).items()
        if count and worker not in known
    }


def _leased(worker: Leased) -> WorkerRecord:
    info = worker.info
    return WorkerRecord(
        worker_id=info.worker_id,
        pool=info.worker_id.rpartition("-")[0],
        generation=info.generation,
        role=info.role.value,
        layout=str(info.layout),
        phase=(Phase.DRAINING if worker.draining else Phase.READY).value,
        in_phase_seconds=0.0,
        address=info.address,
    )


async def _ask(record: WorkerRecord) -> WorkerStatus:
    if not record.address:
        return WorkerStatus(record)
    try:
        async with WorkerClient(record.address) as client:
            return WorkerStatus(record, await client.describe())
    except (WorkerLost, InternalError) as error:
        return WorkerStatus(record, None, error.message)
