"""A router's core before null workers, over real gRPC: what most tests of sessions and requests need."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from prometheus_client import REGISTRY

from headrace.blocks import BlockHasher
from headrace.clock import Clock, SystemClock
from headrace.keys import Event, EventKind, Snapshot
from headrace.values import FinishReason, Request, Role, SamplingParams
from router.decision_log import Note
from router.decisions.admission import Admission, Rules
from router.decisions.caches import Caches
from router.decisions.index import Index
from router.decisions.quotas import Quotas
from router.decisions.revisions import Revisions
from router.decisions.tenants import Tenancy
from router.jobs import Job, Piece
from router.mailbox import Pacer
from router.requests import Requests
from router.sessions import Sessions
from router.text.detokenize import Characters, Pieces, TextStream
from tests.null_worker import NullWorker, worker_info

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH

PIECES = Pieces(lambda token_id: chr(token_id).encode())


def open_text(job: Job) -> TextStream:
    """Token ids are code points."""
    return TextStream(Characters(PIECES), job.stop, job.sampling.min_tokens)


def job(request_id: str = "r", *, prompt: int = 10, max_tokens: int = 8, **fields: Any) -> Job:
    sampling = fields.pop("sampling", None) or SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return Job(request_id, "null", tuple(range(prompt)), sampling, **fields)


@dataclass
class Stage:
    requests: Requests
    sessions: Sessions
    index: Index
    clock: Clock

    async def until(self, condition: Callable[[], bool]) -> None:
        """Returns as soon as the condition holds; looked at whenever a session begins, reports or ends."""
        happened = asyncio.Event()
        self.sessions.listen(lambda worker_id: happened.set())
        while not condition():
            await asyncio.wait_for(happened.wait(), 20)
            happened.clear()

    async def until_live(self, *workers: NullWorker) -> None:
        await self.until(lambda: all(self.sessions.find(w.info.worker_id) is not None for w in workers))


@asynccontextmanager
async def stage(
    *workers: NullWorker,
    clock: Clock | None = None,
    silent_seconds: float = 5.0,
    heartbeat_seconds: float = 0.5,
    max_queue: int = 16,
    coalesce_seconds: float = 0.0,
    request_seconds: float = 60.0,
    local_prefill_max_tokens: int = 0,
    note_decision: Note = lambda key, decision: None,
    rules: Rules | None = None,
    tenancy: Tenancy | None = None,
    quotas: Quotas | None = None,
    revisions: Revisions | None = None,
) -> AsyncIterator[Stage]:
    clock = clock or SystemClock()
    sessions = Sessions("t", clock, heartbeat_seconds=heartbeat_seconds, silent_seconds=silent_seconds)
    index = Index()
    requests = Requests(
        router_id="t",
        sessions=sessions,
        caches=Caches(index),
        open_text=open_text,
        pacer=Pacer(coalesce_seconds, asyncio.get_running_loop()),
        clock=clock,
        randomness=random.Random(1),
        admission=Admission(rules or Rules(max_queue), tenancy, quotas),
        request_seconds=request_seconds,
        local_prefill_max_tokens=local_prefill_max_tokens,
        note_decision=note_decision,
        revisions=revisions,
    )
    sessions.seek([worker.address for worker in workers])
    keeping = asyncio.create_task(sessions.run())
    try:
        on_stage = Stage(requests, sessions, index, clock)
        await on_stage.until_live(*workers)
        yield on_stage
    finally:
        keeping.cancel()
        await asyncio.wait([keeping])


async def collect(stream: AsyncIterator[Piece]) -> list[Piece]:
    return [piece async for piece in stream]


def ids(text: str) -> list[int]:
    return list(map(ord, text))


async def begin(on: Stage, worker: NullWorker, **fields: Any) -> tuple["asyncio.Task[list[Piece]]", Request]:
    """A stream that is collected in the background, and its request as it reached the worker."""
    task = asyncio.create_task(collect(on.requests.stream(job(**fields))))
    return task, await asyncio.wait_for(worker.submits.get(), 10)


def pair() -> tuple[NullWorker, NullWorker]:
    return NullWorker(worker_info("p", Role.PREFILL)), NullWorker(worker_info("d", Role.DECODE))


def promise(on: Stage, worker: NullWorker, tokens: Sequence[int]) -> None:
    """Lets the index say that the worker holds these."""
    same = worker.info.compatibility
    hasher = BlockHasher(revision=same.revision, kv_format=same.kv_format, block_size=same.block_size)
    held = Event.of(EventKind.STORED, hasher.chain(tokens))
    on.index.load(worker.info.worker_id, Snapshot(1, 1, (held,) if held.num_blocks else ()))


def metric(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0
