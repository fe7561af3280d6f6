"""What operators and the controller ask of one worker, and errors as gRPC statuses."""

from dataclasses import asdict
from typing import NoReturn, Protocol

import grpc

from headrace import wire
from headrace.errors import HeadraceError, InvalidRequest, meaning
from headrace.v1 import control_pb2, control_pb2_grpc
from headrace.values import BlockCounts, Load, RequestKey, Role, WorkerInfo
from workers.faults import Fault, Faults
from workers.handoff.peers import Peers
from workers.profiles import Profiles
from workers.ranks.profiles import MOST_STEPS

MOST_SECONDS = 600


class Controlled(Protocol):
    """The worker, as its operators see it."""

    def info(self) -> WorkerInfo: ...

    def counts(self) -> BlockCounts: ...

    def load(self) -> Load: ...

    @property
    def draining(self) -> bool: ...

    @property
    def unhealthy_reason(self) -> str: ...

    def keys(self) -> tuple[list[RequestKey], list[RequestKey]]:
        """What is here and not over: requests, and tickets."""
        ...

    @property
    def num_steps(self) -> int: ...

    @property
    def num_preemptions(self) -> int: ...

    @property
    def num_handoffs(self) -> tuple[int, int]:
        """(in, out)."""
        ...

    def seconds_since_progress(self) -> float: ...

    @property
    def peers(self) -> Peers: ...

    def set_role(self, role: Role) -> Role:
        """Returns the role before."""
        ...

    async def drain(self, grace_seconds: float) -> int:
        """Returns how many requests were cut when the grace was over."""
        ...

    def reset_cache(self) -> int: ...

    def meet_faults(self) -> None:
        """Other faults are in force from now on."""


class ControlServicer(control_pb2_grpc.ControlServicer):
    """Control. `faults` None: the worker was started without fault hooks."""

    def __init__(self, worker: Controlled, profiles: Profiles, faults: Faults | None) -> None:
        self._worker = worker
        self._profiles = profiles
        self._faults = faults

    async def Describe(
        self, request: control_pb2.DescribeRequest, context: grpc.aio.ServicerContext
    ) -> control_pb2.DescribeResponse:
        worker = self._worker
        num_in, num_out = worker.num_handoffs
        requests, tickets = worker.keys()
        return control_pb2.DescribeResponse(
            info=wire.worker_to_pb(worker.info()),
            blocks=wire.counts_to_pb(worker.counts()),
            load=wire.load_to_pb(worker.load()),
            draining=worker.draining,
            links=[
                control_pb2.PeerLink(
                    worker_id=link.target.worker_id,
                    generation=link.target.generation,
                    kind=link.kind,
                    reason=link.reason,
                    state="open" if link.kind else "opening",
                    bytes=link.num_bytes,
                )
                for link in worker.peers
            ],
            num_steps=worker.num_steps,
            num_preemptions=worker.num_preemptions,
            num_handoffs_in=num_in,
            num_handoffs_out=num_out,
            seconds_since_progress=worker.seconds_since_progress(),
            unhealthy_reason=worker.unhealthy_reason,
            requests=map(wire.key_to_pb, requests),
            tickets=map(wire.key_to_pb, tickets),
        )

    async def SetRole(
        self, request: control_pb2.SetRoleRequest, context: grpc.aio.ServicerContext
    ) -> control_pb2.SetRoleResponse:
        if request.role not in list(Role):
            await refuse(context, InvalidRequest.out_of_range("role", request.role, f"one of {', '.join(Role)}"))
        return control_pb2.SetRoleResponse(previous=self._worker.set_role(Role(request.role)))

    async def Drain(
        self, request: control_pb2.DrainRequest, context: grpc.aio.ServicerContext
    ) -> control_pb2.DrainResponse:
        if not 0 <= request.grace_seconds <= 86400:
            await refuse(
                context, InvalidRequest.out_of_range("grace_seconds", request.grace_seconds, "from 0 to 86400")
            )
        num_cut = await self._worker.drain(request.grace_seconds)
        return control_pb2.DrainResponse(drained=not num_cut, num_cut=num_cut)

    async def CacheReset(
        self, request: control_pb2.CacheResetRequest, context: grpc.aio.ServicerContext
    ) -> control_pb2.CacheResetResponse:
        return control_pb2.CacheResetResponse(num_blocks=self._worker.reset_cache())

    async def Profile(
        self, request: control_pb2.ProfileRequest, context: grpc.aio.ServicerContext
    ) -> control_pb2.ProfileResponse:
        if not 1 <= request.num_steps <= MOST_STEPS:
            error = InvalidRequest.out_of_range("num_steps", request.num_steps, f"from 1 to {MOST_STEPS}")
            await refuse(context, error)
        if not 0 < request.seconds <= MOST_SECONDS:
            error = InvalidRequest.out_of_range("seconds", request.seconds, f"above 0 and at most {MOST_SECONDS}")
            await refuse(context, error)
        try:
            ranks = await self._profiles.take(request.num_steps, request.seconds)
        except HeadraceError as error:
            await refuse(context, error)
        return control_pb2.ProfileResponse(
            ranks=[
                control_pb2.RankProfile(
                    rank=found.rank,
                    trace=found.trace,
                    steps=[control_pb2.ProfiledStep(**asdict(step)) for step in found.steps],
                )
                for found in ranks
            ]
        )

    async def Faults(
        self, request: control_pb2.FaultsRequest, context: grpc.aio.ServicerContext
    ) -> control_pb2.FaultsResponse:
        if self._faults is None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this worker was started without fault hooks")
            raise AssertionError("abort does not return")
        try:
            faults = [Fault(f.point, f.action, f.at, f.seconds, f.times) for f in request.faults]
        except HeadraceError as error:
            await refuse(context, error)
        num_active = self._faults.replace(faults)
        self._worker.meet_faults()
        return control_pb2.FaultsResponse(num_active=num_active)


async def refuse(context: grpc.aio.ServicerContext, error: HeadraceError) -> NoReturn:
    """Ends the call with the error's status."""
    await context.abort(getattr(grpc.StatusCode, meaning(error).grpc_code), error.message)
    raise AssertionError("abort does not return")
