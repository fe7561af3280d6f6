"""Real workers over real gRPC in this process, on executors in memory; and the router's end of a session."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import grpc

from headrace import wire
from headrace.config import EngineConfig, HandoffConfig
from headrace.errors import HeadraceError
from headrace.v1 import control_pb2, control_pb2_grpc, worker_pb2, worker_pb2_grpc
from headrace.values import (
    PROTOCOL_VERSION,
    BlockCounts,
    Compatibility,
    FinishReason,
    LoadReport,
    PrefillTarget,
    Request,
    RequestKey,
    Role,
    SamplingParams,
    SequenceOutput,
    Timeline,
    TokenLogprobs,
    Usage,
    WorkerInfo,
)
from tests.unit.workers.memory import VOCAB, MemoryExecutor
from workers.identity import Identity
from workers.service import Worker
from workers.spec import WorkerSpec

BLOCK_SIZE = 4
COMPATIBILITY = Compatibility("tiny", "r1", "t", "c", "float32", "float32", block_size=BLOCK_SIZE)
IDENTITY = Identity(COMPATIBILITY, vocab_size=VOCAB, max_context_tokens=256, eos_ids=())
ENGINE = EngineConfig(block_size=BLOCK_SIZE, max_num_seqs=8, max_step_tokens=8, max_waiting=64)
HANDOFF = HandoffConfig(pin_seconds=1.0, transfer_seconds=2.0, local_prefill_max_tokens=0)


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

    async def until(self, condition: Any) -> "Answer":
        while not condition(self):
            self.changed.clear()
            await self.changed.wait()
        return self

    async def end(self) -> "Answer":
        return await self.until(lambda answer: answer.over)


class Router:
    """The router's end of one session. `others` keeps what belongs to no request, the newest last."""

    def __init__(self, stub: Any, router_id: str) -> None:
        self.router_id = router_id
        self.answers: dict[str, Answer] = {}
        self.reports: list[LoadReport] = []
        self.pongs: list[int] = []
        self.num_messages = 0
        self.ended = asyncio.Event()
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

    def place(self, key: RequestKey, target: PrefillTarget | None) -> None:
        self.send(
            place=worker_pb2.Place(key=wire.key_to_pb(key), prefill=wire.prefill_to_pb(target) if target else None)
        )

    async def report(self, condition: Any) -> LoadReport:
        """The next report that meets the condition."""
        while True:
            self.reported.clear()
            await self.reported.wait()
            if self.reports and condition(self.reports[-1]):
                return self.reports[-1]

    def close(self) -> None:
        self._outbox.put_nowait(None)


@dataclass
class Rig:
    """A running worker, its executor and a way to its Control service."""

    worker: Worker
    executor: MemoryExecutor
    info: WorkerInfo
    running: asyncio.Task[None]
    channel: grpc.aio.Channel

    @property
    def target(self) -> PrefillTarget:
        return PrefillTarget(self.info.worker_id, self.info.generation, self.info.address)

    @property
    def control(self) -> Any:
        return control_pb2_grpc.ControlStub(self.channel)

    @property
    def counts(self) -> BlockCounts:
        return self.worker.counts()

    @asynccontextmanager
    async def router(self, router_id: str = "r0") -> AsyncIterator[Router]:
        async with grpc.aio.insecure_channel(
            self.info.address, options=[("grpc.use_local_subchannel_pool", 1)]
        ) as channel:
            router = Router(worker_pb2_grpc.WorkerStub(channel), router_id)
            await router.open()
            reading = asyncio.create_task(router.read())
            try:
                yield router
            finally:
                reading.cancel()
                with suppress(asyncio.CancelledError):
                    await reading

    async def idle(self) -> None:
        """Returns when nothing is held here any more: no request, no pin, no quarantine."""
        while True:
            counts = self.counts
            if counts.free + counts.cached == counts.total and not self.worker.num_requests:
                return
            await self.worker.changed()

    async def faults(self, *faults: control_pb2.Fault) -> int:
        reply = await self.control.Faults(control_pb2.FaultsRequest(faults=faults))
        return int(reply.num_active)


@asynccontextmanager
async def a_worker(
    worker_id: str = "w0",
    *,
    role: Role = Role.UNIFIED,
    num_blocks: int = 64,
    engine: EngineConfig = ENGINE,
    handoff: HandoffConfig = HANDOFF,
    identity: Identity = IDENTITY,
    executor: MemoryExecutor | None = None,
    stall_seconds: float = 30.0,
    **spec: Any,
) -> AsyncIterator[Rig]:
    executor = executor or MemoryExecutor(num_blocks, engine.block_size)
    full = WorkerSpec(worker_id, 1, role, "tiny", engine=engine, handoff=handoff, fault_hooks=True)
    worker = Worker(replace(full, **spec), executor, identity, stall_seconds=stall_seconds)
    info = await worker.start()
    running = asyncio.create_task(worker.run())
    async with grpc.aio.insecure_channel(info.address) as channel:
        rig = Rig(worker, executor, info, running, channel)
        try:
            yield rig
        finally:
            executor.go_steps.set()
            executor.go_pulls.set()
            running.cancel()
            with suppress(asyncio.CancelledError, BaseExceptionGroup):
                await running
            await worker.close()


@asynccontextmanager
async def a_pair(**options: Any) -> AsyncIterator[tuple[Rig, Rig]]:
    """One prefill and one decode worker. Options with `prefill_` or `decode_` before their name are for that one."""
    sides: list[dict[str, Any]] = []
    for side in ("prefill_", "decode_"):
        other = "decode_" if side == "prefill_" else "prefill_"
        sides.append({k.removeprefix(side): v for k, v in options.items() if not k.startswith(other)})
    async with (
        a_worker("p0", role=Role.PREFILL, **sides[0]) as prefill,
        a_worker("d0", role=Role.DECODE, **sides[1]) as decode,
    ):
        yield prefill, decode


def prompt(length: int, seed: int = 1) -> tuple[int, ...]:
    return tuple((seed * 7919 + i * 31) % VOCAB for i in range(length))


def a_request(
    request_id: str = "q",
    *,
    length: int = 10,
    seed: int = 1,
    max_tokens: int = 6,
    prefill: PrefillTarget | None = None,
    n: int = 1,
    seconds_left: float | None = None,
    **sampling: Any,
) -> Request:
    return Request(
        RequestKey(request_id),
        prompt(length, seed),
        SamplingParams(**{"max_tokens": max_tokens, "temperature": 0.0, **sampling}),
        n=n,
        prefill=prefill,
        seconds_left=seconds_left,
    )


async def answer_alone(request: Request, **options: Any) -> Answer:
    """What an aggregated worker of its own answers: the oracle."""
    async with a_worker("alone", **options) as rig, rig.router() as router:
        return await router.submit(replace(request, prefill=None)).end()
