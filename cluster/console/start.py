"""A console of one cluster, put together from its configuration."""

import asyncio
import contextlib
import pathlib
import time
from collections.abc import AsyncIterator, Sequence

from cluster.console.guard import Guard
from cluster.console.plan_file import PlanFile
from cluster.console.recording import Recording
from cluster.console.serve import PATH, Console
from cluster.console.verdict import Rules
from cluster.console.watcher import Watcher
from cluster.serving import serving
from headrace.clock import SystemClock
from headrace.config import ClusterConfig
from headrace.errors import ConfigError
from headrace.store import connect
from router.keyring import Keyring, load_keyring

BUDGET_SECONDS = 1.0


@contextlib.asynccontextmanager
async def watching(config: ClusterConfig, redis_url: str, api_keys: Sequence[str] = ()) -> AsyncIterator[Console]:
    """Looks at the cluster while the block lasts. `api_keys`: the operator's, beside those in the configuration."""
    rules, guard, key = rules_and_keys(config, api_keys)
    store = connect(redis_url, BUDGET_SECONDS)
    plan = PlanFile(pathlib.Path(config.console.plan)) if config.console.plan is not None else None
    watcher = Watcher.of(config, store, rules, SystemClock(), time.time, key, plan)
    task = asyncio.create_task(watcher.run(), name="console")
    try:
        yield Console(watcher, guard)
    finally:
        task.cancel()
        await asyncio.wait({task})
        await store.close()


def rules_and_keys(config: ClusterConfig, api_keys: Sequence[str]) -> tuple[Rules, Guard, str | None]:
    """What the cluster is held to, who may look, and the key that is shown to routers."""
    keys = (*config.router.api_keys, *api_keys)
    config = config.model_copy(update={"router": config.router.model_copy(update={"api_keys": keys})})
    keyring: Keyring | ConfigError
    try:
        keyring = load_keyring(config)
    except ConfigError as error:
        keyring = error
    return Rules.of(config), Guard(keyring), keys[0] if keys else None


@contextlib.asynccontextmanager
async def served(
    config: ClusterConfig, redis_url: str, host: str, port: int, api_keys: Sequence[str] = ()
) -> AsyncIterator[str]:
    """Where the page is, while the block lasts. ConfigError when the port is taken."""
    async with watching(config, redis_url, api_keys) as console, at(console, host, port) as url:
        yield url


@contextlib.asynccontextmanager
async def replayed(recording: Recording, host: str, port: int) -> AsyncIterator[str]:
    """As served, but what was recorded. To this machine alone."""
    async with at(Console(recording, Guard(Keyring({}))), host, port) as url:
        yield url


@contextlib.asynccontextmanager
async def at(console: Console, host: str, port: int) -> AsyncIterator[str]:
    async with serving(console.routes(), host, port, "console.port") as taken:
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        name = f"[{host}]" if ":" in host else host
        with contextlib.closing(console):
            yield f"http://{name}:{taken}{PATH}"
