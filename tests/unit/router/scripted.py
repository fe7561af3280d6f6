"""A small real implementation of what edges ask of the core: an async generator over a scripted list of tokens.

It detokenises, stops and counts as the core does, so that an edge is tested with true pieces.
"""

import asyncio
import random
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from headrace.clock import Clock
from headrace.config import LimitsConfig
from headrace.errors import HeadraceError
from headrace.values import DEFAULT_TENANT, Timeline, TokenLogprobs, Usage
from router.decisions.tenants import Tenancy
from router.edge.common import Edge, Streams
from router.edge.validate import JobMaker
from router.explanations import Explanation, Recent
from router.flight import STATES
from router.jobs import Job, Piece
from router.keyring import Keyring
from router.stages import RequestTimeline
from router.text.served import Models, ServedModel
from router.text.vocabulary import Text

CONTEXT = 64
VOCABULARY = 500


@dataclass
class Scripted:
    """Says `answer` to every job, `tokens_per_piece` at a time; `fail_after` tokens it raises `error`. With a `gate`, each
    piece but the first waits for a permit. Owns the record of what it was asked, and of which jobs were closed early."""

    text: Text
    answer: str = "The quick brown fox"
    error: HeadraceError | None = None
    fail_after: int = 0
    gate: asyncio.Semaphore | None = None
    cached_tokens: int = 0
    tokens_per_piece: int = 1
    revision: str = ""
    explanations: dict[str, Explanation] = field(default_factory=dict)
    jobs: list[Job] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    started: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def stream(self, job: Job) -> AsyncGenerator[Piece]:
        self.jobs.append(job)
        if job.served is not None:
            job.served.revision = self.revision
        self.started.set()
        finished = False
        try:
            if self.error is not None and not self.fail_after:
                raise self.error
            token_ids = self.text.encode(self.answer)[: job.sampling.max_tokens]
            num_tokens = 0
            for index in range(job.n):
                async for piece in self._sample(job, index, token_ids):
                    num_tokens += len(piece.token_ids)
                    if piece.finish is not None and index == job.n - 1:
                        finished = True
                        yield self._last(job, piece, num_tokens)
                    else:
                        yield piece
        finally:
            if not finished and self.error is None:
                self.cancelled.append(job.request_id)
            self.ended.set()

    def why(self, request_id: str) -> Explanation | None:
        return self.explanations.get(request_id)

    def recent(self, tenant: str | None, num_running: int) -> Iterator[Recent]:
        for running in (True, False):
            own = [one for one in self.explanations.values() if tenant in (None, one.tenant)]
            alike = [one for one in own if (one.outcome in STATES) == running]
            for one in alike[: num_running if running else None]:
                yield Recent(replace(one, whys=()), ("pair",), None if running else 3.0)

    async def _sample(self, job: Job, index: int, token_ids: Sequence[int]) -> AsyncGenerator[Piece]:
        stream = self.text.stream(job.stop, min_tokens=job.sampling.min_tokens, continues=job.continues)
        cached = self.cached_tokens
        for position in range(0, len(token_ids), self.tokens_per_piece):
            if self.gate is not None and position:
                await self.gate.acquire()
            if self.error is not None and position >= self.fail_after:
                raise self.error
            new = tuple(token_ids[position : position + self.tokens_per_piece])
            delta = stream.push(new)
            new = new[: delta.num_consumed] if delta.stopped else new
            logprobs = self._logprobs(job, new)
            if delta.stopped:
                yield Piece(index, delta.text, new, logprobs, "stop", cached_tokens=cached)
                return
            if position + self.tokens_per_piece >= len(token_ids):
                tail = stream.flush()
                finish = "length" if len(token_ids) == job.sampling.max_tokens else "stop"
                yield Piece(index, delta.text + tail.text, new, logprobs, finish, cached_tokens=cached)
                return
            yield Piece(index, delta.text, new, logprobs, cached_tokens=cached)

    def _last(self, job: Job, piece: Piece, num_tokens: int) -> Piece:
        timeline = RequestTimeline(Timeline(prefill_worker="p1"), 0.25, "d1", 1)
        usage = Usage(len(job.prompt_token_ids), num_tokens, self.cached_tokens)
        return replace(piece, usage=usage, timeline=timeline)

    def _logprobs(self, job: Job, token_ids: Sequence[int]) -> tuple[TokenLogprobs, ...]:
        num = job.sampling.num_logprobs
        if num is None:
            return ()
        return tuple(
            TokenLogprobs(token_id, -0.5, tuple((token_id + at, -0.5 - at) for at in range(num)))
            for token_id in token_ids
        )


def make_edge(
    text: Text,
    requests: Streams,
    *,
    api_keys: Mapping[str, Sequence[str]] | Sequence[str] = (),
    tenancy: Tenancy | None = None,
    unready: str | None = None,
    splits: bool = False,
    clock: Clock,
) -> Edge:
    """`api_keys` of the default tenant, or by tenant."""
    tenancy = tenancy or Tenancy()
    keys = api_keys if isinstance(api_keys, Mapping) else {DEFAULT_TENANT: api_keys}
    draws = random.Random(7)
    return Edge(
        Models({"tiny": ServedModel("tiny", "r1", CONTEXT, VOCABULARY, text)}),
        JobMaker(LimitsConfig(default_max_tokens=16), lambda: draws.getrandbits(64), tenancy=tenancy),
        requests,
        clock,
        unready=lambda: unready,
        draw_id=lambda: f"{draws.getrandbits(32):08x}",
        keyring=Keyring(keys),
        tenancy=tenancy,
        splits=lambda: splits,
    )
