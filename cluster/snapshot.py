"""What `headrace status` shows: the controller's `observed` beside what each worker says of itself, as one value."""

import asyncio
from dataclasses import dataclass

from cluster.session import Session
from cluster.state import ControlState, ObservedState, WorkerRecord
from cluster.worker_client import WorkerClient, WorkerReport
from headrace.errors import InternalError, WorkerLost
from headrace.store import StoreUnavailable, connect

BUDGET_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """`report` is None for a worker that does not answer, or is not ready; `record.reason` or `silence` says why."""

    record: WorkerRecord
    report: WorkerReport | None = None
    silence: str = ""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """`controller` says what is wrong with the control plane; empty when nothing is."""

    session: Session
    desired: dict[str, int]
    workers: tuple[WorkerStatus, ...]
    controller: str = ""


async def take(session: Session) -> Snapshot:
    """One look at the cluster. Redis or workers that do not answer are part of the picture, never an error."""
    store = connect(session.redis_url, BUDGET_SECONDS)
    controller = ""
    try:
        observed = await ControlState(store, session.cluster).observed()
    except StoreUnavailable as error:
        observed, controller = None, error.message
    finally:
        await store.close()
    if observed is None:
        observed, controller = ObservedState(""), controller or "no controller has published anything yet"
    workers = await asyncio.gather(*(_ask(record) for record in observed.workers))
    return Snapshot(session, dict(observed.desired or {}), tuple(workers), controller)


async def _ask(record: WorkerRecord) -> WorkerStatus:
    if not record.address:
        return WorkerStatus(record)
    try:
        async with WorkerClient(record.address) as client:
            return WorkerStatus(record, await client.describe())
    except (WorkerLost, InternalError) as error:
        return WorkerStatus(record, None, error.message)
