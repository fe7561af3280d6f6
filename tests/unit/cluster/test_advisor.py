"""The controller of workers that others start: what it sees of them, whose role it changes, and that this is all."""

import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace

import grpc
import pytest

from cluster.advisor import Advisor, Elsewhere
from cluster.autoscaler import Autoscaler
from cluster.keeper import scrape_targets
from cluster.lifecycle import Desired, DesiredPool
from cluster.scaling_state import ScalingState
from cluster.state import ControlState
from headrace import wire
from headrace.clock import ManualClock
from headrace.config_file import parse
from headrace.costmodel import CostModel
from headrace.keys import Keys
from headrace.leases import lease_fields
from headrace.reports import RouterReport, encode_report
from headrace.store import Store, connect
from headrace.v1 import control_pb2, control_pb2_grpc
from headrace.values import Role, WorkerInfo
from tests.null_worker import worker_info

pytestmark = pytest.mark.redis

COST = CostModel(1e-3, 2e-5, 5e-10, 5e-3, 1e-5, 3e-8)
PREFIX = "hr-headrace-"
CONFIG = parse(
    """
model: m
service_classes: {chat: {ttft_seconds: 2.0, tpot_seconds: 0.05}}
autoscaling: {mode: external, service_class: chat, interval_seconds: 10, hold_seconds: 60}
pools:
  prefill: {role: prefill, replicas: 3, min_replicas: 1, max_replicas: 8}
  decode: {role: decode, replicas: 1, min_replicas: 1, max_replicas: 8}
"""
)


class Controlled(control_pb2_grpc.ControlServicer):
    """A worker's Control service without an engine: it says who it is, and serves the role that it is told."""

    def __init__(self, info: WorkerInfo) -> None:
        self.info = info
        self.draining = False
        self.num_cached = 0

    async def Describe(
        self, request: control_pb2.DescribeRequest, context: grpc.aio.ServicerContext
    ) -> control_pb2.DescribeResponse:
        return control_pb2.DescribeResponse(
            info=wire.worker_to_pb(self.info),
            draining=self.draining,
            blocks=control_pb2.BlockCounts(cached=self.num_cached),
        )

    async def SetRole(
        self, request: control_pb2.SetRoleRequest, context: grpc.aio.ServicerContext
    ) -> control_pb2.SetRoleResponse:
        before, self.info = self.info.role, replace(self.info, role=Role(request.role))
        return control_pb2.SetRoleResponse(previous=before)


class Stage:
    """Workers that answer, leases and a router's words in a real Valkey, and an advisor whose rounds a test calls."""

    def __init__(self, store: Store, clock: ManualClock, servers: AsyncExitStack) -> None:
        self.config = CONFIG.model_copy(update={"name": f"advise-{uuid.uuid4().hex[:8]}"})
        self.store, self.clock, self._servers = store, clock, servers
        self.keys, self.state = Keys(self.config.name), ControlState(store, self.config.name)
        self.workers: dict[str, Controlled] = {}
        self.servers: dict[str, grpc.aio.Server] = {}
        self.arrivals = 0
        self.advisor = self.another()

    def another(self) -> Advisor:
        scaler = Autoscaler(self.config, self.store, self.clock, PREFIX)
        scaler._store.time = self._time  # type: ignore[method-assign]
        return Advisor(self.config, self.state, self.clock, scaler, Elsewhere(PREFIX, {"prefill": 7001}))

    async def _time(self) -> float:
        return 1e9 + self.clock.now()

    async def worker(self, name: str, role: Role) -> Controlled:
        server = grpc.aio.server()
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        its = Controlled(worker_info(PREFIX + name, role, address=address, cost=COST))
        control_pb2_grpc.add_ControlServicer_to_server(its, server)
        await server.start()
        self._servers.push_async_callback(server.stop, None)
        self.servers[name] = server
        self.workers[name] = its
        await self.lease(name)
        return its

    async def lease(self, name: str) -> None:
        info = self.workers[name].info
        fields = lease_fields(info)
        await self.store.call(lambda redis: redis.hset(self.keys.lease(info.worker_id), mapping=fields))

    async def report(self, *, requests: int, input_tokens: int, output_tokens: int, seconds: float) -> None:
        self.arrivals += requests
        number = self.arrivals
        report = RouterReport(
            *("r", "", seconds, number, number * input_tokens, number * output_tokens, number * input_tokens, 0),
            *(number * output_tokens, number),
        )
        await self.store.call(lambda redis: redis.set(self.keys.router("r"), encode_report(report)))

    async def rounds(self, number: int, *, requests: int, input_tokens: int, output_tokens: int) -> None:
        for _ in range(number):
            self.clock.advance(10.0)
            await self.report(
                requests=requests, input_tokens=input_tokens, output_tokens=output_tokens, seconds=self.clock.now()
            )
            await self.advisor.round()

    def roles(self) -> dict[str, str]:
        return {name: worker.info.role.value for name, worker in self.workers.items()}


