"""What an operator asks of a worker: who it is, another role, a profile, a fault."""

import asyncio
from dataclasses import replace

import grpc
import pytest
from redis.asyncio import Redis

from cluster.worker_client import WorkerClient
from headrace import wire
from headrace.errors import (
    InvalidRequest,
)
from headrace.keys import Keys
from headrace.v1 import control_pb2
from headrace.values import RequestKey, Role
from tests.unit.workers.rig import ENGINE, a_request, a_worker
from workers.ranks.profiles import RankProfile


async def test_describe_says_what_the_worker_is() -> None:
    async with a_worker() as rig, rig.router() as router:
        await router.submit(a_request()).end()
        await rig.idle()
        described = await rig.control.Describe(control_pb2.DescribeRequest())
        assert wire.worker_from_pb(described.info).worker_id == "w0"
        assert described.num_steps > 0
        assert wire.counts_from_pb(described.blocks) == rig.counts
        assert described.unhealthy_reason == ""


async def test_the_role_changes_at_run_time() -> None:
    async with a_worker(role=Role.PREFILL) as rig, rig.router() as router:
        reply = await rig.control.SetRole(control_pb2.SetRoleRequest(role="decode"))
        assert reply.previous == "prefill"
        await router.report(lambda report: report.role is Role.DECODE)
        with pytest.raises(grpc.aio.AioRpcError, match="role must be one of") as caught:
            await rig.control.SetRole(control_pb2.SetRoleRequest(role="cook"))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_gpus_worker_launches_late_while_it_is_in_a_decode_pool_unless_asked() -> None:
    for asked, expected in ((None, [False, True, False]), (True, [True] * 3), (False, [False] * 3)):
        engine = ENGINE.model_copy(update={"device": "cuda", "late_launch": asked})
        async with a_worker(engine=engine) as rig:
            late = []
            for role in (Role.UNIFIED, Role.DECODE, Role.PREFILL):
                rig.worker.set_role(role)
                late.append(rig.worker._engine.pacing is not None)
            assert late == expected


async def test_case_30_a_cache_reset_forgets_prefixes() -> None:
    async with a_worker() as rig, rig.router() as router:
        await router.submit(a_request("first", length=17)).end()
        again = await router.submit(a_request("again", length=17)).end()
        assert again.usage is not None
        assert again.usage.cached_tokens == 16
        await rig.idle()
        reply = await rig.control.CacheReset(control_pb2.CacheResetRequest())
        assert reply.num_blocks > 0
        assert rig.counts.cached == 0
        cold = await router.submit(a_request("cold", length=17)).end()
        assert cold.usage is not None
        assert cold.usage.cached_tokens == 0


async def test_one_profile_is_taken_at_a_time_and_ends_in_time() -> None:
    async with a_worker() as rig:
        request = control_pb2.ProfileRequest(num_steps=10, seconds=0.01)
        first = asyncio.ensure_future(rig.control.Profile(request))
        second = asyncio.ensure_future(rig.control.Profile(request))
        done = await asyncio.gather(first, second, return_exceptions=True)
        (error,) = [each for each in done if isinstance(each, grpc.aio.AioRpcError)]
        assert error.code() == grpc.StatusCode.UNAVAILABLE
        assert [found.rank for found in (await rig.control.Profile(request)).ranks] == [0]
        for wrong in ({"num_steps": 0, "seconds": 1.0}, {"num_steps": 1, "seconds": 0.0}):
            with pytest.raises(grpc.aio.AioRpcError, match="must be"):
                await rig.control.Profile(control_pb2.ProfileRequest(**wrong))


async def test_a_long_trace_of_many_ranks_is_sent() -> None:
    trace = bytes(65 * 2**20)
    async with a_worker() as rig, WorkerClient(rig.target.address) as client:
        asked = asyncio.ensure_future(client.profile(1000, 60.0))
        await rig.executor.asked_to_profile.wait()
        rig.executor.profiling.set_result((RankProfile(0, (), trace),))
        (found,) = await asked
        assert found.trace == trace


async def test_a_profile_whose_asker_leaves_ends_on_the_ranks() -> None:
    async with a_worker() as rig:
        asked = asyncio.ensure_future(rig.control.Profile(control_pb2.ProfileRequest(num_steps=1000, seconds=60.0)))
        await rig.executor.asked_to_profile.wait()
        asked.cancel()
        async with asyncio.timeout(10):
            await asyncio.wrap_future(rig.executor.profiling)
        assert (await rig.control.Profile(control_pb2.ProfileRequest(num_steps=1, seconds=0.01))).ranks


async def test_faults_need_fault_hooks() -> None:
    async with a_worker(fault_hooks=False) as rig:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rig.faults()
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    async with a_worker() as rig:
        assert await rig.faults(control_pb2.Fault(point="step", action="delay")) == 1
        with pytest.raises(grpc.aio.AioRpcError, match="point must be one of"):
            await rig.faults(control_pb2.Fault(point="nowhere", action="delay"))


async def test_a_pool_that_shrinks_is_that_small_until_the_fault_is_cleared() -> None:
    async with a_worker() as rig, rig.router() as router:
        asked = a_request("big", length=60, max_tokens=20)
        whole = await router.submit(asked).end()
        await rig.idle()
        await rig.faults(control_pb2.Fault(point="pool", action="shrink", at=8))
        assert rig.counts.total == 8
        refused = await router.submit(replace(asked, key=RequestKey("refused"))).end()
        assert isinstance(refused.error, InvalidRequest)
        assert refused.error.numbers["limit"] == "8"
        await rig.faults()
        assert rig.counts.total == 64
        again = await router.submit(replace(asked, key=RequestKey("again"))).end()
        assert again.tokens == whole.tokens


async def test_a_sequence_is_preempted_as_often_as_the_fault_says() -> None:
    async with a_worker() as rig, rig.router() as router:
        asked = a_request("q", length=13, max_tokens=14)
        plain = await router.submit(asked).end()
        await rig.faults(control_pb2.Fault(point="sequence", action="preempt", at=20, times=3))
        answer = await router.submit(replace(asked, key=RequestKey("pressed"))).end()
        assert answer.tokens == plain.tokens
        assert answer.timeline is not None
        assert answer.timeline.num_preemptions == 3


@pytest.mark.redis
async def test_case_60_a_worker_that_drains_says_so_in_its_lease_at_once(redis_url: str) -> None:
    """Who scales by leases would count on it otherwise, for as long as its drain takes."""
    async with (
        a_worker(redis_url=redis_url, cluster="drains", lease_seconds=600.0) as rig,
        rig.router() as router,
        Redis.from_url(redis_url) as redis,
        asyncio.timeout(20),
    ):
        lease = Keys("drains").lease("w0")
        rig.executor.go_steps.clear()
        answer = router.submit(a_request())
        while await redis.hget(lease, "draining") != b"0":
            await router.ping()
        drain = asyncio.ensure_future(rig.control.Drain(control_pb2.DrainRequest(grace_seconds=30)))
        while await redis.hget(lease, "draining") != b"1":
            await router.ping()
        rig.executor.go_steps.set()
        assert (await answer.end()).error is None
        assert (await drain).drained
