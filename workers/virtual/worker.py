"""A worker under virtual time: what intake, puller, tickets, reports and the publisher do around an engine.

The rules are those of `workers.intake`, `workers.handoff`, `workers.streams` and `workers.publish`, without wire and
processes: a message takes `message_seconds` to whoever it is for. What waits in production for a condition is asked
again here whenever that may have changed. Nothing is lost, so what production does about silence (pings, renewed pins,
reports that repeat the last) is left out: it changes nothing.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from headrace.blocks import BlockHasher
from headrace.errors import HeadraceError
from headrace.values import LoadReport, Request, RequestKey, Role, SequenceOutput, Ticket, WorkerInfo
from workers.scheduling.blocks import Holding
from workers.scheduling.scheduler import ChunkDone, StepEvents
from workers.scheduling.work import StepWork
from workers.virtual.audience import Audience, Router
from workers.virtual.engine import Machine, VirtualEngine
from workers.virtual.link import Link, Port
from workers.virtual.time import VirtualTime

TRANSFER_SECONDS = 10.0


class Meter(Protocol):
    """Who counts a worker's steps: `now` is when one ended."""

    def step(self, worker_id: str, now: float, work: StepWork, seconds: float) -> None: ...


@dataclass(slots=True, eq=False)
class _HandOff:
    """A request that is computed elsewhere. `todo` blocks are to be read, or are being read; None: none."""

    request: Request
    key: RequestKey
    source: "VirtualWorker"
    announced: list[ChunkDone] = field(default_factory=list)
    todo: int | None = None
    last: ChunkDone | None = None
    over: bool = False


