"""The router's end of a Worker.Session, for tests that talk to a worker without a router.

Checks as it listens: no token twice or missing, one finish a sample, one rejection a request.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import grpc

from headrace import wire
from headrace.errors import HeadraceError
from headrace.v1 import worker_pb2, worker_pb2_grpc
from headrace.values import (
    PROTOCOL_VERSION,
    FinishReason,
    LoadReport,
    PrefillTarget,
    Request,
    RequestKey,
    SequenceOutput,
    Timeline,
    TokenLogprobs,
    Usage,
    WorkerInfo,
)


@dataclass
class Answer:
    """What a router heard of one request: per sample, and how it ended."""

    tokens: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    logprobs: defaultdict[int, list[TokenLogprobs]] = field(default_factory=lambda: defaultdict(list))
    finishes: dict[int, FinishReason] = field(default_factory=dict)
    usage: Usage | None = None
    timeline: Timeline | None = None
    error: HeadraceError | None = None
    lost: list[worker_pb2.PeerLost] = field(default_factory=list)
    keys: set[RequestKey] = field(default_factory=set)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    num_expected: int = 1

    def add(self, output: SequenceOutput) -> None:
        self.keys.add(output.key)
        self.tokens[output.index] += output.token_ids
        self.logprobs[output.index] += output.logprobs
        assert output.num_generated == len(self.tokens[output.index]), "a token came twice or is missing"
        if output.finish is not None:
            assert output.index not in self.finishes, "a sample finished twice"
            self.finishes[output.index] = output.finish
        self.usage = output.usage or self.usage
        self.timeline = output.timeline or self.timeline

    @property
    def over(self) -> bool:
        return self.error is not None or len(self.finishes) == self.num_expected

    async def until(self, condition: Callable[[Any], bool]) -> "Answer":
        while not condition(self):
            self.changed.clear()
            await self.changed.wait()
        return self

    async def end(self) -> "Answer":
        return await self.until(lambda answer: answer.over)


class Router:
    """The router's end of one session. `stays`: it does not end it when the worker leaves, as it should."""

    stays = False

    def __init__(self, stub: Any, router_id: str) -> None:
        self.router_id = router_id
        self.answers: dict[str, Answer] = {}
        self.reports: list[LoadReport] = []
        self.pongs: list[int] = []
        self.num_messages = 0
        self.ended = asyncio.Event()
        self.told_of_leaving = asyncio.Event()
        self.reported = asyncio.Event()
        self.info: WorkerInfo
        self._outbox: asyncio.Queue[worker_pb2.RouterMessage | None] = asyncio.Queue()
        self._call = stub.Session(self._messages())

    async def _messages(self) -> AsyncIterator[worker_pb2.RouterMessage]:
        yield worker_pb2.RouterMessage(
            hello=worker_pb2.RouterHello(router_id=self.router_id, protocol_version=PROTOCOL_VERSION)
        )
        while (message := await self._outbox.get()) is not None:
            yield message

    async def open(self) -> None:
        self.info = wire.worker_from_pb((await self._call.read()).hello)

    async def read(self) -> None:
        try:
            while (message := await self._call.read()) is not grpc.aio.EOF:
                self._hear(message)
        except grpc.aio.AioRpcError:
            pass
        finally:
            self.ended.set()
            for answer in self.answers.values():
                answer.changed.set()

    def _hear(self, message: worker_pb2.WorkerMessage) -> None:
        match message.WhichOneof("kind"):
            case "outputs":
                self.num_messages += 1
                for pb in message.outputs.outputs:
                    output = wire.output_from_pb(pb)
                    answer = self.answers[output.key.request_id]
                    answer.add(output)
                    answer.changed.set()
            case "rejected":
                answer = self.answers[message.rejected.key.request_id]
                assert answer.error is None, "rejected twice"
                answer.error = wire.error_from_pb(message.rejected.error)
                answer.keys.add(wire.key_from_pb(message.rejected.key))
                answer.changed.set()
            case "peer_lost":
                answer = self.answers[message.peer_lost.key.request_id]
                answer.lost.append(message.peer_lost)
                answer.changed.set()
            case "load":
                self.reports.append(wire.report_from_pb(message.load))
                self.reported.set()
            case "leaving":
                self.told_of_leaving.set()
                if not self.stays:
                    self.close()
            case "pong":
                self.pongs.append(message.pong.nonce)
                self.reported.set()

    def send(self, **kind: Any) -> None:
        self._outbox.put_nowait(worker_pb2.RouterMessage(**kind))

    def submit(self, request: Request) -> Answer:
        answer = self.answers[request.key.request_id] = Answer(num_expected=request.n)
        self.send(submit=wire.request_to_pb(request))
        return answer

    def cancel(self, request_id: str, attempt: int = 1) -> None:
        self.send(cancel=worker_pb2.Cancel(key=worker_pb2.RequestKey(request_id=request_id, attempt=attempt)))

    def stop_sample(self, request_id: str, index: int) -> None:
        key = worker_pb2.RequestKey(request_id=request_id, attempt=1)
        self.send(stop_sample=worker_pb2.StopSample(key=key, index=index))

    def place(self, key: RequestKey, target: PrefillTarget | None) -> None:
        self.send(
            place=worker_pb2.Place(key=wire.key_to_pb(key), prefill=wire.prefill_to_pb(target) if target else None)
        )

    async def ping(self) -> None:
        """Returns when the worker has taken all that was sent before."""
        nonce = len(self.pongs) + 1
        self.send(ping=worker_pb2.Ping(nonce=nonce))
        while nonce not in self.pongs:
            self.reported.clear()
            await self.reported.wait()

    async def report(self, condition: Callable[[Any], bool]) -> LoadReport:
        """The next report that meets the condition."""
        while True:
            self.reported.clear()
            await self.reported.wait()
            if self.reports and condition(self.reports[-1]):
                return self.reports[-1]

    def close(self) -> None:
        self._outbox.put_nowait(None)


@asynccontextmanager
async def open_session(address: str, router_id: str = "r0") -> AsyncIterator[Router]:
    async with grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        router = Router(worker_pb2_grpc.WorkerStub(channel), router_id)
        await router.open()
        reading = asyncio.create_task(router.read())
        try:
            yield router
        finally:
            reading.cancel()
            with suppress(asyncio.CancelledError):
                await reading
