"""What a controller's keeper answers, over HTTP, from what is in a real Redis."""

import asyncio
import socket
import uuid
from collections.abc import AsyncIterator

import httpx
import pytest

from cluster import keeper
from cluster.keeper import Answers, keep
from cluster.serving import serving
from cluster.state import ControlState, ObservedState, WorkerRecord
from headrace import metrics
from headrace.config import AutoscalingConfig, CanaryConfig, ClusterConfig, PoolConfig, RayConfig, RedisConfig
from headrace.errors import ConfigError, Unavailable
from headrace.store import connect

HOST = "127.0.0.1"
POOLS = {"decode": PoolConfig(role="decode", replicas=2)}
READY = WorkerRecord("decode-0", "decode", 1, "decode", "tp1·pp1", "ready", 1.0, "10.0.0.1:7", "10.0.0.1:8")
STARTING = WorkerRecord("decode-1", "decode", 1, "decode", "tp1·pp1", "starting", 1.0)


@pytest.fixture
async def state(redis_url: str) -> AsyncIterator[ControlState]:
    store = connect(redis_url, 2.0)
    yield ControlState(store, f"c{uuid.uuid4().hex[:8]}")
    await store.close()


@pytest.fixture
async def client(state: ControlState) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        serving(Answers(state).routes(), HOST, 0, "--http-port") as port,
        httpx.AsyncClient(base_url=f"http://{HOST}:{port}", trust_env=False) as client,
    ):
        yield client


async def test_it_is_ready_while_a_controller_leads(state: ControlState, client: httpx.AsyncClient) -> None:
    assert (await client.get("/health")).status_code == 200
    answer = await client.get("/ready")
    assert (answer.status_code, answer.text) == (503, "no controller leads\n")
    await state.lead("token")
    answer = await client.get("/ready")
    assert (answer.status_code, answer.text) == (200, "ready\n")
    await state.write_observed(ObservedState("token", trouble="Ray's head has not answered for 9 s"))
    answer = await client.get("/ready")
    assert (answer.status_code, answer.text) == (200, "Ray's head has not answered for 9 s\n"), (
        "it controls what it can"
    )


async def test_case_56_workers_that_measure_are_targets_with_the_role_that_they_have_now(
    state: ControlState, client: httpx.AsyncClient
) -> None:
    assert (await client.get("/targets")).json() == []
    await state.write_observed(ObservedState("token", (READY, STARTING), {"decode": 2}))
    labels = {"worker": "decode-0", "pool": "decode", "role": "decode"}
    assert (await client.get("/targets")).json() == [{"targets": ["10.0.0.1:8"], "labels": labels}]


async def test_a_pool_that_lacks_a_worker_shows_it(state: ControlState, client: httpx.AsyncClient) -> None:
    await state.write_observed(ObservedState("token", (READY,), {"decode": 2, "prefill": 1}))
    lines = (await client.get("/metrics")).text.splitlines()
    assert f'{metrics.POOL_DESIRED}{{pool="decode"}} 2.0' in lines
    assert f'{metrics.POOL_WORKERS}{{phase="ready",pool="decode"}} 1.0' in lines
    assert f'{metrics.POOL_WORKERS}{{phase="ready",pool="prefill"}} 0.0' in lines


async def test_without_redis_it_answers_with_an_error_and_forgets_nothing() -> None:
    store = connect("redis://127.0.0.1:1/0", 0.2)
    try:
        async with (
            serving(Answers(ControlState(store, "c")).routes(), HOST, 0, "--http-port") as port,
            httpx.AsyncClient() as client,
        ):
            for path in ("ready", "targets", "metrics"):
                assert (await client.get(f"http://{HOST}:{port}/{path}")).status_code == 503
    finally:
        await store.close()


