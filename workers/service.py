"""A whole worker: one engine behind gRPC, its parts and their wiring (`workers.serve` runs it from start to drained)."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import grpc
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import CollectorRegistry

from headrace.blocks import BlockHasher, probe
from headrace.clock import Clock, SystemClock
from headrace.errors import Draining, HeadraceError
from headrace.otlp import open_spans
from headrace.store import Store, connect
from headrace.v1 import control_pb2, control_pb2_grpc, transfer_pb2, transfer_pb2_grpc, worker_pb2, worker_pb2_grpc
from headrace.values import BlockCounts, Compatibility, Load, LoadReport, RequestKey, Role, SequenceOutput, WorkerInfo
from workers.control import ControlServicer
from workers.engine import Engine
from workers.faults import Faults
from workers.gpu_figures import watch_gpus
from workers.handoff.messages import PeerHello
from workers.handoff.peers import Peers
from workers.handoff.puller import Puller
from workers.handoff.reads import Reads
from workers.handoff.tickets import Source
from workers.health import Health
from workers.identity import Identity
from workers.intake import Intake, RouterSession
from workers.meters import Meters
from workers.profiles import Profiles
from workers.publish import Publisher
from workers.ranges import ranges_of
from workers.ranks.executor import Executor
from workers.scheduling.blocks import BlockLedger
from workers.scheduling.scheduler import ChunkDone, Scheduler, SchedulerLimits
from workers.scheduling.work import GRAPH_TOKENS, StepWork
from workers.spans import Parts
from workers.spec import WorkerSpec
from workers.streams import TransferServicer, WorkerServicer
from workers.watched import Now

log = logging.getLogger(__name__)

ANSWER_SECONDS = 5.0
FLUSH_SECONDS = 1.0
PEER_SHARE = 0.75
MAX_MESSAGE_BYTES, MAX_TRACE_BYTES = 64 * 2**20, 2**30  # the latter: of a thousand steps, of all ranks
SERVER_OPTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_TRACE_BYTES),
)
CHANNEL_OPTIONS = (*SERVER_OPTIONS[1:], ("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0))
SERVICES = (
    worker_pb2.DESCRIPTOR.services_by_name["Worker"].full_name,
    transfer_pb2.DESCRIPTOR.services_by_name["Transfer"].full_name,
    control_pb2.DESCRIPTOR.services_by_name["Control"].full_name,
)


class Worker:
    """Owns the parts and their wiring; listens to the engine. `start`, then `run`, then `close`, each once."""

    def __init__(
        self,
        spec: WorkerSpec,
        executor: Executor,
        identity: Identity,
        *,
        clock: Clock | None = None,
        registry: CollectorRegistry | None = None,
    ) -> None:
        self._spec = spec
        self._executor = executor
        self._identity = identity
        self._role = spec.role
        clock = clock or SystemClock()
        handoff = spec.handoff
        faults = Faults()
        hooks = faults if spec.fault_hooks else None
        self._ledger = BlockLedger(executor.num_blocks, spec.engine.block_size)
        self._scheduler = _scheduler(spec, identity, self._ledger)
        self._probe = probe(_hasher(identity.compatibility, "", ""))
        parts = self._scheduler, executor, clock, ranges_of(spec.engine)
        graphs = GRAPH_TOKENS if spec.engine.device == "cuda" and spec.layout.pp == 1 else ()
        overlap = spec.engine.overlap
        self._engine = Engine(*parts, overlap=overlap, faults=faults, graph_tokens=graphs)
        self._engine.launch_late(on=spec.launches_late(spec.role))
        self._health = Health(self._engine, spec.worker_id, spec.engine.stall_seconds, SERVICES)
        self._meters = Meters(registry or CollectorRegistry())
        spans = open_spans(spec.otlp_endpoint, clock, "headrace-worker", spec.worker_id)
        self._parts = Parts(self._meters, spans, clock)
        self._hello = PeerHello(
            worker_id=spec.worker_id,
            generation=spec.generation,
            compatibility=identity.compatibility,
            layout=executor.layout,
            num_kv_heads=executor.shape.num_kv_heads,
            num_layers=executor.shape.num_layers,
            endpoints=executor.endpoints,
            node=spec.node,
        )
        self._peers = Peers(
            self._hello,
            executor,
            lambda address: grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS),
            silent_seconds=handoff.transfer_seconds,
            pin_seconds=handoff.pin_seconds,
            faults=faults,
            on_end=self._meters.link_ended,
        )
        bounds = handoff.transfer_seconds, spec.engine.stall_seconds
        reads = Reads(self._engine, *bounds, faults, on_read=self._meters.read)
        self._puller = Puller(self._engine, self._peers, reads, transfer_seconds=handoff.transfer_seconds)
        self._intake = Intake(
            self._engine,
            self._puller,
            worker_id=spec.worker_id,
            answer_seconds=min(ANSWER_SECONDS, handoff.transfer_seconds),
            on_failure=self._meters.handoff_failed,
            on_first_token=self._parts.first_token,
        )
        self._source = Source(self._engine, reads, self._parts.prefilled, digests=handoff.digests)
        self._sessions = WorkerServicer(self._engine, self._intake, self)
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        servicers: dict[Callable[..., None], object] = {
            worker_pb2_grpc.add_WorkerServicer_to_server: self._sessions,
            transfer_pb2_grpc.add_TransferServicer_to_server: TransferServicer(
                self._source, self._hello, executor.shape, faults, silent_seconds=handoff.transfer_seconds
            ),
            control_pb2_grpc.add_ControlServicer_to_server: ControlServicer(self, Profiles(executor), hooks),
            health_pb2_grpc.add_HealthServicer_to_server: self._health.servicer,
        }
        for add, servicer in servicers.items():
            add(servicer, self._server)
        reflection.enable_server_reflection((*SERVICES, reflection.SERVICE_NAME, health.SERVICE_NAME), self._server)
        self._store: Store | None = None
        self._publisher: Publisher | None = None
        self._address = ""

    # -- from start to end

    async def start(self) -> WorkerInfo:
        """Binds and serves. OSError when the address is taken."""
        port = self._server.add_insecure_port(f"{self._spec.host}:{self._spec.port}")
        self._address = f"{self._spec.host}:{port}"
        if self._spec.redis_url is not None:
            self._store = connect(self._spec.redis_url, self._spec.redis_budget_seconds)
            self._publisher = Publisher(
                self._store,
                self._spec.cluster,
                self.info,
                self._ledger,
                lease_seconds=self._spec.lease_seconds,
                draining=lambda: self._health.draining,
            )
        self._meters.watch(self._now)
        if self._spec.engine.device == "cuda":
            watch_gpus(self._meters.registry)
            if self._spec.gpu_hour_price is not None:
                self._meters.costs(self._spec.gpu_hour_price * self._executor.layout.world_size)
        await self._health.show()
        await self._server.start()
        return self.info()

    async def run(self) -> None:
        """Serves until cancelled. Raises, in an ExceptionGroup, what ended the engine or made Redis unusable."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._engine.run(self))
            tasks.create_task(self._puller.grant_claims())
            tasks.create_task(self._health.watch())
            if self._publisher is not None:
                tasks.create_task(self._publisher.run())

    async def drain(self, grace_seconds: float) -> int:
        """Refuses new work, lets what is here finish and what is pinned be pulled; how many were cut after the grace."""
        self._health.draining = self._intake.draining = self._source.draining = True
        await self._health.show()
        self._engine.changed()
        if self._publisher is not None:
            self._publisher.renew_soon()
        try:
            async with asyncio.timeout(grace_seconds):
                while self.num_requests:
                    await self._engine.next_change()
        except TimeoutError:
            log.warning(
                "%s: %d requests are cut after %g s", self._spec.worker_id, self._intake.num_live, grace_seconds
            )
        return self._intake.reject_all(Draining(f"{self._spec.worker_id} is draining and its grace is over"))

    async def close(self, error: HeadraceError | None = None) -> None:
        """Ends what is left, with `error` if there is one, and gives everything back."""
        if error is not None:
            self._health.failure = error.message
            self._meters.failed(error)
            self._intake.reject_all(error)
        self._sessions.take_leave()
        await self._peers.close()
        await self._server.stop(FLUSH_SECONDS)
        if self._publisher is not None and self._store is not None:
            await self._publisher.withdraw()
            await self._store.close()
        await self._parts.close()
        await asyncio.to_thread(self._executor.close)

    # -- what the engine says

    def on_step(self, work: StepWork, seconds: float) -> None:
        self._meters.step(work, seconds)
        if self._publisher is not None:
            self._publisher.changed()

    def on_outputs(self, outputs: list[SequenceOutput]) -> None:
        self._intake.outputs(outputs)

    def on_chunk(self, chunk: ChunkDone) -> None:
        self._source.chunk(chunk)
        self._meters.announced(len(chunk.blocks) * self._executor.block_bytes)

    def on_deadline(self, key: RequestKey) -> None:
        if not self._source.deadline(key):
            self._intake.deadline(key)

    def on_pin_ended(self, key: RequestKey) -> None:
        self._source.pin_ended(key)

    # -- what it says of itself

    def info(self) -> WorkerInfo:
        info = self._identity.info(self._spec, self._executor, self._address)
        return replace(info, role=self._role, cost=self._engine.cost, probe=self._probe)

    def load(self) -> Load:
        return self._scheduler.load()

    def report(self, session: RouterSession) -> LoadReport:
        """What routers place by: a worker that is not well gets no more than one that drains."""
        counts, reason = self.counts(), self.unhealthy_reason
        mine = (*self._intake.keys_of(session), *self._source.keys_of_router(session.router_id))
        return LoadReport(
            total=self.load(),
            yours=self._scheduler.load_of(mine),
            cost=self._engine.cost,
            role=self._role,
            free_blocks=counts.free + counts.cached,
            draining=self.draining or bool(reason),
            unhealthy_reason=reason,
        )

    def counts(self) -> BlockCounts:
        return self._scheduler.counts()

    def _now(self) -> Now:
        load = self.load()
        return Now(
            self._spec.worker_id,
            self._role,
            self._identity.compatibility.model,
            self.counts(),
            in_flight={
                "request": self._intake.num_live,
                "ticket": self._source.num_tickets,
                "waiting": load.num_waiting,
                "running": load.num_running,
                "handoff": self._intake.num_handoffs,
            },
            links=self._peers.by_state(),
            preemptions=self._scheduler.num_preemptions,
            backlog=load.waiting_prefill_tokens,
            breaker_open=self._store is not None and self._store.breaker_open,
            tasks=len(asyncio.all_tasks()),
        )

    @property
    def num_requests(self) -> int:
        """Requests and tickets that are not over."""
        return self._intake.num_live + self._source.num_tickets

    async def changed(self) -> None:
        """Returns after the next step, intake or ending."""
        await self._engine.next_change()

    @property
    def draining(self) -> bool:
        return self._health.draining

    @property
    def unhealthy_reason(self) -> str:
        return self._health.unhealthy_reason

    def keys(self) -> tuple[list[RequestKey], list[RequestKey]]:
        return self._intake.keys(), self._source.keys()

    @property
    def num_steps(self) -> int:
        return self._engine.num_steps

    @property
    def num_preemptions(self) -> int:
        return self._scheduler.num_preemptions

    @property
    def num_handoffs(self) -> tuple[int, int]:
        return self._puller.num_handoffs, self._source.num_handoffs

    def seconds_since_progress(self) -> float:
        return self._engine.seconds_since_progress()

    @property
    def peers(self) -> Peers:
        return self._peers

    # -- what it can be told

    def set_role(self, role: Role) -> Role:
        """From now on routers send it this kind of work; what is here is finished as it began."""
        before, self._role = self._role, role
        self._engine.launch_late(on=self._spec.launches_late(role))
        self._engine.changed()
        if self._publisher is not None:
            self._publisher.renew_soon()
        return before

    def reset_cache(self) -> int:
        dropped = self._scheduler.reset_cache()
        if self._publisher is not None:
            self._publisher.changed()
        return dropped

    def meet_faults(self) -> None:
        self._engine.act_out_faults()
        self._engine.changed()


def _scheduler(spec: WorkerSpec, identity: Identity, ledger: BlockLedger) -> Scheduler:
    engine, handoff = spec.engine, spec.handoff
    limits = SchedulerLimits(
        max_num_seqs=engine.max_num_seqs,
        max_step_tokens=engine.max_step_tokens,
        max_context_tokens=identity.max_context_tokens,
        max_waiting=engine.max_waiting,
        pin_seconds=handoff.pin_seconds,
        max_pinned_fraction=handoff.max_pinned_fraction,
        max_peer_pinned_fraction=PEER_SHARE * handoff.max_pinned_fraction,
        claim_fraction=handoff.claim_fraction,
        num_micro_batches=spec.num_micro_batches,
    )

    return Scheduler(
        limits,
        ledger,
        partial(_hasher, identity.compatibility),
        eos_token_ids=identity.eos_ids,
        vocab_size=identity.vocab_size,
    )


def _hasher(compatibility: Compatibility, adapter: str, cache_salt: str) -> BlockHasher:
    """What names this worker's blocks."""
    return BlockHasher(
        revision=compatibility.revision,
        kv_format=compatibility.kv_format,
        block_size=compatibility.block_size,
        adapter=adapter,
        cache_salt=cache_salt,
    )
