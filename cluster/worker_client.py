"""What the control plane asks of one worker, over its Control service: a look inside, another role."""

from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from cluster.lifecycle import Held
from headrace import wire
from headrace.costmodel import CostModel
from headrace.errors import InternalError, WorkerLost
from headrace.v1 import control_pb2, control_pb2_grpc
from headrace.values import BlockCounts, Load, Role
from workers.ranks.profiles import ProfiledStep, RankProfile

CALL_SECONDS = 2.0
TRACE_SECONDS = 120.0  # to begin, to end and to write a trace
MAX_MESSAGE_BYTES = 2**30  # a trace of a thousand steps
OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    (
        "grpc.max_reconnect_backoff_ms",
        2000,
    ),  # channels stay open: a worker that starts for minutes was not asked for two more
)


@dataclass(frozen=True, slots=True)
class LinkReport:
    """One peer, how its KV is reached, and why that way."""

    worker_id: str
    kind: str
    state: str
    reason: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """A worker's own words. `unhealthy_reason` is empty while it makes progress. `routers`: those of which it has a request
    that is not over. `num_requests`: those that it decodes, or will; not what it only prefills."""

    worker_id: str
    generation: int
    role: str
    model: str
    blocks: BlockCounts
    load: Load
    draining: bool
    num_steps: int
    num_preemptions: int
    num_handoffs_in: int
    num_handoffs_out: int
    unhealthy_reason: str = ""
    max_num_seqs: int = 0
    cost: CostModel = field(default_factory=CostModel)
    links: tuple[LinkReport, ...] = field(default=())
    routers: frozenset[str] = frozenset()
    num_requests: int = 0

    @property
    def held(self) -> Held:
        """Who only prefills has no requests of its own: prompts are over in less time than a drain is asked for."""
        blocks = self.blocks
        return Held(self.num_requests, self.max_num_seqs, blocks.active + blocks.pinned + blocks.cached)


class WorkerClient:
    """A channel to one worker. Every call raises WorkerLost when it is not answered in time, InternalError when it is
    answered with an error."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._channel = grpc.aio.insecure_channel(address, options=OPTIONS)
        self._control = control_pb2_grpc.ControlStub(self._channel)  # type: ignore[no-untyped-call]

    async def __aenter__(self) -> "WorkerClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._channel.close()

    async def describe(self) -> WorkerReport:
        pb = await self._call(self._control.Describe, control_pb2.DescribeRequest(), CALL_SECONDS)
        return WorkerReport(
            worker_id=pb.info.worker_id,
            generation=pb.info.generation,
            role=pb.info.role,
            model=pb.info.compatibility.model,
            blocks=wire.counts_from_pb(pb.blocks),
            load=wire.load_from_pb(pb.load),
            draining=pb.draining,
            num_steps=pb.num_steps,
            num_preemptions=pb.num_preemptions,
            num_handoffs_in=pb.num_handoffs_in,
            num_handoffs_out=pb.num_handoffs_out,
            unhealthy_reason=pb.unhealthy_reason,
            max_num_seqs=pb.info.capacity.max_num_seqs,
            cost=wire.cost_from_pb(pb.info.cost),
            links=tuple(
                LinkReport(link.worker_id, link.kind, link.state, link.reason, link.bytes) for link in pb.links
            ),
            # A request's name between processes begins with its router's; a check of its own is one like any other.
            routers=frozenset(
                key.request_id.rpartition(":")[0].removesuffix(":check") for key in (*pb.requests, *pb.tickets)
            ),
            num_requests=len(pb.requests),
        )

    async def set_role(self, role: Role) -> None:
        await self._call(self._control.SetRole, control_pb2.SetRoleRequest(role=role.value), CALL_SECONDS)

    async def drain(self, grace_seconds: float) -> int:
        """Has the worker refuse new work and finish what it has; how many requests were cut when the grace was over."""
        request = control_pb2.DrainRequest(grace_seconds=grace_seconds)
        answer = await self._call(self._control.Drain, request, grace_seconds + CALL_SECONDS)
        return int(answer.num_cut)

    async def profile(self, num_steps: int, seconds: float) -> tuple[RankProfile, ...]:
        """Of its next steps, so many or those within `seconds`; by rank."""
        request = control_pb2.ProfileRequest(num_steps=num_steps, seconds=seconds)
        answer = await self._call(self._control.Profile, request, seconds + TRACE_SECONDS)
        return tuple(
            RankProfile(
                found.rank,
                tuple(
                    ProfiledStep(
                        *(step.number, step.num_prefill_tokens, step.num_decode_tokens),
                        *(step.cpu_seconds, step.gpu_seconds, step.idle_seconds),
                    )
                    for step in found.steps
                ),
                found.trace,
            )
            for found in answer.ranks
        )

    async def _call(self, method: Any, request: Any, seconds: float) -> Any:
        try:
            return await method(request, timeout=seconds)
        except grpc.aio.AioRpcError as error:
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                raise WorkerLost(f"{self._address} did not answer: {error.details()}") from error
            raise InternalError(f"{self._address} answered {error.code().name}: {error.details()}") from error


async def described(address: str) -> WorkerReport | None:
    """What the worker at this address says of itself; None when it does not answer, or has none yet."""
    if not address:
        return None
    try:
        async with WorkerClient(address) as client:
            return await client.describe()
    except (WorkerLost, InternalError):
        return None
