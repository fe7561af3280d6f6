"""A router's end of one Worker.Session, as benchmarks of workers need it: asks, and keeps when each token came."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from time import monotonic
from typing import Any

import grpc

from headrace import wire
from headrace.errors import HeadraceError, TransferFailed
from headrace.v1 import worker_pb2, worker_pb2_grpc
from headrace.values import (
    PROTOCOL_VERSION,
    LoadReport,
    PrefillTarget,
    Request,
    RequestKey,
    SamplingParams,
    Timeline,
    WorkerInfo,
)

OPTIONS = (("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", 64 * 2**20))


@dataclass
class Heard:
    """What came back of one request: its tokens, when each came, by how much each was the most likely."""

    key: RequestKey
    sent_at: float
    token_ids: list[int] = field(default_factory=list)
    at: list[float] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    timeline: Timeline | None = None
    error: HeadraceError | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    every: tuple[int, Callable[[], object]] | None = None  # so many tokens, this is called

    @property
    def ttft_seconds(self) -> float:
        return self.at[0] - self.sent_at

    def gaps(self, first: int, last: int) -> list[float]:
        """Seconds from each token to the next, of those numbered from `first` up to `last`."""
        times = self.at[first : last + 1]
        return [after - before for before, after in pairwise(times)]

    async def reach(self, num_tokens: int) -> None:
        """Until so many have come, or it is over."""
        while len(self.at) < num_tokens and not self.over.is_set():
            self.changed.clear()
            await self.changed.wait()

    async def end(self) -> "Heard":
        """HeadraceError where the worker gave it up."""
        await self.over.wait()
        if self.error is not None:
            raise self.error
        return self


class Session:
    """Owns the requests that it asked for. A lost hand-off is an error of its request: nothing is placed again."""

    def __init__(self, stub: Any, name: str) -> None:
        self._name = name
        self.report: LoadReport | None = None
        self.on_report: Callable[[], object] = lambda: None
        self.info: WorkerInfo  # once greeted
        self._hello = asyncio.Event()
        self._heard: dict[str, Heard] = {}
        self._outbox: asyncio.Queue[worker_pb2.RouterMessage] = asyncio.Queue()
        self._call = stub.Session(self._messages())

    def ask(
        self, name: str, prompt: Sequence[int], sampling: SamplingParams, prefill: PrefillTarget | None = None
    ) -> Heard:
        """Every request has a cache of its own: what another computed is not found."""
        request = Request(RequestKey(name), tuple(prompt), sampling, cache_salt=name, prefill=prefill)
        submit = worker_pb2.RouterMessage(submit=wire.request_to_pb(request))
        heard = self._heard[name] = Heard(request.key, monotonic())
        self._outbox.put_nowait(submit)
        return heard

    async def greeted(self) -> None:
        """Until the worker has said who it is."""
        await self._hello.wait()

    def cancel(self, heard: Heard) -> None:
        self._outbox.put_nowait(worker_pb2.RouterMessage(cancel=worker_pb2.Cancel(key=wire.key_to_pb(heard.key))))
        self._heard.pop(heard.key.request_id, None)

    async def _messages(self) -> AsyncIterator[worker_pb2.RouterMessage]:
        hello = worker_pb2.RouterHello(router_id=self._name, protocol_version=PROTOCOL_VERSION)
        yield worker_pb2.RouterMessage(hello=hello)
        while True:
            yield await self._outbox.get()

    async def listen(self) -> None:
        """Until the worker ends the session; all that is not over is then an error."""
        try:
            while (message := await self._call.read()) is not grpc.aio.EOF and not message.HasField("leaving"):
                self._hear(message)
        finally:
            self._call.cancel()
            for heard in self._heard.values():
                self._fail(heard, TransferFailed("the session ended"))

    def _hear(self, message: worker_pb2.WorkerMessage) -> None:
        now = monotonic()
        match message.WhichOneof("kind"):
            case "outputs":
                for pb in message.outputs.outputs:
                    heard = self._heard.get(pb.key.request_id)
                    if heard is not None:
                        self._add(heard, pb, now)
            case "hello":
                self.info = wire.worker_from_pb(message.hello)
                self._hello.set()
            case "load":
                self.report = wire.report_from_pb(message.load)
                self.on_report()
            case "rejected":
                self._fail(self._heard.get(message.rejected.key.request_id), wire.error_from_pb(message.rejected.error))
            case "peer_lost":
                lost = message.peer_lost
                self._fail(self._heard.get(lost.key.request_id), wire.error_from_pb(lost.error))

    def _add(self, heard: Heard, pb: worker_pb2.SequenceOutput, now: float) -> None:
        output = wire.output_from_pb(pb)
        heard.token_ids += output.token_ids
        before = len(heard.at)
        heard.at += [now] * len(output.token_ids)
        if heard.every is not None and len(heard.at) // heard.every[0] > before // heard.every[0]:
            heard.every[1]()
        for logprobs in output.logprobs:
            (_, best), (_, second) = logprobs.top[:2]
            heard.margins.append(best - second)
        heard.changed.set()
        if output.finish is not None:
            heard.timeline = output.timeline
            heard.over.set()
            del self._heard[heard.key.request_id]

    def _fail(self, heard: Heard | None, error: HeadraceError) -> None:
        if heard is not None:
            heard.error = error
            heard.over.set()
            heard.changed.set()


@asynccontextmanager
async def open_session(address: str, name: str) -> AsyncIterator[Session]:
    async with grpc.aio.insecure_channel(address, options=OPTIONS) as channel:
        session = Session(worker_pb2_grpc.WorkerStub(channel), name)  # type: ignore[no-untyped-call]
        listening = asyncio.create_task(session.listen())
        try:
            yield session
        finally:
            listening.cancel()
            with suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
                await listening
