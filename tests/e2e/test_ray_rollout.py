"""A pool that is replaced with one worker beside the old one, on a real Ray under load."""

import asyncio
import pathlib

import pytest
import ray
from ray.util.placement_group import placement_group, remove_placement_group

from cluster.launch import running
from cluster.lifecycle import Desired, DesiredPool
from cluster.session import SessionFolder
from cluster.snapshot import Snapshot
from cluster.state import ControlState
from headrace.config import (
    AutoscalingConfig,
    ClusterConfig,
    EngineConfig,
    PoolConfig,
    RayConfig,
    RedisConfig,
    RolloutsConfig,
    RouterConfig,
)
from headrace.store import connect
from headrace.values import ParallelLayout, Role
from tests.e2e.test_ray import Load, under, until
from tests.tiny import make_checkpoint

pytestmark = [pytest.mark.ray, pytest.mark.torch, pytest.mark.timeout(300)]


def phases(snapshot: Snapshot) -> dict[str, tuple[str, str]]:
    return {its.record.worker_id: (its.record.layout, its.record.phase) for its in snapshot.workers}


async def test_a_worker_is_replaced_under_load_by_one_beside_it_once_there_is_room_and_no_request_fails(
    ray_address: str, tmp_path: pathlib.Path
) -> None:
    """None may be missing, and at first all other GPUs are taken: the old one serves on, and status says what is waited
    for. With room for the new one, of two GPUs, it takes the old one's place."""
    config = ClusterConfig(
        name="e2e",
        model=str(make_checkpoint(tmp_path / "tiny", "llama")),
        pools={"all": PoolConfig(role="unified", replicas=1)},
        rollouts=RolloutsConfig(max_unavailable=0, max_surge=1),
        autoscaling=AutoscalingConfig(pending_seconds=1.0),
        engine=EngineConfig(block_size=8, kv_bytes=2**21, max_num_seqs=4, max_step_tokens=32),
        router=RouterConfig(grpc_port=0, http_port=0),
        redis=RedisConfig(embedded_port=0),
        ray=RayConfig(address=ray_address, rank_resources={"GPU": 1.0}),
    )
    one, two = ParallelLayout(), ParallelLayout(pp=2)
    async with running(config, "", SessionFolder("e2e", tmp_path), lambda step: None) as cluster:
        load, store = Load(cluster), connect(cluster.session.redis_url, 2.0)
        others = placement_group([{"GPU": 1.0}] * 3)
        try:
            await asyncio.to_thread(ray.get, others.ready(), timeout=30)
            async with under(load, 4, 45, 10):
                await ControlState(store, "e2e").write_desired(Desired({"all": DesiredPool(Role.UNIFIED, 1, two)}))
                waits = await until(cluster, lambda seen: "rollouts.max_unavailable is 0" in seen.controller)
                assert "all: 1 to be replaced, all-1 waits for 2 × 1 GPU beside them" in waits.controller
                assert phases(waits) == {"all-0": (str(one), "ready"), "all-1": (str(two), "starting")}
                remove_placement_group(others)
                after = await until(cluster, lambda seen: phases(seen) == {"all-1": (str(two), "ready")})
                assert not after.controller
                num_answered = load.num_answered
                async with asyncio.timeout(30):
                    while load.num_answered == num_answered:  # noqa: ASYNC110
                        await asyncio.sleep(0.05)
        finally:
            remove_placement_group(others)
            await store.close()
