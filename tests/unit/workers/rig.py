"""Real workers over real gRPC in this process, on executors in memory."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import grpc
from prometheus_client import CollectorRegistry

from headrace.clock import Clock
from headrace.config import EngineConfig, HandoffConfig
from headrace.v1 import control_pb2, control_pb2_grpc
from headrace.values import (
    BlockCounts,
    Compatibility,
    PrefillTarget,
    Request,
    RequestKey,
    Role,
    SamplingParams,
    WorkerInfo,
)
from tests.session import Answer, Router, open_session
from tests.unit.workers.memory import VOCAB, MemoryExecutor
from workers.identity import Identity
from workers.service import Worker
from workers.spec import WorkerSpec

BLOCK_SIZE = 4
COMPATIBILITY = Compatibility("tiny", "r1", "t", "c", "float32", "float32", block_size=BLOCK_SIZE)
IDENTITY = Identity(COMPATIBILITY, vocab_size=VOCAB, max_context_tokens=256, eos_ids=())
ENGINE = EngineConfig(block_size=BLOCK_SIZE, max_num_seqs=8, max_step_tokens=8, max_waiting=64)
# A pin that nobody releases is one that a test finds: none waits for its end.
HANDOFF = HandoffConfig(pin_seconds=60.0, transfer_seconds=2.0, local_prefill_max_tokens=0)


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

    def router(self, router_id: str = "r0") -> AbstractAsyncContextManager[Router]:
        return open_session(self.info.address, router_id)

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
    clock: Clock | None = None,
    registry: CollectorRegistry | None = None,
    **spec: Any,
) -> AsyncIterator[Rig]:
    executor = executor or MemoryExecutor(num_blocks, engine.block_size)
    full = WorkerSpec(worker_id, 1, role, "tiny", engine=engine, handoff=handoff, fault_hooks=True)
    worker = Worker(replace(full, **spec), executor, identity, clock=clock, registry=registry)
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
