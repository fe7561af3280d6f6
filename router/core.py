"""The parts between the edges and the workers, put together: index, follow, sessions, requests."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from headrace.clock import Clock, SystemClock
from headrace.config import ClusterConfig
from headrace.keys import Keys
from headrace.values import WorkerInfo
from router.decision_log import Note
from router.decisions.index import Index
from router.flight import Job, TextStream
from router.follow import Follow, Store
from router.mailbox import Pacer
from router.requests import Requests
from router.sessions import Sessions


@dataclass(frozen=True, slots=True)
class Core:
    requests: Requests
    sessions: Sessions
    index: Index


@asynccontextmanager
async def running_core(
    config: ClusterConfig,
    *,
    router_id: str,
    open_text: Callable[[Job], TextStream],
    store: Store | None = None,
    workers: Iterable[str] = (),
    refuse: Callable[[WorkerInfo], str | None] = lambda info: None,
    clock: Clock | None = None,
    randomness: random.Random | None = None,
    note_decision: Note = lambda key, decision: None,
) -> AsyncIterator[Core]:
    """A running core; its tasks end with the block. `workers` are addresses that are sought beside those with a lease;
    without a store they are the only ones, and nothing is known of any cache."""
    clock = clock or SystemClock()
    index = Index()
    sessions = Sessions(
        router_id,
        clock,
        heartbeat_seconds=config.router.heartbeat_seconds,
        silent_seconds=config.router.silent_seconds,
        refuse=refuse,
    )
    requests = Requests(
        router_id=router_id,
        sessions=sessions,
        index=index,
        open_text=open_text,
        pacer=Pacer(config.router.coalesce_seconds, asyncio.get_running_loop()),
        clock=clock,
        randomness=randomness or random.Random(),
        max_queue=config.limits.max_queue,
        request_seconds=config.limits.request_seconds,
        local_prefill_max_tokens=config.handoff.local_prefill_max_tokens,
        note_decision=note_decision,
    )
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(sessions.run(), name="sessions")]
        if store is None:
            sessions.seek(workers)
        else:
            follow = Follow(store, Keys(config.name), index, sessions, clock, fixed=workers)
            tasks.append(group.create_task(follow.run(), name="follow"))
        try:
            yield Core(requests, sessions, index)
        finally:
            for task in tasks:
                task.cancel()
