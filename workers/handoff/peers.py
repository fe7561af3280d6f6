"""Streams to the prefill workers that this worker pulls from: one Transfer.Link each, for all requests between the two.

A stream is opened on first use and checked in both directions. When it ends, every conversation on it fails, the KV
links that read from the peer are closed, and the next request opens a new one.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager

import grpc

from headrace import wire
from headrace.errors import HeadraceError, TransferFailed
from headrace.v1 import transfer_pb2, transfer_pb2_grpc
from headrace.values import PrefillTarget, RequestKey
from workers.faults import Faults
from workers.handoff import messages
from workers.handoff.messages import PeerHello
from workers.kv.links.base import PeerRanks
from workers.kv.links.choice import all_await_steps, choose
from workers.ranks.executor import Executor
from workers.scheduling.scheduler import ChunkDone

log = logging.getLogger(__name__)


class Conversation:
    """One request's part of a stream: what its source announces, in order. Owned by the task that pulls it."""

    def __init__(self, link: "PeerLink", key: RequestKey) -> None:
        self.link = link
        self.key = key
        self.heard = False
        self._inbox: asyncio.Queue[ChunkDone | HeadraceError] = asyncio.Queue()

    def put(self, item: ChunkDone | HeadraceError) -> None:
        self.heard = True
        self._inbox.put_nowait(item)

    async def next(self) -> list[ChunkDone]:
        """What was announced since the last call, at least one chunk. Raises what ended the conversation, at once."""
        items = [await self._inbox.get()]
        while not self._inbox.empty():
            items.append(self._inbox.get_nowait())
        chunks = []
        for item in items:
            if isinstance(item, HeadraceError):
                raise item
            chunks.append(item)
        return chunks


class PeerLink:
    """The stream to one prefill worker. Owns its conversations; `run` owns the stream."""

    def __init__(self, target: PrefillTarget, hello: PeerHello, executor: Executor, faults: Faults) -> None:
        self.target = target
        self.opened: asyncio.Future[PeerRanks] = asyncio.get_running_loop().create_future()
        self.num_bytes = 0
        self.kind = self.reason = ""
        self.awaits_steps = False
        self._ended: HeadraceError | None = None
        self.reading = asyncio.Semaphore(2)
        self._hello = hello
        self._executor = executor
        self._faults = faults
        self._conversations: dict[RequestKey, Conversation] = {}
        self._outbox: asyncio.Queue[transfer_pb2.PullerMessage] = asyncio.Queue()
        self._heard = asyncio.Event()

    def check(self) -> None:
        """Raises what ended the stream, if something has: for who found it open, and waited for something else since."""
        if self._ended is not None:
            raise self._ended

    @contextmanager
    def conversation(self, key: RequestKey) -> Iterator[Conversation]:
        """Ends with Release, or with Abort when it is left by an exception: either unpins at the source. Of a stream that
        has ended there is none: nobody would tell it so."""
        self.check()
        talk = Conversation(self, key)
        self._conversations[key] = talk
        try:
            yield talk
        except BaseException as error:
            reason = error if isinstance(error, HeadraceError) else TransferFailed(f"{type(error).__name__}: {error}")
            self.send(messages.puller_abort(key, reason))
            raise
        else:
            self.send(messages.release(key))
        finally:
            self._conversations.pop(key, None)

    def send(self, message: transfer_pb2.PullerMessage) -> None:
        self._outbox.put_nowait(message)

    def renew(self) -> None:
        """Pins of everything that is being pulled live on; and a ticket that its source lost is noticed."""
        for key, talk in self._conversations.items():
            self.send(messages.renew(key, heard=talk.heard))

    async def watch(self, silent_seconds: float) -> None:
        """Returns when the peer was silent for so long: it is dead, frozen, or behind a dead network."""
        try:
            while True:
                self.send(transfer_pb2.PullerMessage(beat=transfer_pb2.Beat()))
                self._heard.clear()
                await asyncio.sleep(silent_seconds / 4)
                async with asyncio.timeout(silent_seconds * 3 / 4):
                    await self._heard.wait()
        except TimeoutError:
            return

    async def run(self, channel: grpc.aio.Channel) -> None:
        """From opening the stream to its end, which is never an exception: those who wait on it are told."""
        self.send(transfer_pb2.PullerMessage(hello=messages.hello_to_pb(self._hello)))
        error: HeadraceError
        try:
            stub = transfer_pb2_grpc.TransferStub(channel)  # type: ignore[no-untyped-call]
            call = stub.Link(self._messages())
            async for message in call:
                self._heard.set()
                self._take(message)
            error = TransferFailed(f"{self.target.worker_id} ended the stream")
        except grpc.aio.AioRpcError as failure:
            error = TransferFailed(f"lost {self.target.worker_id}: {failure.code().name}: {failure.details()}")
        except (HeadraceError, ValueError) as failure:
            error = (
                failure if isinstance(failure, HeadraceError) else TransferFailed(f"{self.target.worker_id}: {failure}")
            )
        except asyncio.CancelledError:
            self.fail(TransferFailed(f"the stream to {self.target.worker_id} was closed"))
            raise
        self.fail(error)

    async def _messages(self) -> AsyncIterator[transfer_pb2.PullerMessage]:
        while True:
            message = await self._outbox.get()
            point = message.WhichOneof("kind")
            if point not in ("ticket", "release") or await self._faults.reach(point):
                yield message

    def _take(self, message: transfer_pb2.SourceMessage) -> None:
        match message.WhichOneof("kind"):
            case "hello":
                self._welcome(messages.hello_from_pb(message.hello))
            case "announce":
                self._deliver(wire.key_from_pb(message.announce.key), messages.chunk_from_pb(message.announce))
            case "abort":
                key, reason = wire.key_from_pb(message.abort.key), wire.error_from_pb(message.abort.reason)
                if (talk := self._conversations.get(key)) is not None:
                    talk.put(reason)
            case "beat":
                pass
            case _:
                raise TransferFailed(f"{self.target.worker_id} sent a message of a newer protocol")

    def _welcome(self, peer: PeerHello) -> None:
        if (peer.worker_id, peer.generation) != (self.target.worker_id, self.target.generation):
            raise TransferFailed(
                f"{self.target.address} is {peer.worker_id} of generation {peer.generation}, "
                f"not {self.target.worker_id} of {self.target.generation}"
            )
        self._hello.check_pair(peer, self._executor.shape)
        if not self.opened.done():
            choice = choose(self._hello.endpoints[0], peer.endpoints[0])
            self.kind, self.reason = choice.scheme, choice.reason
            self.awaits_steps = all_await_steps(self._hello.endpoints, peer.endpoints)
            log.info("%s is read by %s: %s", peer.worker_id, choice.scheme, choice.reason)
            self.opened.set_result(peer.ranks)

    def _deliver(self, key: RequestKey, chunk: ChunkDone) -> None:
        talk = self._conversations.get(key)
        if talk is None:
            self.send(messages.puller_abort(key, TransferFailed(f"{key} is over here")))
        else:
            talk.put(chunk)

    def fail(self, error: HeadraceError) -> None:
        """Everyone on this stream hears it; the first reason is the one that counts."""
        self._ended = self._ended or error
        if not self.opened.done():
            self.opened.set_exception(error)
            self.opened.exception()
        for talk in self._conversations.values():
            talk.put(error)


