"""The two long-lived streams that a worker serves: Worker.Session to routers, Transfer.Link to decode workers."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Protocol

import grpc

from headrace import wire
from headrace.errors import HeadraceError, IncompatiblePeer, InternalError, InvalidRequest
from headrace.v1 import transfer_pb2, transfer_pb2_grpc, worker_pb2, worker_pb2_grpc
from headrace.values import PROTOCOL_VERSION, LoadReport, PrefillTarget, RequestKey, SequenceOutput, WorkerInfo
from workers.engine import Engine
from workers.faults import Faults
from workers.handoff import messages
from workers.handoff.messages import PeerHello
from workers.handoff.tickets import Source
from workers.intake import Intake, Placed, RouterSession
from workers.kv.layout import ModelShape
from workers.kv.links.base import PeerRanks

log = logging.getLogger(__name__)

MIN_REPORT_SECONDS = 0.05
MAX_REPORT_SECONDS = 0.5
SILENT_SECONDS = 30.0


class RouterStream:
    """What waits to be sent to one router. Tokens that wait together leave as one message."""

    def __init__(self, router_id: str) -> None:
        self.router_id = router_id
        self._outputs: list[tuple[int, SequenceOutput]] = []
        self._others: list[worker_pb2.WorkerMessage] = []
        self._ready = asyncio.Event()
        self._ended = False
        self.pinged_at: float | None = None

    def send_outputs(self, outputs: list[tuple[int, SequenceOutput]]) -> None:
        self._outputs += outputs
        self._ready.set()

    def send_rejected(self, key: RequestKey, error: HeadraceError) -> None:
        rejected = worker_pb2.Rejected(key=wire.key_to_pb(key), error=wire.error_to_pb(error))
        self.send(worker_pb2.WorkerMessage(rejected=rejected))

    def send_peer_lost(self, key: RequestKey, target: PrefillTarget, error: HeadraceError) -> None:
        lost = worker_pb2.PeerLost(
            key=wire.key_to_pb(key),
            worker_id=target.worker_id,
            generation=target.generation,
            error=wire.error_to_pb(error),
        )
        self.send(worker_pb2.WorkerMessage(peer_lost=lost))

    def send(self, message: worker_pb2.WorkerMessage) -> None:
        self._others.append(message)
        self._ready.set()

    def end(self) -> None:
        """What waits is still sent, then the stream closes."""
        self._ended = True
        self._ready.set()

    async def messages(self) -> AsyncIterator[worker_pb2.WorkerMessage]:
        """Outputs go first: nothing that ends a request may overtake its tokens. Both are taken at once: what comes while
        the router reads slowly may be a request's last tokens, and then what ends it."""
        while True:
            await self._ready.wait()
            self._ready.clear()
            while self._outputs or self._others:
                outputs, self._outputs = self._outputs, []
                others, self._others = self._others, []
                if outputs:
                    for step in wire.steps_to_pb(outputs):
                        yield worker_pb2.WorkerMessage(outputs=step)
                for message in others:
                    yield message
            if self._ended:
                return


class Status(Protocol):
    """What a worker says of itself."""

    def info(self) -> WorkerInfo: ...

    def report(self, session: RouterSession) -> LoadReport: ...


class WorkerServicer(worker_pb2_grpc.WorkerServicer):
    """Worker.Session. Owns the open sessions."""

    def __init__(self, engine: Engine, intake: Intake, status: Status) -> None:
        self._engine = engine
        self._intake = intake
        self._status = status
        self._sessions: set[RouterStream] = set()

    def take_leave(self) -> None:
        """Behind all that waits to be sent; routers then end their sessions."""
        for session in self._sessions:
            session.send(worker_pb2.WorkerMessage(leaving=worker_pb2.Leaving()))

    async def Session(
        self, request_iterator: AsyncIterator[worker_pb2.RouterMessage], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[worker_pb2.WorkerMessage]:
        hello = (await anext(request_iterator, worker_pb2.RouterMessage())).hello
        if hello.protocol_version != PROTOCOL_VERSION:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"a session begins with hello, and protocol_version must be {PROTOCOL_VERSION}, "
                f"got {hello.protocol_version}",
            )
        session = RouterStream(hello.router_id)
        session.send(worker_pb2.WorkerMessage(hello=wire.worker_to_pb(self._status.info())))
        self._sessions.add(session)
        tasks = (
            asyncio.create_task(self._listen(session, request_iterator)),
            asyncio.create_task(self._report(session)),
        )
        try:
            async for message in session.messages():
                yield message
        finally:
            for task in tasks:
                task.cancel()
            self._sessions.discard(session)
            self._intake.close_session(session)

    async def _listen(self, session: RouterStream, messages: AsyncIterator[worker_pb2.RouterMessage]) -> None:
        try:
            async for message in messages:
                self._hear(session, message)
        finally:
            session.end()

    def _hear(self, session: RouterStream, message: worker_pb2.RouterMessage) -> None:
        match message.WhichOneof("kind"):
            case "submit":
                self._submit(session, message.submit)
            case "cancel":
                self._intake.cancel(session, wire.key_from_pb(message.cancel.key))
            case "stop_sample":
                stop = message.stop_sample
                self._intake.stop_sample(session, wire.key_from_pb(stop.key), stop.index)
            case "place":
                place = message.place
                target = wire.prefill_from_pb(place.prefill) if place.HasField("prefill") else None
                self._intake.place(session, Placed(wire.key_from_pb(place.key), target))
            case "ping":
                session.pinged_at = self._engine.clock.now()
                session.send(worker_pb2.WorkerMessage(pong=worker_pb2.Pong(nonce=message.ping.nonce)))
            case kind:
                log.warning("router %s sent %s, which says nothing here", session.router_id, kind)

    def _submit(self, session: RouterStream, submit: worker_pb2.Submit) -> None:
        """Whatever is wrong with one request ends that request alone."""
        key = wire.key_from_pb(submit.key)
        try:
            request = wire.request_from_pb(submit)
        except HeadraceError as error:
            session.send_rejected(key, error)
        except ValueError as error:
            session.send_rejected(key, InvalidRequest(f"malformed Submit: {error}"))
        else:
            try:
                self._intake.submit(session, request, submit.first_sample)
            except Exception as error:
                log.exception("submit of %s", key)
                session.send_rejected(key, InternalError(f"{type(error).__name__}: {error}"))

    async def _report(self, session: RouterStream) -> None:
        """On change, but not faster than every MIN_REPORT_SECONDS; without one every MAX_REPORT_SECONDS. Ends the
        session of a router that pinged and then fell silent (its host is gone, though the connection is not), or that
        cannot be reported to."""
        try:
            while session.pinged_at is None or self._engine.clock.now() - session.pinged_at < SILENT_SECONDS:
                version = self._engine.version
                session.send(worker_pb2.WorkerMessage(load=wire.report_to_pb(self._status.report(session))))
                await asyncio.sleep(MIN_REPORT_SECONDS)
                if version == self._engine.version:
                    try:
                        async with asyncio.timeout(MAX_REPORT_SECONDS - 2 * MIN_REPORT_SECONDS):
                            await self._engine.next_change()
                    except TimeoutError:
                        continue
            log.warning("router %s was silent for %g s: its session is closed", session.router_id, SILENT_SECONDS)
        except Exception:
            # Without reports the router would place by what it heard last, for ever.
            log.exception("no report could be made to router %s: its session is closed", session.router_id)
        # Here, and not where the stream ends: a frozen router reads nothing, so what is being sent may never be over.
        self._intake.close_session(session)
        session.end()