@pytest.fixture
async def stage(redis_url: str, clock: ManualClock) -> AsyncIterator[Stage]:
    store = connect(redis_url, 2.0)
    async with AsyncExitStack() as servers:
        stage = Stage(store, clock, servers)
        for name, role in (("prefill-0", Role.PREFILL), ("prefill-1", Role.PREFILL), ("decode-0", Role.DECODE)):
            await stage.worker(name, role)
        yield stage
        await stage.advisor.close()
    await store.close()


def lent(desired: Desired | None) -> dict[str, tuple[int, int]]:
    assert desired is not None
    return {name: (pool.replicas, pool.lent) for name, pool in desired.pools.items()}


async def test_what_is_there_is_what_is_desired_whatever_the_configuration_says(stage: Stage) -> None:
    await stage.advisor.round()
    assert lent(await stage.state.desired()) == {"prefill": (2, 0), "decode": (1, 0)}
    observed = await stage.state.observed()
    assert observed is not None
    assert [(its.worker_id, its.pool, its.phase) for its in observed.workers] == [
        ("hr-headrace-decode-0", "decode", "ready"),
        ("hr-headrace-prefill-0", "prefill", "ready"),
        ("hr-headrace-prefill-1", "prefill", "ready"),
    ]
    await stage.worker("prefill-2", Role.PREFILL)
    await stage.advisor.round()
    assert lent(await stage.state.desired()) == {"prefill": (3, 0), "decode": (1, 0)}


async def test_a_role_is_lent_through_the_workers_own_service_and_comes_back(stage: Stage) -> None:
    await stage.state.write_desired(
        Desired({"prefill": DesiredPool(Role.PREFILL, 2, lent=1), "decode": DesiredPool(Role.DECODE, 1)})
    )
    await stage.advisor.round()
    assert stage.roles() == {"prefill-0": "prefill", "prefill-1": "decode", "decode-0": "decode"}
    await stage.state.write_desired(
        Desired({"prefill": DesiredPool(Role.PREFILL, 2), "decode": DesiredPool(Role.DECODE, 1)})
    )
    await stage.advisor.round()
    assert stage.roles() == {"prefill-0": "prefill", "prefill-1": "prefill", "decode-0": "decode"}


async def test_who_is_lent_has_the_least_to_lose_whatever_its_index(stage: Stage) -> None:
    stage.workers["prefill-1"].num_cached = 100
    await stage.state.write_desired(
        Desired({"prefill": DesiredPool(Role.PREFILL, 2, lent=1), "decode": DesiredPool(Role.DECODE, 1)})
    )
    await stage.advisor.round()
    assert stage.roles() == {"prefill-0": "decode", "prefill-1": "prefill", "decode-0": "decode"}


async def test_load_that_shifts_to_decode_flips_a_role_and_advises_more_but_sets_no_size(stage: Stage) -> None:
    await stage.rounds(8, requests=20, input_tokens=500, output_tokens=10)
    assert stage.roles()["prefill-1"] == "prefill"
    await stage.rounds(8, requests=400, input_tokens=50, output_tokens=1000)
    assert stage.roles() == {"prefill-0": "prefill", "prefill-1": "decode", "decode-0": "decode"}
    recorded = await ScalingState(stage.store, stage.config.name).now()
    assert recorded is not None
    decision = recorded.decision
    assert (decision.pools["prefill"].replicas, decision.pools["decode"].replicas) == (2, 1), "nobody's size is set"
    assert decision.advised["decode"].replicas > 1, decision.reason
    flip = [
        one for one in await ScalingState(stage.store, stage.config.name).decisions() if "flip" in one.decision.kind
    ]
    assert flip
    assert "prefill: a worker is lent to decode" in flip[0].decision.reason


