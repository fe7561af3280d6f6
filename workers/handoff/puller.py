"""The decode side of a hand-off: claim, ticket, pull while the next chunk computes, first tokens (design 2.4 to 2.8).

    claim     promised tokens fit the claim budget; in order, with the scheduler's bounded bypass
    ticket    to the prefill worker, over the pair's one stream
    announce  blocks that hold their final content, or will once a step of the source is done: allocate as many, read
              them, waiting for that step where they are read
    last      first tokens: the request is over (nothing more is read), or joins the batch

Waiting for a claim or in the peer's queue is not peer death; only a lost stream, an Abort (also in answer to a Renew,
when the peer does not know the ticket), or no progress after the first announcement is. Whichever way it ends, the
source hears Release or Abort; blocks that a rank may still write into stay quarantined until its read is over.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from headrace import wire
from headrace.errors import LinkClosed, TransferFailed
from headrace.v1 import transfer_pb2
from headrace.values import PrefillTarget, Request, RequestKey, SequenceOutput, Ticket
from workers.engine import Engine
from workers.handoff.digests import check
from workers.handoff.peers import Conversation, PeerLink, Peers
from workers.handoff.reads import Reads
from workers.kv.links.base import PeerRanks
from workers.scheduling.scheduler import ChunkDone, Expected


class NoRoom(TransferFailed):
    """This worker has no blocks for what was announced: no fault of the peer's."""


@dataclass(frozen=True, slots=True)
class ToRead:
    """What a round of announcements asks for: (block, epoch) in the source's pool, from `first_block` of the table on.

    `last` is the last announcement, if it is among them. `after_step`: what the read waits for, see ChunkDone. `digests`:
    of each block, where the source says them.
    """

    first_block: int
    blocks: tuple[tuple[int, int], ...]
    last: ChunkDone | None = None
    after_step: int = 0
    digests: tuple[bytes, ...] = ()


class Announced:
    """Checks that a request's announcements leave no hole. Pure; one per conversation."""

    def __init__(self, expected: Expected) -> None:
        self._next_block = expected.held_blocks
        self._num_blocks = expected.num_prompt_blocks

    def take(self, chunks: Sequence[ChunkDone]) -> ToRead:
        """The chunks as one. TransferFailed when blocks are missing, twice, or too many, or digests are of some alone."""
        first = self._next_block
        blocks: list[tuple[int, int]] = []
        for chunk in chunks:
            if chunk.blocks and chunk.first_block != self._next_block:
                raise TransferFailed(f"block {chunk.first_block} was announced, block {self._next_block} was next")
            blocks += chunk.blocks
            self._next_block += len(chunk.blocks)
        last = chunks[-1] if chunks[-1].last else None
        if self._next_block > self._num_blocks or (last and self._next_block < self._num_blocks):
            raise TransferFailed(f"{self._next_block} blocks were announced of {self._num_blocks}")
        digests = tuple(digest for chunk in chunks for digest in chunk.digests)
        if digests and len(digests) != len(blocks):
            raise TransferFailed(f"{len(digests)} digests were announced of {len(blocks)} blocks")
        return ToRead(first, tuple(blocks), last, max(chunk.after_step for chunk in chunks), digests)


