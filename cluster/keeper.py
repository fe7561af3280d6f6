"""Keeps a controller of workers that somebody else gives room to (`headrace controller`), and answers for it over HTTP.

Where others start workers too (`autoscaling.mode` external or dry-run, and no Ray), it is an advisor in this process.
Otherwise it is on a Ray cluster that somebody else runs:

The controller itself is an actor (control_actor), which Ray restarts. The keeper has it there with the configuration of
today; one that runs with it is left as it is. Where Ray's head goes, the keeper stays and joins the next one; where none
comes, it ends, and whoever runs it starts it again. It ends no worker, and no controller but one with other settings: with
the keeper gone, the cluster serves on.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from cluster import ray_session
from cluster.advisor import Advisor, Elsewhere
from cluster.autoscaler import Autoscaler
from cluster.canary.store import CanaryState
from cluster.canary.values import Phase as CanaryIs
from cluster.canary.values import State as CanaryKnown
from cluster.console.start import watching
from cluster.lifecycle import Phase
from cluster.scaling_state import ScalingState
from cluster.serving import serving
from cluster.state import ControlState, ObservedState, configured, control_state
from cluster.threads import asking
from headrace import metrics
from headrace.clock import SystemClock
from headrace.config import ClusterConfig
from headrace.errors import ConfigError, Unavailable
from headrace.store import StoreUnavailable

LOOK_SECONDS = 5.0
PATIENCE_SECONDS = 180.0
AGAIN_SECONDS = 2.0
NOTHING_KNOWN = Elsewhere()
ADVISING = ("external", "dry-run")  # modes in which nothing is started or ended


async def keep(
    config: ClusterConfig,
    host: str,
    port: int,
    *,
    api_keys: Sequence[str] = (),
    connected: Callable[[], None] = lambda: None,
    say: Callable[[str], None] = lambda reason: None,
    patience_seconds: float = PATIENCE_SECONDS,
    workers: Elsewhere = NOTHING_KNOWN,
) -> None:
    """Never returns. ConfigError when the configuration names no Redis or no Ray cluster that it needs, or the port is
    taken; Unavailable when Redis (at the start) or Ray (at any time) has not answered for `patience_seconds`, in which
    `say` gets the reason. `connected` is called whenever Ray is there. Who holds one of `api_keys`, or of the
    configuration's own, may look at the console."""
    url, address = config.redis.url, config.ray.address
    advises = address is None and config.autoscaling.mode in ADVISING
    if url is None or (address is None and not advises):
        key = "redis.url" if url is None else "ray.address"
        needed = (
            ""
            if url is None
            else f", unless autoscaling.mode is {' or '.join(ADVISING)} (it is {config.autoscaling.mode})"
        )
        raise ConfigError(
            f"{key} must be given{needed}: a controller that runs alone starts neither Redis nor Ray", key=key
        )
    if advises and config.canary is not None:
        raise ConfigError("canary: ray.address must be given: who leads a canary starts and ends workers", key="canary")
    async with (
        control_state(config.name, url) as state,
        watching(config, url, api_keys) as console,
        serving([*Answers(state).routes(), *console.routes()], host, port, "--http-port"),
    ):
        with contextlib.closing(console):
            patience = Patience(patience_seconds)
            if address is None:
                await _patiently(lambda: _serves(state.has_leader()), patience, say)
                connected()
                clock = SystemClock()
                scaler = Autoscaler(config, state.store, clock, workers.prefix)
                await Advisor(config, state, clock, scaler, workers).run()
            else:
                await _patiently(lambda: _serves(state.configure(configured(config, trusted=True))), patience, say)
                await _keep_there(config, url, address, patience, connected, say)


async def _serves(call: Awaitable[object]) -> None:
    try:
        await call
    except StoreUnavailable as error:
        raise Unavailable(f"redis.url: nothing serves there: {error.message}") from error


async def _keep_there(
    config: ClusterConfig,
    url: str,
    address: str,
    patience: "Patience",
    connected: Callable[[], None],
    say: Callable[[str], None],
) -> None:
    """The controller, on that Ray cluster, whose head may go and come back."""

    async def kept() -> None:
        await asking(ray_session.stop)
        await asking(ray_session.connect, address, config.name)
        connected()
        controller = await asking(ray_session.keep_controller, config, url)
        while True:
            patience.renew()
            await asyncio.sleep(LOOK_SECONDS)
            controller = await asking(ray_session.check_controller, config.name, controller)

    try:
        await _patiently(kept, patience, say)
    finally:
        await asking(ray_session.stop)