async def test_case_56_a_lent_worker_is_measured_in_the_role_that_it_serves(stage: Stage) -> None:
    await stage.state.write_desired(
        Desired({"prefill": DesiredPool(Role.PREFILL, 2, lent=1), "decode": DesiredPool(Role.DECODE, 1)})
    )
    await stage.advisor.round()
    observed = await stage.state.observed()
    assert observed is not None
    assert scrape_targets(observed) == [
        {"targets": ["127.0.0.1:7001"], "labels": {"worker": f"{PREFIX}{name}", "pool": "prefill", "role": role}}
        for name, role in (("prefill-0", "prefill"), ("prefill-1", "decode"))
    ], "of the other pool nobody said where"


async def test_a_flushed_redis_forgets_no_worker_and_flips_nobody_back(stage: Stage) -> None:
    await stage.state.write_desired(
        Desired({"prefill": DesiredPool(Role.PREFILL, 2, lent=1), "decode": DesiredPool(Role.DECODE, 1)})
    )
    await stage.advisor.round()
    gone = [stage.keys.desired, *(stage.keys.lease(its.info.worker_id) for its in stage.workers.values())]
    await stage.store.call(lambda redis: redis.delete(*gone))
    await stage.advisor.round()
    assert stage.roles()["prefill-1"] == "decode"
    assert lent(await stage.state.desired()) == {"prefill": (2, 1), "decode": (1, 0)}


async def test_who_neither_answers_nor_holds_a_lease_is_gone(stage: Stage) -> None:
    await stage.advisor.round()
    await stage.servers["prefill-1"].stop(None)
    await stage.advisor.round()
    assert lent(await stage.state.desired())["prefill"] == (2, 0), "its lease stands"
    await stage.store.call(lambda redis: redis.delete(stage.keys.lease(f"{PREFIX}prefill-1")))
    await stage.advisor.round()
    assert lent(await stage.state.desired())["prefill"] == (1, 0)


async def test_the_last_worker_of_a_pool_is_not_lent_in_the_place_of_one_whose_pod_ended(stage: Stage) -> None:
    await stage.state.write_desired(
        Desired({"prefill": DesiredPool(Role.PREFILL, 2, lent=1), "decode": DesiredPool(Role.DECODE, 1)})
    )
    await stage.advisor.round()
    assert stage.roles()["prefill-1"] == "decode"
    await stage.servers["prefill-1"].stop(None)
    await stage.store.call(lambda redis: redis.delete(stage.keys.lease(f"{PREFIX}prefill-1")))
    await stage.advisor.round()
    assert stage.roles()["prefill-0"] == "prefill"
    assert lent(await stage.state.desired())["prefill"] == (1, 0)


async def test_a_new_advisor_takes_lent_workers_as_they_are(stage: Stage) -> None:
    stage.workers["prefill-1"].info = replace(stage.workers["prefill-1"].info, role=Role.DECODE)
    await stage.advisor.round()
    assert stage.roles()["prefill-1"] == "decode"
    assert lent(await stage.state.desired()) == {"prefill": (2, 1), "decode": (1, 0)}


async def test_who_drains_is_flipped_no_more_and_counts_as_leaving(stage: Stage) -> None:
    stage.workers["prefill-1"].draining = True
    await stage.advisor.round()
    observed = await stage.state.observed()
    assert observed is not None
    assert {its.worker_id: its.phase for its in observed.workers}["hr-headrace-prefill-1"] == "draining"
    assert lent(await stage.state.desired())["prefill"] == (1, 0)


async def test_a_worker_of_no_pool_by_its_name_is_left_alone(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    await stage.worker("fast-decode-0", Role.PREFILL)
    await stage.advisor.round()
    await stage.advisor.round()
    assert lent(await stage.state.desired())["decode"] == (1, 0)
    assert stage.roles()["fast-decode-0"] == "prefill"
    assert [record.message for record in caplog.records if "fast-decode-0" in record.message] == [
        "of no pool by their names (hr-headrace-POOL-INDEX), so no part of any decision: hr-headrace-fast-decode-0"
    ]


async def test_one_of_two_leads(stage: Stage) -> None:
    other = stage.another()
    await stage.advisor.round()
    before = await stage.state.observed()
    await other.round()
    assert before is not None
    assert (await stage.state.observed()) == before
