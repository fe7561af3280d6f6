"""One computation for several equal requests: those in flight at the same time, and those whose answer is still kept. Both
for tenants that want them, and within one tenant.

Requests are equal when their tokens must be: same prompt, parameters and salt, and greedy or with the same seed of the
client's. A computation belongs to all who hear it: it goes on while anybody does, under the configured time limit, and
everybody's own deadline ends only his hearing.
"""

import asyncio
import logging
from array import array
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import AbstractContextManager, aclosing, nullcontext
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import chain
from typing import Protocol

from headrace.clock import Clock
from headrace.errors import DeadlineExceeded, Draining, HeadraceError, InternalError
from headrace.values import Timeline
from router import measures
from router.decisions.tenants import EVERYONE, Tenancy, Tenant
from router.explanations import Explanation, Recent
from router.jobs import Job, Piece, Served

log = logging.getLogger(__name__)

NUM_NAMES = 512
MAX_ENTRY_PART = 8  # an answer may take this part of the whole cache

Line = tuple[bytes, int, str]
"""Who may wait for the same computation: those of equal tokens that are as urgent, by priority and class."""


class Computing(Protocol):
    """router.requests.Requests, as far as this goes."""

    def stream(self, job: Job) -> AsyncGenerator[Piece]: ...
    def why(self, request_id: str, /) -> Explanation | None: ...
    def recent(self, tenant: str | None, num_running: int) -> Iterator[Recent]: ...
    def sharing(self, job: Job) -> AbstractContextManager[None]: ...


@dataclass(eq=False)
class _Run:
    """One computation and what it has said so far. `news` is set, and replaced, with every piece and at the end."""

    request_id: str
    served: Served
    pieces: list[Piece] = field(default_factory=list)
    num_listeners: int = 0
    done: bool = False
    error: HeadraceError | None = None
    news: asyncio.Event = field(default_factory=asyncio.Event)
    task: "asyncio.Task[None] | None" = None

    def tell(self) -> None:
        news, self.news = self.news, asyncio.Event()
        news.set()


@dataclass(frozen=True, slots=True)
class _Kept:
    """An answer: a piece for each sample."""

    request_id: str
    pieces: tuple[Piece, ...]
    num_bytes: int
    expires: float


