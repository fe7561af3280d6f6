"""The router's streams to workers: one multiplexed Worker.Session each, kept while the worker is sought (design 5.1).

A worker is alive while its session speaks: reports come at least every half second, and pings are answered. One that
is silent for `silent_seconds` is out, whatever its lease says; one that speaks is in, whether or not Redis has a lease
of it. What a session hears goes to the mailboxes of its requests; when it ends, each of them hears that.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import grpc

from headrace import blocks, wire
from headrace.clock import Clock
from headrace.errors import HeadraceError, IncompatiblePeer, WorkerLost
from headrace.v1 import worker_pb2, worker_pb2_grpc
from headrace.values import PROTOCOL_VERSION, LoadReport, PrefillTarget, Request, RequestKey, SequenceOutput, WorkerInfo
from router.listeners import Listeners
from router.mailbox import GivenUp, Mailbox, PeerFailed

log = logging.getLogger(__name__)

FIRST_RETRY_SECONDS = 0.1
MAX_RETRY_SECONDS = 2.0
CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", 64 * 2**20),
    ("grpc.max_send_message_length", 64 * 2**20),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
)


class Session:
    """One live stream to one worker. Owns what is still to be sent, and which requests listen."""

    def __init__(self, info: WorkerInfo, call: Any, clock: Clock) -> None:
        self.info = info
        self.report: LoadReport | None = None
        self.heard_at = clock.now()
        self.lost: str | None = None
        self._call = call
        self._clock = clock
        self._listeners = Listeners()
        self._outbox: deque[worker_pb2.RouterMessage] = deque()
        self._has_mail = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Session {self.info.worker_id}#{self.info.generation} requests={len(self._listeners)}>"

    def submit(self, request: Request, mailbox: Mailbox[Any]) -> None:
        first_sample = self._listeners.add(request.key.request_id, request.n, mailbox)
        self.send(worker_pb2.RouterMessage(submit=wire.request_to_pb(request, first_sample)))

    def cancel(self, key: RequestKey) -> None:
        """The request is no longer wanted; whatever the worker still says of it is dropped."""
        if self._listeners.remove(key.request_id) is not None:
            self.send(worker_pb2.RouterMessage(cancel=worker_pb2.Cancel(key=wire.key_to_pb(key))))

    def stop_sample(self, key: RequestKey, index: int) -> None:
        """Asks for no more tokens of one sample; the worker answers with its finish."""
        stop = worker_pb2.StopSample(key=wire.key_to_pb(key), index=index)
        self.send(worker_pb2.RouterMessage(stop_sample=stop))

    def forget(self, request_id: str) -> None:
        """The worker ended the request itself."""
        self._listeners.remove(request_id)

    def place(self, key: RequestKey, prefill: PrefillTarget | None) -> None:
        """The answer to a PeerFailed: another prefill worker, or none, under the new attempt's key."""
        target = wire.prefill_to_pb(prefill) if prefill is not None else None
        self.send(worker_pb2.RouterMessage(place=worker_pb2.Place(key=wire.key_to_pb(key), prefill=target)))

    def send(self, message: worker_pb2.RouterMessage) -> None:
        if self.lost is None:
            self._outbox.append(message)
            self._has_mail.set()

    def lose(self, reason: str) -> None:
        """Ends the session from this side; its reader then returns."""
        if self.lost is None:
            self.lost = reason
            self._call.cancel()

    async def write(self) -> None:
        """Sends what is put into the outbox, in order, until cancelled."""
        while True:
            await self._has_mail.wait()
            self._has_mail.clear()
            while self._outbox:
                await self._call.write(self._outbox.popleft())

    async def read(self, reported: Callable[[], None]) -> str:
        """Hands on what the worker says until the stream ends; returns why it ended."""
        try:
            while True:
                message = await self._call.read()
                if message is grpc.aio.EOF:
                    return self.lost or "the worker closed the session"
                self.heard_at = self._clock.now()
                if message.HasField("leaving"):
                    return "the worker left"
                self._hear(message, reported)
        except grpc.aio.AioRpcError as error:
            return self.lost or f"{error.code().name}: {error.details()}"
        except (ValueError, HeadraceError) as error:
            return f"the worker sent a malformed message: {error}"
        except asyncio.CancelledError:
            # grpc raises it also where only the call was cancelled, by lose().
            task = asyncio.current_task()
            if self.lost is None or (task is not None and task.cancelling()):
                raise
            return self.lost

    def _hear(self, message: worker_pb2.WorkerMessage, reported: Callable[[], None]) -> None:
        match message.WhichOneof("kind"):
            case "outputs":
                self._hear_step(message.outputs)
            case "load":
                self.report = wire.report_from_pb(message.load)
                reported()
            case "peer_lost":
                lost = message.peer_lost
                mailbox = self._listeners.find(lost.key)
                if mailbox is not None:
                    mailbox.fail(PeerFailed(lost.worker_id, wire.error_from_pb(lost.error)))
            case "rejected":
                mailbox = self._listeners.find(message.rejected.key)
                if mailbox is not None:
                    self.forget(mailbox.key.request_id)
                    mailbox.fail(GivenUp(wire.error_from_pb(message.rejected.error)))
            case "pong":
                pass
            case kind:
                raise ValueError(f"unexpected {kind or 'empty message'}")

    def _hear_step(self, step: worker_pb2.StepOutputs) -> None:
        for output in step.outputs:
            mailbox = self._listeners.computed(output.key)
            if mailbox is not None:
                mailbox.feed(wire.output_from_pb(output, mailbox.key))
        for number, token_id, count in zip(step.samples[:], step.token_ids[:], step.num_generated[:], strict=True):
            listener = self._listeners.sample(number)
            if listener is not None:
                mailbox, index = listener
                mailbox.feed(SequenceOutput(mailbox.key, index, (token_id,), count))

    def fail_all(self, reason: str) -> None:
        """The session is over: every request that listens is told once."""
        self.lost = self.lost or reason
        for mailbox in self._listeners.clear():
            error = WorkerLost(f"worker {self.info.worker_id} is lost: {reason}", worker=self.info.worker_id)
            mailbox.fail(GivenUp(error))