class Puller:
    """Owns the peers, and who waits for a claim. One coroutine a request goes through pull()."""

    def __init__(
        self,
        engine: Engine,
        peers: Peers,
        reads: Reads,
        *,
        transfer_seconds: float,
    ) -> None:
        self._engine = engine
        self.peers = peers
        self._reads = reads
        self._transfer_seconds = transfer_seconds
        self._claimants: dict[RequestKey, asyncio.Future[Expected]] = {}
        self.num_handoffs = 0

    async def pull(self, request: Request, target: PrefillTarget, router_id: str) -> list[SequenceOutput]:
        """The whole hand-off of an expected request; returns the outputs of its first tokens.

        Raises TransferFailed, IncompatiblePeer or what the source aborted it with; the scheduler then still expects the
        request. Cancelled, it leaves the request to the caller too.
        """
        key = request.key
        asked_at = self._engine.clock.now()
        expected = await self._claim(key)
        link, ranks = await self.peers.link(target)
        with link.conversation(key) as talk:
            offered = self._engine.scheduler.incoming.held_blocks(key) if request.offer_held else ()
            left = _time_left(request, self._engine.clock.now() - asked_at)
            # What is over with its first token is not to be read: whether it is, is known when it is computed.
            ahead = link.awaits_steps and request.sampling.max_tokens > 1
            ticket = Ticket(left, expected.held_blocks, router_id, offered, ahead)
            link.send(transfer_pb2.PullerMessage(ticket=wire.ticket_to_pb(ticket)))
            asked_at = self._engine.clock.now()
            self._engine.scheduler.incoming.note_transfer(key, target.worker_id, asked_at=asked_at)
            announced = Announced(expected)
            while True:
                todo = announced.take(await self._next(talk))
                landed_at = self._engine.clock.now()
                if todo.last is not None and (outputs := self._finish_early(key, target, todo.last)) is not None:
                    return outputs
                if todo.blocks:
                    landed_at = await self._read(link, ranks, request, todo)
                if todo.last is not None:
                    return self._arrive(key, target, todo.last, landed_at)

    # -- claims

    async def grant_claims(self) -> None:
        """Hands out claims as budget becomes free. Runs as long as the worker."""
        while True:
            self._grant()
            await self._engine.next_change()

    def give_up(self, key: RequestKey) -> None:
        """The request is over: it must not be asked for again, even before its coroutine notices."""
        self._claimants.pop(key, None)

    async def _claim(self, key: RequestKey) -> Expected:
        granted = self._claimants[key] = asyncio.get_running_loop().create_future()
        try:
            self._grant()
            expected: Expected = await granted
            return expected
        finally:
            self.give_up(key)

    def _grant(self) -> None:
        scheduler = self._engine.scheduler
        for key, granted in list(self._claimants.items()):
            if scheduler.incoming.may_claim(key):
                del self._claimants[key]
                granted.set_result(scheduler.incoming.claim(key))

    # -- announcements and reads

    async def _next(self, talk: Conversation) -> list[ChunkDone]:
        """Waits as long as it takes for the first announcement, and then for progress."""
        if not talk.heard:
            return await talk.next()
        try:
            async with asyncio.timeout(self._transfer_seconds):
                return await talk.next()
        except TimeoutError:
            raise TransferFailed(
                f"{talk.link.target.worker_id} announced nothing more within {self._transfer_seconds:g} s",
                seconds=self._transfer_seconds,
            ) from None

    async def _read(self, link: PeerLink, ranks: PeerRanks, request: Request, todo: ToRead) -> float:
        """When all of it was in."""
        key = request.key
        targets = await self._allocate(key, len(todo.blocks))
        async with link.reading:
            await self._reads.meet_faults(todo.first_block, len(todo.blocks))
            link.check()
            try:
                receipt = await self._reads.read(ranks, todo.blocks, targets, todo.after_step)
            except LinkClosed:
                # Another request's trouble closes the link that both read over; the peer may be well.
                link.check()
                receipt = await self._reads.read(ranks, todo.blocks, targets, todo.after_step)
        landed_at = self._engine.clock.now()
        if todo.digests:
            await check(self._engine, [block for block, _ in targets], todo.first_block, todo.digests, request)
        self._engine.scheduler.incoming.landed(key, len(targets))
        self._engine.scheduler.incoming.note_transfer(
            key, link.target.worker_id, blocks=receipt.num_blocks, num_bytes=receipt.num_bytes
        )
        link.num_bytes += receipt.num_bytes
        return landed_at

    async def _allocate(self, key: RequestKey, num_blocks: int) -> tuple[tuple[int, int], ...]:
        try:
            async with asyncio.timeout(self._transfer_seconds):
                while (targets := self._engine.scheduler.incoming.allocate(key, num_blocks)) is None:
                    await self._engine.next_change()
        except TimeoutError:
            raise NoRoom(
                f"no {num_blocks} free blocks for {key.request_id} within {self._transfer_seconds:g} s",
                num_blocks=num_blocks,
            ) from None
        self._engine.changed()
        return targets

    # -- the end

    def _finish_early(self, key: RequestKey, target: PrefillTarget, last: ChunkDone) -> list[SequenceOutput] | None:
        scheduler = self._engine.scheduler
        scheduler.incoming.note_transfer(
            key, target.worker_id, queue_seconds=last.queue_seconds, prefill_seconds=last.prefill_seconds
        )
        outputs = scheduler.incoming.finish_early(key, last.first_tokens, last.cached_tokens, self._engine.clock.now())
        if outputs is not None:
            self.num_handoffs += 1
            self._engine.changed()
        return outputs

    def _arrive(
        self, key: RequestKey, target: PrefillTarget, last: ChunkDone, landed_at: float
    ) -> list[SequenceOutput]:
        scheduler = self._engine.scheduler
        scheduler.incoming.note_transfer(key, target.worker_id, landed_at=landed_at)
        outputs = scheduler.incoming.arrive(key, last.first_tokens, last.cached_tokens, self._engine.clock.now())
        self.num_handoffs += 1
        self._engine.changed()
        return outputs


def _time_left(request: Request, waited_seconds: float) -> Request:
    """The request as its source shall see it: deadlines travel as time left, and some of it was spent on waiting here."""
    if request.seconds_left is None:
        return request
    return replace(request, seconds_left=max(request.seconds_left - waited_seconds, 0.0))
