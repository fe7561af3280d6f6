"""Looks at a cluster for all who watch it: once a second while anybody does, now and then otherwise, so that whoever opens
the page sees what was before.

A look costs the cluster a few reads of Redis, at most 64 questions to workers and 4 to routers, however many there are and
however many watch. Nothing that a look meets ends it: what does not answer is part of the picture.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from redis.exceptions import RedisError

from cluster.canary.report import Standing
from cluster.canary.store import CanaryState
from cluster.console.asking import MAX_ROUTERS_A_LOOK, MAX_WORKERS_A_LOOK, Asking, Routers, by_address, describe, heard
from cluster.console.asking import seen as seen_of
from cluster.console.decisions import MAX_DECISIONS
from cluster.console.plan_file import PlanFile
from cluster.console.traffic import Ring, Traffic
from cluster.console.verdict import Rules, Sources
from cluster.console.view import Cluster, Look, as_json, finite, point, scene
from cluster.router_reports import router_reports
from cluster.scaling.values import Recorded
from cluster.scaling_state import ScalingState
from cluster.snapshot import control_plane, failures_of
from cluster.state import ObservedState
from headrace.clock import Clock
from headrace.config import ClusterConfig
from headrace.errors import ConfigError, HeadraceError
from headrace.reports import RouterReport
from headrace.store import Store
from headrace.tls import ClientTls

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
IDLE_SECONDS = 5.0
SCALING_SECONDS = 5.0
LIVE_SECONDS, MINUTE_SECONDS, WINDOW_SECONDS = 10.0, 60.0, 300.0
MAX_WATCHERS = 64


class Watcher:
    """Owns what was seen: the last scene, its history, and the counters that make rates. `run` is its one task."""

    def __init__(
        self,
        cluster: Cluster,
        store: Store,
        rules: Rules,
        clock: Clock,
        wall_seconds: Callable[[], float],
        api_key: str | None = None,
        plan: PlanFile | None = None,
        tls: ClientTls | None = None,
    ) -> None:
        self._cluster = cluster
        self._store = store
        self._rules = rules
        self._clock = clock
        self._wall_seconds = wall_seconds
        self._traffic = Traffic(WINDOW_SECONDS)
        self._rings = {"recent": Ring(IDLE_SECONDS, 180), "day": Ring(300.0, 288)}
        self._routers = Routers(api_key, tls)
        self._describes = Asking(describe, clock, MAX_WORKERS_A_LOOK)
        self._requests = Asking(self._routers.requests, clock, MAX_ROUTERS_A_LOOK)
        self._observed, self._controller = ObservedState(""), ""
        self._scaling = ScalingState(store, cluster.name)
        self._scaled: tuple[Recorded, Sequence[Recorded]] | None = None
        self._scaled_at: float | None = None
        self._canaries = CanaryState(store, cluster.name)
        self._canary: Standing | None = None
        self._plan = plan
        self._reports: dict[str, RouterReport] = {}
        self._redis_at: float | None = None
        self._redis_why = ""
        self._num_watching = 0
        self._wanted = asyncio.Event()
        self._news = asyncio.Event()
        self._closed = False
        self.scene: bytes = b"{}"

    @classmethod
    def of(
        cls,
        config: ClusterConfig,
        store: Store,
        rules: Rules,
        clock: Clock,
        wall_seconds: Callable[[], float],
        api_key: str | None,
        plan: PlanFile | None = None,
    ) -> "Watcher":
        cluster = Cluster(config.name, config.model_name, f"{config.router.http_url()}/v1")
        tls = ClientTls.of(config.router.tls)
        return cls(cluster, store, rules, clock, wall_seconds, api_key, plan, tls)

    async def run(self) -> None:
        """Until it is cancelled."""
        try:
            while True:
                began = self._clock.now()
                await self.look()
                pause = LOOK_SECONDS if self._num_watching else IDLE_SECONDS
                await self._pause(max(pause - (self._clock.now() - began), 0.05))
        finally:
            await self.close()

    def end(self) -> None:
        """Whoever watches sees the end of it."""
        self._closed = True
        self._tell()

    async def close(self) -> None:
        self.end()
        await self._describes.close()
        await self._requests.close()
        await self._routers.close()

    async def look(self) -> None:
        """One look, told to all who watch."""
        try:
            shown = scene(await self._see(), self._rules)
        except Exception:  # a fault of ours must not take the page from who needs it
            log.exception("a look at the cluster failed")
            return
        now = self._clock.now()
        for ring in self._rings.values():
            if ring.due(now):
                ring.add(now, finite(point(shown)))
        shown["point"] = self._rings["recent"].points[-1]
        self.scene = as_json(shown)
        self._tell()

    def history(self) -> dict[str, Any]:
        return {
            name: {"step_seconds": ring.step_seconds, "points": list(ring.points)} for name, ring in self._rings.items()
        }

    async def why(self, router_id: str, request_id: str) -> tuple[int, bytes]:
        """Status and body of what that router says, where it is one that reports; Unavailable when it does not answer."""
        report = self._reports.get(router_id)
        return (404, b"") if report is None else await self._routers.why(report.http_address, request_id)

    @property
    def is_full(self) -> bool:
        """As many watch as may."""
        return self._num_watching >= MAX_WATCHERS

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Somebody watches while the block lasts."""
        self._num_watching += 1
        self._wanted.set()
        try:
            yield
        finally:
            self._num_watching -= 1

    async def scenes(self) -> AsyncIterator[bytes]:
        """The last scene, then each new one; who is slow misses those in between. Ends with the watcher."""
        while not self._closed:
            news = self._news
            yield self.scene
            await news.wait()

    # -- a look

    async def _see(self) -> Look:
        await self._see_redis()
        observed, now = self._observed, self._clock.now()
        described, listed = await asyncio.gather(
            self._describes.look(by_address(observed.workers)),
            self._requests.look({name: report.http_address for name, report in self._reports.items()}),
        )
        now = self._clock.now()
        return Look(
            cluster=self._cluster,
            wall_seconds=self._wall_seconds(),
            sources=Sources(
                None if self._redis_at is None else now - self._redis_at,
                self._redis_why,
                self._controller,
                len(self._reports),
                {name: said.silence for name, said in listed.items() if said.silence and name in self._reports},
            ),
            desired=dict(observed.desired or {}),
            workers=seen_of(observed.workers, described, now),
            failures=failures_of(observed),
            reports=self._reports,
            heard=heard(self._reports, listed),
            live=self._traffic.last(now, LIVE_SECONDS),
            minute=self._traffic.last(now, MINUTE_SECONDS),
            window=self._traffic.last(now, WINDOW_SECONDS),
            scaling=self._scaled,
            plan=self._plan.read() if self._plan is not None else None,
            canary=self._canary,
        )

    async def _see_redis(self) -> None:
        """What it last said stays where it does not answer."""
        try:
            self._observed, self._controller = await control_plane(self._store, self._cluster.name)
            self._reports = await router_reports(self._store, self._cluster.name)
            await self._see_scaling()
            self._canary = await self._canaries.standing()
        except (HeadraceError, ConfigError, RedisError) as error:
            self._redis_why = error.message if isinstance(error, HeadraceError) else f"{type(error).__name__}: {error}"
            return
        self._redis_at, self._redis_why = self._clock.now(), ""
        self._traffic.hear(self._redis_at, self._reports)

    async def _see_scaling(self) -> None:
        """The autoscaler thinks every few seconds, and its record is long."""
        now = self._clock.now()
        if self._scaled_at is None or now - self._scaled_at >= SCALING_SECONDS:
            turn = await self._scaling.now()
            self._scaled = None if turn is None else (turn, await self._scaling.latest(turn.number, MAX_DECISIONS))
            self._scaled_at = now

    # -- those who watch

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def _pause(self, seconds: float) -> None:
        """Ends early when the first one comes to watch."""
        if not self._num_watching:
            self._wanted.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._wanted.wait()
        else:
            await asyncio.sleep(seconds)