class Sessions:
    """Owns all sessions of one router, and the tasks that keep them. Never waits on Redis.

    `refuse(info)` may return the reason why a worker must not be served through this router (another tokenizer, say).
    Listeners are told the worker's id whenever its session begins, reports or ends.
    """

    def __init__(
        self,
        router_id: str,
        clock: Clock,
        *,
        heartbeat_seconds: float,
        silent_seconds: float,
        refuse: Callable[[WorkerInfo], str | None] = lambda info: None,
    ) -> None:
        self._router_id = router_id
        self._clock = clock
        self._heartbeat_seconds = heartbeat_seconds
        self._silent_seconds = silent_seconds
        self._refuse = refuse
        self._sought: set[str] = set()
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._live: dict[str, Session] = {}
        self._listeners: list[Callable[[str], None]] = []
        self._group: asyncio.TaskGroup | None = None

    def listen(self, listener: Callable[[str], None]) -> None:
        self._listeners.append(listener)

    def live(self) -> Iterable[Session]:
        return self._live.values()

    def find(self, worker_id: str) -> Session | None:
        return self._live.get(worker_id)

    def seek(self, addresses: Iterable[str]) -> None:
        """The addresses where workers are said to be, all of them. A live session is kept though it is not sought any
        more; once it ends, it is not formed again."""
        self._sought = set(addresses)
        if self._group is None:
            return
        for address in self._sought:
            if address not in self._keepers:
                self._keepers[address] = self._group.create_task(self._keep(address), name=f"session {address}")

    async def run(self) -> None:
        """Keeps the sessions until cancelled."""
        try:
            async with asyncio.TaskGroup() as self._group:
                self.seek(self._sought)
                await self._heartbeats()
        finally:
            self._group = None

    async def _heartbeats(self) -> None:
        expected = self._clock.now()
        while True:
            await asyncio.sleep(self._heartbeat_seconds)
            now = self._clock.now()
            expected += self._heartbeat_seconds
            # A router that was itself held up has not listened; it gives everyone another round.
            punctual = now - expected < self._heartbeat_seconds
            expected = now
            for session in list(self._live.values()):
                silent = now - session.heard_at
                if punctual and silent > self._silent_seconds:
                    self._lose(session, f"silent for {silent:.1f} s")
                else:
                    session.send(worker_pb2.RouterMessage(ping=worker_pb2.Ping()))

    async def _keep(self, address: str) -> None:
        """Forms the session again, with growing pauses, as long as the address is sought."""
        pause = FIRST_RETRY_SECONDS
        try:
            while address in self._sought:
                began = self._clock.now()
                reason = await self._serve(address)
                log.info("session to %s ended: %s", address, reason)
                if self._clock.now() - began > self._silent_seconds:
                    pause = FIRST_RETRY_SECONDS
                await asyncio.sleep(pause)
                pause = min(2 * pause, MAX_RETRY_SECONDS)
        finally:
            del self._keepers[address]

    async def _serve(self, address: str) -> str:
        """One session from hello to end; returns why it ended."""
        async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
            call = worker_pb2_grpc.WorkerStub(channel).Session()  # type: ignore[no-untyped-call]
            try:
                async with asyncio.timeout(self._silent_seconds):
                    info = await self._greet(call)
            except TimeoutError:
                return f"no hello within {self._silent_seconds:g} s"
            except grpc.aio.AioRpcError as error:
                return f"{error.code().name}: {error.details()}"
            except (ValueError, HeadraceError) as error:
                return f"refused: {error}"
            else:
                return await self._carry(Session(info, call, self._clock))
            finally:
                call.cancel()

    async def _greet(self, call: Any) -> WorkerInfo:
        hello = worker_pb2.RouterHello(router_id=self._router_id, protocol_version=PROTOCOL_VERSION)
        await call.write(worker_pb2.RouterMessage(hello=hello))
        message = await call.read()
        if message is grpc.aio.EOF or message.WhichOneof("kind") != "hello":
            raise ValueError("the worker did not begin with hello")
        info = wire.worker_from_pb(message.hello)
        ours = {"protocol_version": PROTOCOL_VERSION, "hash_version": blocks.HASH_VERSION}
        for field, value in ours.items():
            theirs = getattr(info.compatibility, field)
            if theirs != value:
                raise IncompatiblePeer(f"{field} is {theirs} there and {value} here", field=field)
        reason = self._refuse(info)
        if reason is not None:
            raise IncompatiblePeer(reason)
        older = self._live.get(info.worker_id)
        if older is not None and older.info.generation > info.generation:
            raise IncompatiblePeer(f"generation {info.generation} is older than {older.info.generation}, which is live")
        return info

    async def _carry(self, session: Session) -> str:
        worker_id = session.info.worker_id
        older = self._live.get(worker_id)
        self._live[worker_id] = session
        if older is not None:
            older.lose("a newer session took its place")
        writer = asyncio.create_task(session.write(), name=f"writes to {worker_id}")
        writer.add_done_callback(lambda task: None if task.cancelled() else self._lose(session, str(task.exception())))
        reason = "the router ends"
        try:
            self._tell(worker_id)
            reason = await session.read(lambda: self._tell(worker_id))
            return reason
        finally:
            writer.cancel()
            session.fail_all(reason)
            self._remove(session)

    def _lose(self, session: Session, reason: str) -> None:
        """Ends a session from this side: nobody finds it from now on, though its requests hear so a moment later."""
        session.lose(reason)
        self._remove(session)

    def _remove(self, session: Session) -> None:
        worker_id = session.info.worker_id
        if self._live.get(worker_id) is session:
            del self._live[worker_id]
            self._tell(worker_id)

    def _tell(self, worker_id: str) -> None:
        for listener in self._listeners:
            listener(worker_id)