class _PullerStream:
    """What waits to be sent to one decode worker."""

    def __init__(self, peer: PeerRanks) -> None:
        self.peer = peer
        self.outbox: asyncio.Queue[transfer_pb2.SourceMessage | None] = asyncio.Queue()

    def send(self, message: transfer_pb2.SourceMessage) -> None:
        self.outbox.put_nowait(message)


class TransferServicer(transfer_pb2_grpc.TransferServicer):
    """Transfer.Link: the source's end of the streams that decode workers open."""

    def __init__(
        self, source: Source, hello: PeerHello, shape: ModelShape, faults: Faults, *, silent_seconds: float
    ) -> None:
        self._silent_seconds = silent_seconds
        self._source = source
        self._hello = hello
        self._shape = shape
        self._faults = faults

    async def Link(
        self, request_iterator: AsyncIterator[transfer_pb2.PullerMessage], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[transfer_pb2.SourceMessage]:
        first = await anext(request_iterator, transfer_pb2.PullerMessage())
        if first.WhichOneof("kind") != "hello":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a link begins with hello")
        peer = messages.hello_from_pb(first.hello)
        stream = _PullerStream(peer.ranks)
        stream.send(transfer_pb2.SourceMessage(hello=messages.hello_to_pb(self._hello)))
        listening = asyncio.create_task(self._listen(stream, peer, request_iterator))
        try:
            while (message := await stream.outbox.get()) is not None:
                if message.WhichOneof("kind") != "announce" or await self._faults.reach("announce"):
                    yield message
        finally:
            listening.cancel()

    async def _listen(
        self, stream: _PullerStream, peer: PeerHello, incoming: AsyncIterator[transfer_pb2.PullerMessage]
    ) -> None:
        refused = self._refusal(peer)
        try:
            while True:
                async with asyncio.timeout(self._silent_seconds):
                    self._hear(stream, await anext(incoming), refused)
        except StopAsyncIteration:
            pass
        except TimeoutError:
            log.warning("%s was silent for %g s: its stream is closed", stream.peer.worker_id, self._silent_seconds)
        finally:
            # Here, and not where the stream ends: a frozen peer reads nothing, so what is being sent may never be over.
            self._source.close(stream)
            stream.outbox.put_nowait(None)

    def _hear(
        self, stream: _PullerStream, message: transfer_pb2.PullerMessage, refused: IncompatiblePeer | None
    ) -> None:
        match message.WhichOneof("kind"):
            case "ticket":
                key = wire.key_from_pb(message.ticket.key)
                try:
                    if refused is not None:
                        raise refused
                    self._source.ticket(stream, wire.ticket_from_pb(message.ticket))
                except HeadraceError as error:
                    stream.send(messages.source_abort(key, error))
                except ValueError as error:
                    stream.send(messages.source_abort(key, InvalidRequest(f"malformed ticket: {error}")))
                except Exception as error:
                    log.exception("ticket %s", key)
                    stream.send(messages.source_abort(key, InternalError(f"{type(error).__name__}: {error}")))
            case "release":
                self._source.release(wire.key_from_pb(message.release.key))
            case "abort":
                self._source.release(wire.key_from_pb(message.abort.key))
            case "beat":
                stream.send(transfer_pb2.SourceMessage(beat=message.beat))
            case "renew":
                self._source.renew(stream, wire.key_from_pb(message.renew.key), heard=not message.renew.unheard)
            case kind:
                log.warning("%s sent %s, which says nothing here", stream.peer.worker_id, kind)

    def _refusal(self, peer: PeerHello) -> IncompatiblePeer | None:
        try:
            self._hello.check_pair(peer, self._shape)
        except IncompatiblePeer as error:
            return error
        return None