class Peers:
    """The open streams, by (worker id, generation, address). Owned by the puller. `on_end` hears of each that ended, by the
    kind of its link."""

    def __init__(
        self,
        hello: PeerHello,
        executor: Executor,
        connect: Callable[[str], grpc.aio.Channel],
        *,
        silent_seconds: float,
        pin_seconds: float,
        faults: Faults | None = None,
        on_end: Callable[[str], None] = lambda kind: None,
    ) -> None:
        self._on_end = on_end
        self._hello = hello
        self._executor = executor
        self._connect = connect
        self._open_seconds = silent_seconds / 2
        self._silent_seconds = silent_seconds
        self._renew_seconds = pin_seconds / 4
        self._faults = faults or Faults()
        self._links: dict[PrefillTarget, PeerLink] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def __iter__(self) -> Iterator[PeerLink]:
        return iter(tuple(self._links.values()))

    def by_state(self) -> Counter[tuple[str, str]]:
        """How many links there are, by kind ("none" until it is known) and state."""
        return Counter((link.kind or "none", "open" if link.opened.done() else "opening") for link in self)

    async def link(self, target: PrefillTarget) -> tuple[PeerLink, PeerRanks]:
        """The stream to `target`, opened and checked. TransferFailed or IncompatiblePeer when there can be none."""
        link = self._links.get(target)
        if link is None:
            link = self._links[target] = PeerLink(target, self._hello, self._executor, self._faults)
            task = asyncio.create_task(self._keep(link), name=f"link to {target.worker_id}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        try:
            async with asyncio.timeout(self._open_seconds):
                return link, await asyncio.shield(link.opened)
        except TimeoutError:
            raise TransferFailed(
                f"{target.worker_id} at {target.address} did not answer within {self._open_seconds:g} s"
            ) from None

    async def close(self) -> None:
        for task in tuple(self._tasks):
            task.cancel()
        for task in tuple(self._tasks):
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _keep(self, link: PeerLink) -> None:
        channel = self._connect(link.target.address)
        tasks = [asyncio.create_task(work) for work in (link.run(channel), self._watch(link), self._renew(link))]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._links.pop(link.target, None)
            self._on_end(link.kind)
            for task in tasks:
                task.cancel()
            self._executor.close_links((link.target.worker_id, link.target.generation))
            await channel.close()

    async def _watch(self, link: PeerLink) -> None:
        await link.watch(self._silent_seconds)
        link.fail(TransferFailed(f"{link.target.worker_id} was silent for {self._silent_seconds:g} s"))

    async def _renew(self, link: PeerLink) -> None:
        while True:
            await asyncio.sleep(self._renew_seconds)
            link.renew()