class VirtualWorker:
    """Owns an engine, its hand-offs and its tickets. `peers` are all workers, by id. All routers hear of loads and blocks;
    of a request hears the one that is its `owner`, by the request's id (see Audience)."""

    def __init__(
        self,
        time: VirtualTime,
        info: WorkerInfo,
        machine: Machine,
        hasher: BlockHasher,
        peers: Mapping[str, "VirtualWorker"],
        routers: Sequence[Router],
        *,
        meter: Meter | None = None,
        message_seconds: float = 0.0,
        event_seconds: float = 0.0,
        tell_every: int = 1,
        owner: Callable[[str], int] | None = None,
    ) -> None:
        self.info = info
        self.role: Role = info.role
        self.engine = VirtualEngine(
            time,
            machine,
            hasher,
            self._landed,
            partial(meter.step, info.worker_id) if meter is not None else None,
        )
        self.scheduler = self.engine.scheduler
        self.incoming, self.outgoing = Port(), Port()
        self._time = time
        self._machine = machine
        self._peers = peers
        self.audience = Audience(
            time,
            self,
            routers,
            message_seconds=message_seconds,
            event_seconds=event_seconds,
            tell_every=tell_every,
            owner=owner,
        )
        self._live: dict[str, RequestKey] = {}
        self._handoffs: dict[RequestKey, _HandOff] = {}
        self._claimants: dict[RequestKey, _HandOff] = {}
        self._starved: dict[_HandOff, None] = {}
        self._tickets: dict[RequestKey, VirtualWorker] = {}
        self._links: dict[str, Link] = {}

    @property
    def worker_id(self) -> str:
        return self.info.worker_id

    # -- what a router asks

    def submit(self, request: Request) -> None:
        key, target = request.key, request.prefill
        try:
            if target is None or target.worker_id == self.worker_id:
                self.scheduler.submit(request, self._time.now)
            else:
                expected = self.scheduler.expect(request, self._time.now)
                if expected.remaining <= request.local_prefill_max_tokens:
                    self.scheduler.incoming.fall_back(key, key, self._time.now)
                else:
                    self._hand_off(request, key, target.worker_id)
        except HeadraceError as error:
            self.audience.say(self.audience.of(key).rejected, self.worker_id, key, error)
            return
        self._live[key.request_id] = key
        self._go_on()

    def cancel(self, request_id: str) -> None:
        """Ends the request without another word. Idempotent."""
        key = self._live.pop(request_id, None)
        if key is None:
            return
        self._drop(key)
        self.scheduler.cancel(key, self._time.now)
        self._go_on()

    def place(self, old: RequestKey, new: RequestKey, prefill: str | None) -> None:
        """The router's answer to a lost peer: the request's new name, and who prefills it."""
        handoff = self._handoffs.get(old)
        if handoff is None:
            return
        self._live[old.request_id] = new
        self._drop(old)
        request = replace(handoff.request, key=new)
        alone = prefill is None
        if prefill is not None:
            outlook = self.scheduler.incoming.restart(old, new, self._time.now)
            alone, old = outlook.remaining <= request.local_prefill_max_tokens, new
        if alone:
            self.scheduler.incoming.fall_back(old, new, self._time.now)
        elif prefill is not None:
            self._hand_off(request, new, prefill)
        self._go_on()

    # -- the decode side of a hand-off

    def _hand_off(self, request: Request, key: RequestKey, prefill: str) -> None:
        self._handoffs[key] = self._claimants[key] = _HandOff(request, key, self._peers[prefill])

    def _grant(self) -> None:
        incoming = self.scheduler.incoming
        for key, handoff in list(self._claimants.items()):
            if incoming.may_claim(key):
                del self._claimants[key]
                held_blocks = incoming.claim(key).held_blocks
                num_offered = held_blocks if handoff.request.offer_held else 0
                ticket = Ticket(replace(handoff.request, key=key), held_blocks)
                incoming.note_transfer(key, handoff.source.worker_id, asked_at=self._time.now)
                self.audience.say(handoff.source.ticket, self, ticket, num_offered)

    def announced(self, chunk: ChunkDone) -> None:
        handoff = self._handoffs.get(chunk.key)
        if handoff is not None:
            handoff.announced.append(chunk)
            self._continue(handoff)
            self._go_on()

    def aborted(self, key: RequestKey, error: HeadraceError) -> None:
        handoff = self._handoffs.get(key)
        if handoff is not None:
            self.audience.say(self.audience.of(key).peer_lost, self.worker_id, key, handoff.source.worker_id, error)

    def _continue(self, handoff: _HandOff) -> None:
        """Takes what was announced since the last read began."""
        if handoff.todo is not None or not handoff.announced:
            return
        chunks, handoff.announced = handoff.announced, []
        now, key, last = self._time.now, handoff.key, chunks[-1]
        if last.last:
            self.scheduler.incoming.note_transfer(
                key,
                handoff.source.worker_id,
                queue_seconds=last.queue_seconds,
                prefill_seconds=last.prefill_seconds,
            )
            outputs = self.scheduler.incoming.finish_early(key, last.first_tokens, last.cached_tokens, now)
            if outputs is not None:
                self._end(handoff, outputs)
                return
            handoff.last = last
        handoff.todo = sum(len(chunk.blocks) for chunk in chunks)
        self._read(handoff)

    def _read(self, handoff: _HandOff) -> None:
        """Reads the blocks to be read, if there is room for them; else it is asked again."""
        assert handoff.todo is not None
        targets = self.scheduler.incoming.allocate(handoff.key, handoff.todo) if handoff.todo else ()
        if targets is None:
            if handoff not in self._starved:
                self._starved[handoff] = None
                self._time.after(TRANSFER_SECONDS, self._no_room, handoff)
            return
        self._starved.pop(handoff, None)
        if not targets:
            self._end_read(handoff)
            return
        num_bytes = len(targets) * self._machine.block_bytes
        pulls: list[Holding] = []

        def begin() -> bool:
            if not handoff.over:
                pulls.append(self.scheduler.incoming.begin_pull(targets))
            return not handoff.over

        def end(seconds: float) -> None:
            self.scheduler.incoming.end_pull(pulls.pop())
            self.engine.fit.add_transfer(num_bytes, seconds)
            if not handoff.over:
                incoming = self.scheduler.incoming
                incoming.landed(handoff.key, len(targets))
                incoming.note_transfer(handoff.key, handoff.source.worker_id, blocks=len(targets), num_bytes=num_bytes)
                self._end_read(handoff)
            self._go_on()

        self._link_from(handoff.source).read(num_bytes, begin, end)

    def _link_from(self, source: "VirtualWorker") -> Link:
        link = self._links.get(source.worker_id)
        if link is None:
            link = self._links[source.worker_id] = Link(self._time, self._machine.cost, source.outgoing, self.incoming)
        return link

    def _end_read(self, handoff: _HandOff) -> None:
        handoff.todo = None
        last = handoff.last
        if last is None:
            self._continue(handoff)
            return
        now = self._time.now
        self._end(handoff, self.scheduler.incoming.arrive(handoff.key, last.first_tokens, last.cached_tokens, now))

    def _no_room(self, handoff: _HandOff) -> None:
        """No blocks for what was announced within the time for it: no fault of the peer's. It is computed here."""
        if handoff in self._starved:
            self._drop(handoff.key)
            self.scheduler.incoming.fall_back(handoff.key, handoff.key, self._time.now)
            self._go_on()

    def _end(self, handoff: _HandOff, outputs: list[SequenceOutput]) -> None:
        self._drop(handoff.key)
        self._tell(outputs)

    def _drop(self, key: RequestKey) -> None:
        """The hand-off is over, whichever way; its source hears of it, unless it never heard of the request."""
        handoff = self._handoffs.pop(key, None)
        if handoff is None:
            return
        handoff.over = True
        self._starved.pop(handoff, None)
        if self._claimants.pop(key, None) is None:
            self.audience.say(handoff.source.release, key)

    # -- the prefill side of a hand-off

    def ticket(self, puller: "VirtualWorker", ticket: Ticket, num_offered: int) -> None:
        """What it offers is read before it queues."""
        key = ticket.request.key
        self._tickets[key] = puller
        adoption = self.scheduler.adopting.begin(ticket.request, num_offered)
        if adoption is None:
            self._queue(puller, ticket)
            return
        num_bytes = len(adoption.targets) * self._machine.block_bytes

        def begin() -> bool:
            if key not in self._tickets:
                self.scheduler.adopting.finish(adoption, landed=False)
            return key in self._tickets

        def end(seconds: float) -> None:
            self.scheduler.adopting.finish(adoption, landed=True)
            self.engine.fit.add_transfer(num_bytes, seconds)
            if key in self._tickets:
                self._queue(puller, ticket)

        self._link_from(puller).read(num_bytes, begin, end)

    def _queue(self, puller: "VirtualWorker", ticket: Ticket) -> None:
        request = ticket.request
        try:
            self.scheduler.ticket(request, ticket.held_blocks, self._time.now, puller.worker_id)
        except HeadraceError as error:
            del self._tickets[request.key]
            self.audience.say(puller.aborted, request.key, error)
        self._go_on()

    def release(self, key: RequestKey) -> None:
        if self._tickets.pop(key, None) is not None:
            self.scheduler.release(key, self._time.now)
            self._go_on()

    # -- what the engine says

    def _landed(self, events: StepEvents) -> None:
        for chunk in events.chunks:
            puller = self._tickets.get(chunk.key)
            if puller is not None:
                self.audience.say(puller.announced, chunk)
        if events.outputs:
            self._tell(events.outputs)
        self._go_on()

    def _tell(self, outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            if output.finish is not None:
                self._live.pop(output.key.request_id, None)
        self.audience.tell(outputs)

    def _go_on(self) -> None:
        """Something changed: what waits for that is asked again, and the engine goes on."""
        if self._claimants:
            self._grant()
        if self._starved:
            for handoff in tuple(self._starved):
                self._read(handoff)
        self.engine.go_on()
        self.audience.changed()

    # -- what others hear without asking

    def report(self) -> LoadReport:
        """With one router all that is here is its own."""
        counts, load = self.scheduler.counts(), self.scheduler.load()
        return LoadReport(load, load, self.engine.fit.model, self.role, counts.free + counts.cached)

    def request_keys(self) -> Iterator[RequestKey]:
        """Of all that is here, requests and tickets."""
        yield from self._live.values()
        yield from self._tickets