@pytest.mark.parametrize(("redis", "ray", "key"), [(None, "ray://h:1", "redis.url"), ("redis://h:1", None, "ray.add")])
async def test_it_starts_neither_redis_nor_ray(redis: str | None, ray: str | None, key: str) -> None:
    config = ClusterConfig(model="m", pools=POOLS, redis=RedisConfig(url=redis), ray=RayConfig(address=ray))
    with pytest.raises(ConfigError, match=f"{key}.* must be given"):
        await keep(config, HOST, 0, patience_seconds=0.0)


async def test_a_canary_is_refused_where_nobody_starts_its_workers() -> None:
    canary = CanaryConfig(revision="v2", pools={"new": POOLS["decode"]})
    scaling = AutoscalingConfig(mode="external")
    redis = RedisConfig(url="redis://127.0.0.1:1/0")
    config = ClusterConfig(model="m", pools=POOLS, redis=redis, autoscaling=scaling, canary=canary)
    with pytest.raises(ConfigError, match=r"canary: ray\.address must be given"):
        await keep(config, HOST, 0, patience_seconds=0.0)


async def test_a_redis_that_is_not_there_and_a_port_that_is_taken_end_it_before_anything_is_changed() -> None:
    config = ClusterConfig(
        model="m", pools=POOLS, redis=RedisConfig(url="redis://127.0.0.1:1/0"), ray=RayConfig(address="ray://h:1")
    )
    with pytest.raises(Unavailable, match=r"redis\.url: nothing serves there"):
        await keep(config, HOST, 0, patience_seconds=0.0)
    with socket.create_server((HOST, 0)) as taken, pytest.raises(ConfigError, match="--http-port: cannot listen"):
        await keep(config, HOST, taken.getsockname()[1])


async def test_what_comes_up_beside_it_is_waited_for_and_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "AGAIN_SECONDS", 0.0)
    answers = [Unavailable("not yet"), Unavailable("nor now"), Unavailable("nor now"), None]
    said: list[str] = []

    async def attempt() -> None:
        if (error := answers.pop(0)) is not None:
            raise error

    await keeper._patiently(attempt, keeper.Patience(float("inf")), said.append)
    assert (said, answers) == (["not yet", "nor now"], [])


async def test_case_65_what_answered_in_between_is_waited_for_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head of Ray that goes again, long after the keeper began."""
    monkeypatch.setattr(keeper, "AGAIN_SECONDS", 0.0)
    now = [0.0]
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now[0])
    patience, num_attempts = keeper.Patience(10.0), 0

    async def attempt() -> None:
        nonlocal num_attempts
        num_attempts += 1
        now[0] += 6.0
        if num_attempts == 2:
            patience.renew()
        raise Unavailable("away")

    with pytest.raises(Unavailable, match="away"):
        await keeper._patiently(attempt, patience, lambda reason: None)
    assert num_attempts == 4


async def test_case_65_a_head_that_answered_for_hours_is_waited_for_as_long_as_one_that_was_just_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, num_connected, num_looks = [0.0], 0, 0

    def connect_ray(address: str, name: str) -> None:
        nonlocal num_connected
        num_connected += 1
        if num_looks:
            now[0] += 6.0
            raise Unavailable("its head is away")

    def look(name: str, controller: str) -> str:
        nonlocal num_looks
        num_looks += 1
        if num_looks == 3:
            raise Unavailable("its head is away")
        now[0] += 3600.0
        return controller

    for name in ("LOOK_SECONDS", "AGAIN_SECONDS"):
        monkeypatch.setattr(keeper, name, 0.0)
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now[0])
    monkeypatch.setattr(keeper.ray_session, "stop", lambda: None)
    monkeypatch.setattr(keeper.ray_session, "connect", connect_ray)
    monkeypatch.setattr(keeper.ray_session, "keep_controller", lambda config, url: "its controller")
    monkeypatch.setattr(keeper.ray_session, "check_controller", look)
    config, said = ClusterConfig(model="m", pools=POOLS), list[str]()
    with pytest.raises(Unavailable, match="its head is away"):
        await keeper._keep_there(config, "redis://h", "ray://h:1", keeper.Patience(10.0), lambda: None, said.append)
    assert (num_connected, said) == (3, ["its head is away"])
