"""The controller as a Ray actor: detached, named, restarted by Ray when its process dies. Its state is in Redis."""

import asyncio
import contextlib
import hashlib
import importlib.metadata
import json
import os
import threading
import traceback
from concurrent.futures import Future

import ray

from cluster.autoscaler import Autoscaler
from cluster.canary.control import Canary
from cluster.controller import Controller
from cluster.pools import RayPools
from cluster.state import ControlState
from headrace.clock import SystemClock
from headrace.config import ClusterConfig, EngineConfig, PoolConfig
from headrace.store import connect

NAME = "controller"
# The control plane may wait longer for Redis than anything that serves.
BUDGET_SECONDS = 2.0


class ControlActor:
    """Owns the thread and the event loop that the controller runs on."""

    def __init__(self, config_json: str, redis_url: str, host: str) -> None:
        self._config = ClusterConfig.model_validate_json(config_json)
        self._redis_url = redis_url
        self._host = host
        self._started_with = settings_digest(config_json, redis_url, host)
        self._running: Future[tuple[asyncio.AbstractEventLoop, Controller]] = Future()
        self._thread = threading.Thread(target=self._run, name="controller", daemon=True)
        self._thread.start()

    def ping(self) -> int:
        """The process that controls."""
        return os.getpid()

    def started_with(self) -> str:
        """settings_digest of what it controls by. Answers only while its loop turns."""
        loop, _ = self._running.result()
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result()
        return self._started_with

    def stop(self) -> None:
        """Drains and removes every worker; returns when none is left. One that only begins is waited for: it would start
        workers behind whoever believes it stopped."""
        loop, controller = self._running.result()
        with contextlib.suppress(RuntimeError):  # its loop is over already
            loop.call_soon_threadsafe(controller.stop)
        self._thread.join()

    def _run(self) -> None:
        try:
            asyncio.run(self._control())
        except BaseException:
            # A controller that fell is no controller: with its process gone, Ray starts another.
            traceback.print_exc()
            os._exit(1)

    async def _control(self) -> None:
        store = connect(self._redis_url, BUDGET_SECONDS)
        state, canary = ControlState(store, self._config.name), Canary(self._config, store)
        pools = self._pools(canary)
        clock, scaled = SystemClock(), self._config.autoscaling.mode != "fixed"
        autoscaler = Autoscaler(self._config, store, clock) if scaled else None
        controller = Controller(self._config, self._redis_url, self._host, pools, state, clock, autoscaler, canary)
        self._running.set_result((asyncio.get_running_loop(), controller))
        try:
            await controller.run()
        finally:
            await store.close()

    def _pools(self, canary: Canary) -> RayPools:
        return RayPools(ray.get_runtime_context().namespace, lambda pool: _resources(self._config, pool, canary))


def settings_digest(config_json: str, redis_url: str, host: str) -> str:
    """Equal where two controllers would do the same, by the same code; says nothing of a password in the URL."""
    parts = [importlib.metadata.version("headrace"), config_json, redis_url, host]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _resources(config: ClusterConfig, name: str, canary: Canary) -> dict[str, float]:
    """Of a pool of the configuration's, of the canary's, or one that was desired since."""
    revision = canary.revision_of(name)
    _, engine, pool = canary.settings(name, revision)
    return rank_resources(config, pool, engine)


def rank_resources(config: ClusterConfig, pool: PoolConfig | None, engine: EngineConfig) -> dict[str, float]:
    """What Ray sets aside for each rank of a pool."""
    given = (pool.rank_resources if pool is not None else None) or config.ray.rank_resources
    if given is not None:
        return dict(given)
    return {"GPU": 1.0} if engine.device == "cuda" else {"CPU": 1.0}


def namespace(cluster: str) -> str:
    """The Ray namespace of a cluster: all of its actors, and nothing else, live there."""
    return f"headrace-{cluster}"
