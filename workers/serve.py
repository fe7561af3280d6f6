"""A worker from start to drained: serve(spec, executor), from a Ray actor or from `python -m workers`."""

import asyncio
import sys
from collections.abc import Callable

from prometheus_client import CollectorRegistry

from headrace.errors import HeadraceError, InternalError
from headrace.values import WorkerInfo
from workers.identity import Identity
from workers.ranks.executor import Executor
from workers.ranks.rank import keep_for_good
from workers.service import Worker
from workers.spec import WorkerSpec

# A thread that a device has woken waits so long for one that computes: the event loop, which has a millisecond of work
# after a step. The interpreter's own 5 ms are more than a hand-off takes.
SWITCH_SECONDS = 5e-4


async def serve(
    spec: WorkerSpec,
    executor: Executor,
    *,
    identity: Identity | None = None,
    ready: Callable[[WorkerInfo], None] | None = None,
    stop: asyncio.Event | None = None,
    grace_seconds: float = 30.0,
    registry: CollectorRegistry | None = None,
) -> None:
    """Runs a worker on `executor` until `stop` is set, then drains and returns. Closes the executor however it ends.

    `ready` is called once requests are taken. Raises WorkerLost when a rank is lost or a step fails; routers have then
    been told.
    """
    sys.setswitchinterval(SWITCH_SECONDS)
    worker = Worker(spec, executor, identity or Identity.of(spec), registry=registry)
    failure: HeadraceError | None = None
    try:
        info = await worker.start()
        running = asyncio.create_task(worker.run())
        stopping = asyncio.create_task((stop or asyncio.Event()).wait())
        try:
            keep_for_good()
            if ready is not None:
                ready(info)
            await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                draining = asyncio.create_task(worker.drain(grace_seconds))
                await asyncio.wait({running, draining}, return_when=asyncio.FIRST_COMPLETED)
                draining.cancel()
        finally:
            stopping.cancel()
            running.cancel()
            await asyncio.wait({running})
        if not running.cancelled() and (error := running.exception()) is not None:
            failure = _reason(error)
            raise failure from error
    finally:
        await worker.close(failure)


def _reason(error: BaseException) -> HeadraceError:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error if isinstance(error, HeadraceError) else InternalError(f"{type(error).__name__}: {error}")
