"""The prefill side of a hand-off: tickets that decode workers send, announced chunk by chunk, pinned until pulled.

Blocks that a ticket offers are read before it queues: what the cache lacks of them need not be computed. When that fails,
whatever the reason, the ticket queues as it is, and they are.

What one decode worker may keep pinned is bounded in the scheduler, which lets the tickets of others pass; here is who
waits for what. Every ticket ends in one cancel of the scheduler: released, aborted, overdue, or its stream gone.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from headrace.errors import DeadlineExceeded, Draining, HeadraceError, TransferFailed
from headrace.v1 import transfer_pb2
from headrace.values import Request, RequestKey, Ticket
from workers.engine import Engine
from workers.handoff.digests import digested
from workers.handoff.messages import announce, source_abort
from workers.handoff.reads import Reads
from workers.kv.links.base import PeerRanks
from workers.scheduling.adopting import Adoption
from workers.scheduling.scheduler import ChunkDone

log = logging.getLogger(__name__)


class PullerStream(Protocol):
    """The stream to one decode worker, as the source sees it. `peer` is the worker behind it."""

    @property
    def peer(self) -> PeerRanks: ...

    def send(self, message: transfer_pb2.SourceMessage) -> None:
        """Queues; never waits."""


@dataclass(slots=True, eq=False)
class _Live:
    """`adopting`: the read of what it offers; until that is over the scheduler does not know it. `telling`: the last chunk
    that is being digested before it is announced."""

    ticket: Ticket
    stream: PullerStream
    adopting: asyncio.Task[None] | None = None
    telling: asyncio.Task[None] | None = None

    @property
    def key(self) -> RequestKey:
        return self.ticket.request.key


class Source:
    """Owns the tickets by request id, one attempt of each. Everything happens on the engine's event loop."""

    def __init__(
        self,
        engine: Engine,
        reads: Reads,
        on_prefilled: Callable[[Request, ChunkDone], None] | None = None,
        *,
        digests: bool = False,
    ) -> None:
        """`digests`: blocks are announced with one each."""
        self._digests = digests
        self._engine = engine
        self._reads = reads
        self._on_prefilled = on_prefilled
        self._tickets: dict[str, _Live] = {}
        self.draining = False
        self.num_handoffs = 0

    @property
    def num_tickets(self) -> int:
        return len(self._tickets)

    def keys(self) -> list[RequestKey]:
        return [live.key for live in self._tickets.values()]

    def keys_of_router(self, router_id: str) -> list[RequestKey]:
        """The tickets for this router's requests."""
        return [live.key for live in self._tickets.values() if live.ticket.router_id == router_id]

    def ticket(self, stream: PullerStream, ticket: Ticket) -> None:
        """Takes the ticket, or answers with Abort. A newer attempt ends the older one; an older one is told off."""
        key = ticket.request.key
        known = self._tickets.get(key.request_id)
        try:
            if self.draining:
                raise Draining("this worker is draining")
            if known is not None:
                if known.key.attempt >= key.attempt:
                    raise TransferFailed(f"attempt {known.key.attempt} of {key.request_id} is here, {key.attempt} came")
                self._end(known)
        except HeadraceError as error:
            stream.send(source_abort(key, error))
            return
        live = self._tickets[key.request_id] = _Live(ticket, stream)
        adoption = self._engine.scheduler.adopting.begin(ticket.request, len(ticket.offered))
        if adoption is None:
            self._queue(live)
        else:
            live.adopting = asyncio.create_task(self._adopt(live, adoption), name=f"offer of {key}")
            live.adopting.add_done_callback(lambda task: self._adopted(live, adoption, task))
            self._engine.changed()

    def _queue(self, live: _Live) -> None:
        ticket = live.ticket
        try:
            self._engine.scheduler.ticket(
                ticket.request,
                ticket.held_blocks,
                self._engine.clock.now(),
                live.stream.peer.worker_id,
                ahead=ticket.ahead,
            )
        except HeadraceError as error:
            self._lost(live.key, error)
        self._engine.changed()

    async def _adopt(self, live: _Live, adoption: Adoption) -> None:
        await self._reads.meet_faults(adoption.first, len(adoption.targets))
        offered = live.ticket.offered[adoption.first : len(adoption.chain)]
        await self._reads.read(live.stream.peer, offered, adoption.targets)

    def _adopted(self, live: _Live, adoption: Adoption, task: asyncio.Task[None]) -> None:
        """A callback, not a `finally`: a task that is cancelled before its first step never enters its body."""
        live.adopting = None
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.warning("what %s offered for %s is computed: %s", live.stream.peer.worker_id, live.key, error)
        self._engine.scheduler.adopting.finish(adoption, landed=not task.cancelled() and error is None)
        if self._tickets.get(live.key.request_id) is live:
            self._queue(live)
        self._engine.changed()

    def release(self, key: RequestKey) -> None:
        """The puller is done with it, or gave it up. Idempotent."""
        if (ticket := self._find(key)) is not None:
            self._end(ticket)

    def renew(self, stream: PullerStream, key: RequestKey, *, heard: bool) -> None:
        """Moves the pin's deadline, unless the puller heard nothing of it yet; a puller of what is gone is told so."""
        if self._find(key) is None:
            stream.send(source_abort(key, TransferFailed(f"{key.request_id}, attempt {key.attempt}, is not here")))
        elif heard:
            self._engine.scheduler.renew(key, self._engine.clock.now())

    def close(self, stream: PullerStream) -> None:
        """The stream ended: whoever was behind it pulls nothing any more, and nothing that it offered is read."""
        for ticket in [ticket for ticket in self._tickets.values() if ticket.stream is stream]:
            self._end(ticket)
        self._engine.executor.close_links(stream.peer.key)

    def chunk(self, chunk: ChunkDone) -> None:
        """A chunk is computed, or its step is launched: announces it. Of a ticket that ended meanwhile nothing is said."""
        if (ticket := self._find(chunk.key)) is None:
            return
        if self._digests:
            ticket.telling = asyncio.create_task(self._tell_digested(ticket, chunk, ticket.telling))
        else:
            self._tell(ticket, chunk)

    def _tell(self, ticket: _Live, chunk: ChunkDone) -> None:
        self.num_handoffs += chunk.last
        ticket.stream.send(announce(chunk))
        if chunk.last and self._on_prefilled is not None:
            self._on_prefilled(ticket.ticket.request, chunk)

    async def _tell_digested(self, ticket: _Live, chunk: ChunkDone, before: "asyncio.Task[None] | None") -> None:
        """Behind the chunk before it. Of a ticket that ended meanwhile nothing is said."""
        try:
            chunk = await digested(self._engine, chunk, ticket.ticket.request)
        except HeadraceError as error:
            if self._find(chunk.key) is ticket:
                self._end(ticket)
                ticket.stream.send(source_abort(chunk.key, error))
        if before is not None:
            await before
        if self._find(chunk.key) is ticket:
            self._tell(ticket, chunk)

    def deadline(self, key: RequestKey) -> bool:
        """The scheduler ended the request, whose time was up. False: it was no ticket."""
        return self._lost(key, DeadlineExceeded(f"{key.request_id}: its deadline passed during prefill"))

    def pin_ended(self, key: RequestKey) -> None:
        self._lost(key, TransferFailed(f"{key.request_id}: neither pulled nor renewed in time, its blocks are free"))

    def _find(self, key: RequestKey) -> _Live | None:
        ticket = self._tickets.get(key.request_id)
        return ticket if ticket is not None and ticket.key == key else None

    def _lost(self, key: RequestKey, error: HeadraceError) -> bool:
        ticket = self._find(key)
        if ticket is None:
            return False
        del self._tickets[key.request_id]
        ticket.stream.send(source_abort(key, error))
        return True

    def _end(self, ticket: _Live) -> None:
        del self._tickets[ticket.key.request_id]
        if ticket.adopting is not None:
            ticket.adopting.cancel()
        self._engine.scheduler.release(ticket.key, self._engine.clock.now())
        self._engine.changed()
