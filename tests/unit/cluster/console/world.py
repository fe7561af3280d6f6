"""A cluster as a console meets it: what controller and routers write into a real Redis, workers that answer Describe over
gRPC, and a router's edge over HTTP. What there is of them is set by hand."""

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import grpc
from starlette.routing import Mount

from cluster.console.plan_file import PlanFile
from cluster.console.start import rules_and_keys
from cluster.console.watcher import Watcher
from cluster.serving import serving
from cluster.state import ControlState, ObservedState, WorkerRecord
from headrace.clock import Clock, ManualClock
from headrace.config import ClusterConfig
from headrace.keys import Keys
from headrace.reports import RouterReport, encode_report
from headrace.store import Store, connect
from headrace.v1 import control_pb2_grpc
from headrace.values import BlockCounts, Load, RequestKey, Role, WorkerInfo
from router.edge.openai import OpenAi
from router.explanations import Explanation
from router.text.vocabulary import Text
from tests.null_worker import worker_info
from tests.unit.router.scripted import Scripted, make_edge
from workers.control import ControlServicer

HOST = "127.0.0.1"


@dataclass
class Described:
    """workers.control.Controlled, said by hand."""

    worker_id: str
    role: Role = Role.DECODE
    blocks: BlockCounts = field(default_factory=lambda: BlockCounts(free=60, cached=10, active=30))
    its_load: Load = field(default_factory=Load)
    num_handoffs: tuple[int, int] = (3, 4)
    unhealthy_reason: str = ""
    draining: bool = False
    num_steps: int = 1
    num_preemptions: int = 0
    peers: tuple[()] = ()
    num_asked: int = 0
    requests: tuple[str, ...] = ()

    def info(self) -> WorkerInfo:
        self.num_asked += 1
        return worker_info(self.worker_id, self.role)

    def counts(self) -> BlockCounts:
        return self.blocks

    def load(self) -> Load:
        return self.its_load

    def keys(self) -> tuple[list[RequestKey], list[RequestKey]]:
        return [RequestKey(name) for name in self.requests], []

    def seconds_since_progress(self) -> float:
        return 0.0


@asynccontextmanager
async def described(worker: Described) -> AsyncIterator[WorkerRecord]:
    """The worker at an address of its own."""
    server = grpc.aio.server()
    servicer = ControlServicer(worker, profiles=None, faults=None)  # type: ignore[arg-type]
    control_pb2_grpc.add_ControlServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port(f"{HOST}:0")
    await server.start()
    try:
        yield WorkerRecord(
            worker.worker_id, worker.role.value, 1, worker.role.value, "tp1·pp1", "ready", 1.0, f"{HOST}:{port}"
        )
    finally:
        await server.stop(None)


@asynccontextmanager
async def listed(
    text: Text, explanations: Mapping[str, Explanation], api_keys: Sequence[str] = ()
) -> AsyncIterator[str]:
    """A router's edge that remembers these requests, at an address."""
    core = Scripted(text, explanations=dict(explanations))
    edge = make_edge(text, core, clock=ManualClock(), api_keys=api_keys)
    async with serving([Mount("/", OpenAi(edge, 10_000, time.time).app())], HOST, 0, "test") as port:
        yield f"{HOST}:{port}"


@dataclass
class World:
    config: ClusterConfig
    url: str
    store: Store

    async def control(self, workers: Sequence[WorkerRecord], desired: Mapping[str, int], **observed: object) -> None:
        """What a controller that leads has seen."""
        state = ControlState(self.store, self.config.name)
        await state.lead("controller")
        await state.write_observed(replace(ObservedState("controller", tuple(workers), desired), **observed))  # type: ignore[arg-type]

    async def report(self, *reports: RouterReport) -> None:
        keys = Keys(self.config.name)
        for report in reports:
            name, value = keys.router(report.router_id), encode_report(report)
            await self.store.call(lambda redis, name=name, value=value: redis.set(name, value))  # type: ignore[misc]

    @asynccontextmanager
    async def watched(
        self, clock: Clock, url: str | None = None, plan: PlanFile | None = None
    ) -> AsyncIterator[Watcher]:
        """A watcher that looks when it is told to."""
        store = connect(url or self.url, 1.0)
        rules, _, key = rules_and_keys(self.config, ())
        watcher = Watcher.of(self.config, store, rules, clock, lambda: 1_700_000_000.0, key, plan)
        try:
            yield watcher
        finally:
            await watcher.close()
            await store.close()


@asynccontextmanager
async def world(config: ClusterConfig, url: str) -> AsyncIterator[World]:
    store = connect(url, 2.0)
    try:
        yield World(config, url, store)
    finally:
        await store.close()