class Patience:
    """For how long what does not answer is waited for, from now or from its last answer, by the event loop's clock."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.renew()

    def renew(self) -> None:
        self._until = asyncio.get_running_loop().time() + self._seconds

    @property
    def over(self) -> bool:
        return asyncio.get_running_loop().time() >= self._until


async def _patiently(attempt: Callable[[], Awaitable[None]], patience: Patience, say: Callable[[str], None]) -> None:
    """Until it succeeds. Unavailable is said, each reason once in a row, and goes up once the patience is over."""
    said = ""
    while True:
        try:
            return await attempt()
        except Unavailable as error:
            if patience.over:
                raise
            if error.message != said:
                say(said := error.message)
        await asyncio.sleep(AGAIN_SECONDS)


class Answers:
    """What an orchestrator and a Prometheus ask. Owns nothing; all is read from `observed` when it is asked for."""

    def __init__(self, state: ControlState) -> None:
        self._state = state

    def routes(self) -> list[Route]:
        paths = {"/health": self.health, "/ready": self.ready, "/targets": self.targets, "/metrics": self.metrics}
        return [Route(path, answer) for path, answer in paths.items()]

    async def health(self, request: Request) -> Response:
        """This process answers."""
        return PlainTextResponse("ok\n")

    async def ready(self, request: Request) -> Response:
        """200 while a controller holds the lease, with what hinders it; else 503 with the reason."""
        try:
            leads, observed = await self._state.has_leader(), await self._state.observed()
        except StoreUnavailable as error:
            return PlainTextResponse(f"{error.message}\n", 503)
        if not leads:
            return PlainTextResponse("no controller leads\n", 503)
        return PlainTextResponse(f"{(observed and observed.trouble) or 'ready'}\n")

    async def targets(self, request: Request) -> Response:
        """Where the workers' metrics are, as Prometheus' HTTP service discovery reads it: ports are drawn by workers, and
        a role may change. While Redis is away an error, which Prometheus answers by keeping the targets that it has."""
        try:
            observed = await self._state.observed()
        except StoreUnavailable as error:
            return PlainTextResponse(f"{error.message}\n", 503)
        return JSONResponse(scrape_targets(observed or ObservedState("")))

    async def metrics(self, request: Request) -> Response:
        try:
            store, cluster = self._state.store, self._state.cluster
            observed, scaling = await self._state.observed(), await ScalingState(store, cluster).now()
            canary = (await CanaryState(store, cluster).read()).state
        except StoreUnavailable as error:
            return PlainTextResponse(f"{error.message}\n", 503)
        advised = scaling.decision.advised if scaling is not None else {}
        registry = CollectorRegistry()
        registry.register(Sizes(observed or ObservedState(""), {pool: size.replicas for pool, size in advised.items()}))
        registry.register(CanaryPhase(canary))
        return Response(generate_latest(registry), media_type="text/plain; version=0.0.4; charset=utf-8")


def scrape_targets(observed: ObservedState) -> list[dict[str, object]]:
    """One group a worker that serves metrics, labelled with what it is now."""
    return [
        {
            "targets": [worker.metrics_address],
            "labels": {"worker": worker.worker_id, "pool": worker.pool, "role": worker.role},
        }
        for worker in observed.workers
        if worker.metrics_address
    ]


class Sizes(Collector):
    """How many workers each pool should have, and has in which phase; 0 is said too. `advised`: what an autoscaler would
    have, also where others set sizes."""

    def __init__(self, observed: ObservedState, advised: Mapping[str, int]) -> None:
        self._observed = observed
        self._advised = advised

    def collect(self) -> Iterator[GaugeMetricFamily]:
        desired = dict(self._observed.desired or {})
        seen = Counter((worker.pool, worker.phase) for worker in self._observed.workers)
        wanted = GaugeMetricFamily(metrics.POOL_DESIRED, "Workers that a pool should have.", labels=["pool"])
        exist = GaugeMetricFamily(metrics.POOL_WORKERS, "Workers that a pool has.", labels=["pool", "phase"])
        best = GaugeMetricFamily(metrics.POOL_ADVISED, "Workers that the autoscaler would have.", labels=["pool"])
        for pool, number in desired.items():
            wanted.add_metric([pool], number)
        for pool, number in self._advised.items():
            best.add_metric([pool], number)
        for pool in sorted(desired.keys() | {pool for pool, _ in seen}):
            for phase in Phase:
                exist.add_metric([pool, phase.value], seen[pool, phase.value])
        yield from (wanted, exist, best)


class CanaryPhase(Collector):
    """1 of the phase that the last canary is in, 0 of the others; nothing where there never was one."""

    def __init__(self, canary: CanaryKnown | None) -> None:
        self._canary = canary

    def collect(self) -> Iterator[GaugeMetricFamily]:
        family = GaugeMetricFamily(metrics.CANARY_PHASE, "The canary's phase.", labels=["revision", "phase"])
        if self._canary is not None:
            for phase in CanaryIs:
                family.add_metric([self._canary.canary.revision, phase.value], float(phase is self._canary.phase))
        yield family