class SharedAnswers:
    """Owns the computations that are shared and the answers that are kept, of one router. `group` carries the former."""

    def __init__(
        self,
        requests: Computing,
        tenancy: Tenancy,
        clock: Clock,
        group: asyncio.TaskGroup,
        *,
        cache_bytes: int = 16 * 2**20,
        cache_seconds: float = 300.0,
    ) -> None:
        self._requests = requests
        self._tenants = tenancy.tenants
        self._clock = clock
        self._group = group
        self._cache_bytes = cache_bytes
        self._cache_seconds = cache_seconds
        self._runs: dict[Line, _Run] = {}
        self._kept: dict[bytes, _Kept] = {}
        self._kept_bytes = 0
        self._names: dict[str, str] = {}

    def stream(self, job: Job) -> AsyncGenerator[Piece]:
        """As Requests.stream."""
        tenant = self._tenants.get(job.tenant, EVERYONE)
        if job.repeatable and (tenant.coalesce or tenant.cache_results):
            return self._shared(job, tenant)
        return self._requests.stream(job)

    def why(self, request_id: str) -> Explanation | None:
        """Of a request that was answered from another one's tokens: why those ran where they ran."""
        return self._requests.why(self._names.get(request_id, request_id))

    def recent(self, tenant: str | None, num_running: int) -> Iterator[Recent]:
        """The computations: who heard them too is not named."""
        return self._requests.recent(tenant, num_running)

    def close(self) -> None:
        """Ends all computations."""
        for run in self._runs.values():
            if run.task is not None:
                run.task.cancel()

    async def _shared(self, job: Job, tenant: Tenant) -> AsyncGenerator[Piece]:
        key = _key(job)
        kept = self._find(key) if tenant.cache_results else None
        if kept is not None:
            with self._requests.sharing(job):
                measures.shared(tenant.name, "kept")
                self._name(job.request_id, kept.request_id)
                for piece in kept.pieces:
                    yield piece
            return
        line = (key, job.priority, job.service_class)
        run = self._runs.get(line) if tenant.coalesce else None
        with self._requests.sharing(job) if run is not None else nullcontext():
            if run is None:
                run = self._begin(line, job, tenant)
            else:
                measures.shared(tenant.name, "coalesced")
                self._name(job.request_id, run.request_id)
            async with aclosing(self._hear(line, run, job)) as pieces:
                async for piece in pieces:
                    yield piece

    def _begin(self, line: Line, job: Job, tenant: Tenant) -> _Run:
        run = _Run(job.request_id, Served())
        if tenant.coalesce:
            self._runs[line] = run
        # Its own client's deadline is not that of the others, so the computation has none but the configured one; where it
        # would wait beyond the former it is refused as it comes, before there are others.
        shared = replace(job, seconds_left=None, turn_seconds_left=job.seconds_left, served=run.served)
        run.task = self._group.create_task(self._compute(line, run, shared, tenant))
        return run

    async def _compute(self, line: Line, run: _Run, job: Job, tenant: Tenant) -> None:
        try:
            async with aclosing(self._requests.stream(job)) as pieces:
                async for piece in pieces:
                    run.pieces.append(piece)
                    run.tell()
            if tenant.cache_results and not _of_a_revision(run.pieces):
                self._keep(line[0], run)
        except asyncio.CancelledError:
            run.error = Draining("this router ends what it computes")  # what came of it is no whole answer
            raise
        except HeadraceError as error:
            run.error = error
        except Exception as error:
            log.error("a request that others may hear failed unforeseen", exc_info=error)
            run.error = InternalError(f"internal error: {type(error).__name__}")
            run.error.__cause__ = error
        finally:
            self._forget(line, run)
            run.done = True
            run.tell()

    async def _hear(self, line: Line, run: _Run, job: Job) -> AsyncGenerator[Piece]:
        """All that a computation has said and says, until it ends or the hearer's own time is over."""
        ends = self._clock.now() + job.seconds_left if job.seconds_left is not None else None
        num_heard = 0
        run.num_listeners += 1
        try:
            while True:
                while num_heard < len(run.pieces):
                    num_heard += 1
                    if job.served is not None:
                        job.served.revision = run.served.revision
                    yield run.pieces[num_heard - 1]
                if run.done:
                    break
                await self._news(run, ends, job.seconds_left)
            if run.error is not None:
                raise run.error
        finally:
            run.num_listeners -= 1
            if not run.num_listeners and not run.done:
                self._forget(line, run)
                assert run.task is not None
                run.task.cancel()

    async def _news(self, run: _Run, ends: float | None, seconds: float | None) -> None:
        left = ends - self._clock.now() if ends is not None else None
        try:
            async with asyncio.timeout(left):
                await run.news.wait()
        except TimeoutError as error:
            raise DeadlineExceeded(f"not finished within {seconds:g} s", limit=seconds) from error

    def _forget(self, line: Line, run: _Run) -> None:
        if self._runs.get(line) is run:
            del self._runs[line]

    # -- answers that are kept

    def _find(self, key: bytes) -> _Kept | None:
        kept = self._kept.pop(key, None)
        if kept is None:
            return None
        if kept.expires <= self._clock.now():
            self._kept_bytes -= kept.num_bytes
            return None
        self._kept[key] = kept  # the last in order is the last used
        return kept

    def _keep(self, key: bytes, run: _Run) -> None:
        pieces = _whole(run.pieces)
        num_bytes = sum(map(_num_bytes, pieces))
        if num_bytes > self._cache_bytes // MAX_ENTRY_PART:
            return
        older = self._kept.pop(key, None)
        if older is not None:
            self._kept_bytes -= older.num_bytes
        self._kept[key] = _Kept(run.request_id, pieces, num_bytes, self._clock.now() + self._cache_seconds)
        self._kept_bytes += num_bytes
        while self._kept_bytes > self._cache_bytes:
            self._kept_bytes -= self._kept.pop(next(iter(self._kept))).num_bytes

    def _name(self, request_id: str, computed_as: str) -> None:
        if request_id != computed_as:
            self._names[request_id] = computed_as
            if len(self._names) > NUM_NAMES:
                del self._names[next(iter(self._names))]


def _key(job: Job) -> bytes:
    """Equal for jobs whose tokens must be equal. A greedy one's seed draws nothing."""
    sampling = replace(job.sampling, seed=0) if job.sampling.temperature == 0 else job.sampling
    rest = (job.tenant, job.model, job.n, job.stop, job.cache_salt, job.continues, sampling)
    return blake2b(array("q", job.prompt_token_ids).tobytes() + repr(rest).encode(), digest_size=32).digest()


def _whole(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """A piece for each sample, the one that ends the request last. It took no worker's time to say them again."""
    by_sample: dict[int, list[Piece]] = {}
    for piece in pieces:
        by_sample.setdefault(piece.index, []).append(piece)
    whole = []
    for index, parts in by_sample.items():
        last = parts[-1]
        timeline = last.timeline
        if timeline is not None:
            timeline = replace(timeline, worker=Timeline(), router_queue_seconds=0.0, ttft_stages={})
        whole.append(
            Piece(
                index,
                "".join(part.text for part in parts),
                tuple(chain.from_iterable(part.token_ids for part in parts)),
                tuple(chain.from_iterable(part.logprobs for part in parts)),
                last.finish,
                last.usage,
                timeline,
                last.cached_tokens,
            )
        )
    return tuple(sorted(whole, key=lambda piece: piece.usage is not None))


def _of_a_revision(pieces: Sequence[Piece]) -> bool:
    """While there is a canary no answer is kept: it would outlive the roll back."""
    return any(piece.timeline is not None and piece.timeline.revision for piece in pieces[-1:])


def _num_bytes(piece: Piece) -> int:
    """About what a kept piece takes."""
    logprobs = sum(200 + 120 * len(at.top) for at in piece.logprobs)
    return 1024 + 4 * len(piece.text) + 40 * len(piece.token_ids) + logprobs
