"""Redis slow, frozen, killed, flushed, failed over, refusing: serving goes on, and leases and index come back by
themselves."""

import asyncio
import os
import signal

import pytest

from headrace import metrics
from headrace.keys import Keys
from tests.chaos.stage import MARKS, Stage, until

pytestmark = MARKS
KEYS = Keys("headrace")


async def in_step(stage: Stage) -> bool:
    """Leases and sets are in Redis, and the router's mirror holds what the workers hold."""
    mirrored = await stage.router_samples()
    redis = stage.valkey.client()
    try:
        for name in stage.workers:
            cached = int((await stage.worker_samples(name))[metrics.KV_BLOCKS, "cached"])
            in_redis = redis.hlen(KEYS.blocks(name)) - 1
            if not redis.exists(KEYS.lease(name)) or in_redis != cached:
                return False
            if mirrored.get((metrics.INDEX_BLOCKS, name)) != cached:
                return False
    finally:
        redis.close()
    return True


async def not_waited_for(stage: Stage) -> bool:
    """Neither by the router nor by a worker."""
    found = [await stage.router_samples(), *[await stage.worker_samples(name) for name in stage.workers]]
    return all(samples[metrics.REDIS_BREAKER, ""] == 1.0 for samples in found)


async def serve(stage: Stage, name: str) -> None:
    done = await asyncio.wait_for(asyncio.gather(*(stage.ask(f"{name}{number}", 60) for number in range(6))), 20)
    assert all(answer.choices[0].finish_reason == "length" for answer in done)


@pytest.mark.parametrize("how", ["slow", "frozen", "killed", "flushed", "failed over", "read-only", "out of memory"])
async def test_redis_comes_back_and_so_do_leases_and_index(stage: Stage, how: str) -> None:
    await serve(stage, "before")
    await until(lambda: in_step(stage))
    match how:
        case "slow":
            stage.proxy.delay_seconds = 0.3
            try:
                await until(lambda: not_waited_for(stage))
                await serve(stage, how)
            finally:
                stage.proxy.delay_seconds = 0.0
        case "killed":
            os.kill(stage.valkey_pid, signal.SIGKILL)
            await serve(stage, how)
            await asyncio.to_thread(stage.restart_valkey)
        case "failed over":
            replica = await asyncio.to_thread(stage.copy_valkey)
            await serve(stage, "what the replica lacks")
            await asyncio.to_thread(stage.fail_over, replica)
            await serve(stage, how)
        case "frozen":
            os.kill(stage.valkey_pid, signal.SIGSTOP)
            try:
                await serve(stage, how)
                assert (await stage.http.get(f"{stage.router.http}/ready")).status_code == 200
            finally:
                os.kill(stage.valkey_pid, signal.SIGCONT)
        case "flushed":
            stage.valkey.client().flushall()
            await serve(stage, how)
        case "read-only":
            stage.valkey.client().replicaof("127.0.0.1", 1)
            await serve(stage, how)
            stage.valkey.client().replicaof("NO", "ONE")
        case "out of memory":
            stage.valkey.client().config_set("maxmemory", 1)
            await serve(stage, how)
            stage.valkey.client().config_set("maxmemory", 0)
    await until(lambda: in_step(stage), 20)
    assert all(member.process.process.returncode is None for member in stage.workers.values())
