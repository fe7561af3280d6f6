"""A cluster's life under `headrace up`: checked, started, watched over, and ended in the reverse order.

    check → redis → console → ray → controller → workers → router → (serves), and back

Whatever ends it (Ctrl-C, SIGTERM, an error, a cancelled task), each part that was started is ended.
"""

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace

import httpx
import yaml

from cluster import embedded, ray_session
from cluster.checks import (
    check_canary_model,
    check_checkpoint,
    check_layouts,
    check_ports,
)
from cluster.child import Child, end_leftovers
from cluster.console.start import served
from cluster.lifecycle import Phase
from cluster.session import Session, SessionFolder, remembered
from cluster.state import ObservedState, configured, control_state
from cluster.threads import asking, in_thread
from headrace.clock import SystemClock
from headrace.config import ClusterConfig
from headrace.errors import InternalError, Unavailable
from headrace.ports import free_port, port_is_free
from headrace.store import StoreUnavailable, public
from router.decision_log import decision_log
from router.edge.tls import read as read_certificates
from router.keyring import load_keyring

ROUTER = "router"
LOOK_SECONDS = 0.25
ROUTER_READY_SECONDS = 120.0
ROUTER_STOP_SECONDS = 40.0
CONTROLLER_STOP_SECONDS = 60.0
MAX_START_FAILURES = 3
MAX_RESTART_SECONDS = 30.0
# What Ray started, and who joined it, ends itself a minute after the head did: what is in flight needs half of that to end.
# The head of a Ray of our own does not come back; that of others may, and all goes on then.
OWN_HEAD_SECONDS, OTHERS_HEAD_SECONDS = 20.0, 50.0
HEAD_LOOK_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Step:
    """Progress, for whoever shows it. `done` False: it began, or goes on."""

    name: str
    detail: str = ""
    done: bool = False


Report = Callable[[Step], None]


@dataclass(slots=True)
class Head:
    """Ray's head. `lost`: watch() has found it silent for `patience_seconds`, and nothing is asked of it any more."""

    address: str
    patience_seconds: float
    lost: bool = False


@dataclass(frozen=True, slots=True)
class Running:
    """A cluster that serves. `children` are those that live now: watch() puts a new one in a dead one's place."""

    session: Session
    folder: SessionFolder
    children: dict[str, Child]
    head: Head


@contextlib.asynccontextmanager
async def running(
    config: ClusterConfig, config_path: str, folder: SessionFolder, report: Report
) -> AsyncIterator[Running]:
    """The cluster, serving. Nothing is started when the configuration, the model or a port is wrong."""
    with folder.owned():
        await in_thread(end_leftovers, folder)
        config = await in_thread(_checked, config, report)
        async with contextlib.AsyncExitStack() as ends:
            children: dict[str, Child] = {}
            config = await _start_redis(config, folder, children, ends, report)
            assert config.redis.url is not None
            session = Session(
                cluster=config.name,
                pid=os.getpid(),
                config_path=config_path,
                model_name=config.model_name,
                http_url=config.router.http_url(_reachable(config.router.host)),
                grpc_address=config.router.grpc_address(_reachable(config.router.host)),
                redis_url=config.redis.url,
                ray_address=config.ray.address or "",
                console_url=await _start_console(config, ends, report),
                tls=remembered(config.router.tls),
            )
            folder.config_path.write_text(
                yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False), encoding="utf-8"
            )
            ends.callback(folder.clear)
            _record(folder, session, children)
            head = await _start_ray(config, ends, report)
            await _start_controller(config, head, ends, report)
            await _workers_ready(config, report)
            await _start_router(folder, children, ends, report)
            await _router_ready(session, children[ROUTER], report)
            session = _record(folder, replace(session, ready=True), children)
            yield Running(session, folder, children, head)


async def watch(cluster: Running, report: Report) -> None:
    """Starts the router and the embedded Redis again when they end. Returns never; raises when one cannot be started, or
    Ray's head is lost."""
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_watch_head(cluster.head, report))
            for name in list(cluster.children):
                tasks.create_task(_keep_alive(name, cluster, report))
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None


# -- the steps, in order


def _checked(config: ClusterConfig, report: Report) -> ClusterConfig:
    """The configuration with every blank filled in: the model's folder, and ports where any would do."""
    if config.router.tls is not None:
        read_certificates(config.router.tls)
    load_keyring(config)
    with decision_log(config.router.decision_log, time.time):
        pass  # the router could write it
    report(Step("model", config.model))
    checkpoint = check_checkpoint(
        config.model, lambda stage, done, total: report(Step("model", f"{stage}, {done} of {total}"))
    )
    check_layouts(config, checkpoint)
    if config.canary is not None:
        check_canary_model(config.canary, checkpoint)
    check_ports(config)
    router = config.router.model_copy(
        update={
            "http_port": config.router.http_port or free_port(config.router.host),
            "grpc_port": config.router.grpc_port or free_port(config.router.host),
        }
    )
    report(Step("model", f"{config.model_name}, revision {checkpoint.revision[:12]}", done=True))
    return config.model_copy(
        update={
            "model": str(checkpoint.folder.resolve()),
            "served_model_name": config.model_name,
            "router": router,
        }
    )


async def _start_redis(
    config: ClusterConfig,
    folder: SessionFolder,
    children: dict[str, Child],
    ends: contextlib.AsyncExitStack,
    report: Report,
) -> ClusterConfig:
    """With the URL in the configuration; the desired state is written, as this configuration says it."""
    report(Step("redis"))
    url = config.redis.url
    if url is None:
        port = embedded.choose_port(config.redis.embedded_port)
        children[embedded.NAME] = await embedded.start(port, folder)
        ends.push_async_callback(_end_child, embedded.NAME, children, 5.0)
        url = embedded.url(port)
    async with control_state(config.name, url) as state:
        try:
            await state.write_desired(configured(config, trusted=True))
        except StoreUnavailable as error:
            raise Unavailable(f"redis.url: nothing serves at {public(url)}: {error.message}") from error
    report(Step("redis", public(url), done=True))
    return config.model_copy(update={"redis": config.redis.model_copy(update={"url": url})})


async def _start_console(config: ClusterConfig, ends: contextlib.AsyncExitStack, report: Report) -> str:
    """Where it is; it shows how the rest starts. Empty where none is wanted."""
    its = config.console
    if not its.enabled:
        return ""
    assert config.redis.url is not None
    port = its.port if its.port and port_is_free(its.host, its.port) else 0
    url = await ends.enter_async_context(served(config, config.redis.url, its.host, port))
    report(Step("console", url, done=True))
    return url


async def _start_ray(config: ClusterConfig, ends: contextlib.AsyncExitStack, report: Report) -> Head:
    report(Step("ray", config.ray.address or "on this machine"))
    own = config.ray.address is None
    # A Ray of our own is a child of the thread that starts it. Others' Ray may never answer, and is only asked.
    done = in_thread if own else asking
    ends.push_async_callback(done, ray_session.stop)
    await done(ray_session.start, config)
    head = Head(await done(ray_session.head_address), OWN_HEAD_SECONDS if own else OTHERS_HEAD_SECONDS)
    report(Step("ray", config.ray.address or "on this machine", done=True))
    return head


async def _start_controller(config: ClusterConfig, head: Head, ends: contextlib.AsyncExitStack, report: Report) -> None:
    assert config.redis.url is not None
    report(Step("workers", "controller"))

    async def stop() -> None:
        """With a head that is gone, or goes now (a service manager signals all processes at once), nobody answers."""
        if head.lost or await _is_silent(head.address):
            return
        stopped = asyncio.ensure_future(asking(ray_session.stop_controller, config.name, CONTROLLER_STOP_SECONDS))
        silent = asyncio.ensure_future(_until_silent(head))
        try:
            await asyncio.wait({stopped, silent}, return_when=asyncio.FIRST_COMPLETED)
            if stopped.done():
                stopped.result()
        finally:
            silent.cancel()
            stopped.cancel()

    ends.push_async_callback(stop)
    await asking(ray_session.start_controller, config, config.redis.url)


async def _workers_ready(config: ClusterConfig, report: Report) -> None:
    """Until every desired worker is ready: as the configuration has it, or an autoscaler since. A slot that fails again and
    again ends the wait with its reason."""
    assert config.redis.url is not None
    asked = {name: pool.replicas for name, pool in config.pools.items()}
    async with control_state(config.name, config.redis.url) as state:
        while True:
            observed = await state.observed() or ObservedState("")
            wanted = sum((observed.desired or asked).values())
            ready = [worker for worker in observed.workers if worker.phase == Phase.READY]
            waiting = [
                f"{worker.worker_id} {worker.reason or worker.phase}"
                for worker in observed.workers
                if worker.phase != Phase.READY
            ]
            report(Step("workers", ", ".join([f"{len(ready)} of {wanted}", *waiting]), done=len(ready) >= wanted))
            if len(ready) >= wanted:
                return
            for slot, (_, failures, reason) in (observed.history or {}).items():
                if failures >= MAX_START_FAILURES:
                    raise Unavailable(f"{slot} failed {failures} times, last because {reason}")
            await asyncio.sleep(LOOK_SECONDS)


async def _start_router(
    folder: SessionFolder, children: dict[str, Child], ends: contextlib.AsyncExitStack, report: Report
) -> None:
    report(Step("router"))
    children[ROUTER] = await Child.start(ROUTER, router_command(folder), folder)
    ends.push_async_callback(_end_child, ROUTER, children, ROUTER_STOP_SECONDS)


def router_command(folder: SessionFolder) -> list[str]:
    return [sys.executable, "-m", "router", str(folder.config_path)]


async def _router_ready(session: Session, router: Child, report: Report) -> None:
    """Until /ready says so. The router's own end is an error with its last words."""
    ended = asyncio.ensure_future(router.wait())
    ready = asyncio.ensure_future(_answers(f"{session.http_url}/ready"))
    try:
        async with asyncio.timeout(ROUTER_READY_SECONDS):
            await asyncio.wait({ended, ready}, return_when=asyncio.FIRST_COMPLETED)
    except TimeoutError as error:
        raise InternalError(f"the router was not ready within {ROUTER_READY_SECONDS:.0f} s") from error
    finally:
        ended.cancel()
        ready.cancel()
    if not ready.done():
        raise router.failure()
    ready.result()
    report(Step("router", session.http_url, done=True))


async def _answers(url: str) -> None:
    """It is our own child that is looked at, maybe by a name that its certificate lacks: that is the clients' matter."""
    async with httpx.AsyncClient(timeout=5.0, trust_env=False, verify=False) as client:
        while True:
            with contextlib.suppress(httpx.TransportError):
                if (await client.get(url)).is_success:
                    return
            await asyncio.sleep(LOOK_SECONDS)


# -- while it serves


async def _keep_alive(name: str, cluster: Running, report: Report) -> None:
    """Starts the child again each time that it ends, at once when it had lived long, else after a growing delay."""
    clock, folder = SystemClock(), cluster.folder
    delay = 0.0
    while True:
        started = clock.now()
        status = await cluster.children[name].wait()
        delay = 0.0 if clock.now() - started > MAX_RESTART_SECONDS else min(max(1.0, 2 * delay), MAX_RESTART_SECONDS)
        report(Step(name, f"ended with status {status}; starts again"))
        await asyncio.sleep(delay)
        if name == ROUTER:
            cluster.children[name] = await Child.start(ROUTER, router_command(folder), folder)
        else:
            port = int(cluster.session.redis_url.rsplit(":", 1)[1].split("/")[0])
            cluster.children[name] = await embedded.start(port, folder)
        _record(folder, cluster.session, cluster.children)
        report(Step(name, "runs again", done=True))


async def _watch_head(head: Head, report: Report) -> None:
    """Unavailable once the head has been silent for too long. Serving needs none, so it is not disturbed before."""
    clock = SystemClock()
    heard_at = clock.now()
    while (silent := clock.now() - heard_at) < head.patience_seconds:
        await asyncio.sleep(HEAD_LOOK_SECONDS)
        if await _listens(head.address):
            if silent > 2 * HEAD_LOOK_SECONDS:
                report(Step("ray", f"its head at {head.address} answers again", done=True))
            heard_at = clock.now()
        elif silent < 2 * HEAD_LOOK_SECONDS:
            report(Step("ray", f"its head at {head.address} does not answer; what serves goes on"))
    head.lost = True
    raise Unavailable(
        f"Ray's head at {head.address} has not answered for {silent:.0f} s, and without it Ray ends all workers within a "
        "minute: the cluster is ended in order"
    )


async def _until_silent(head: Head) -> None:
    while True:
        await asyncio.sleep(HEAD_LOOK_SECONDS)
        if await _is_silent(head.address):
            return


async def _is_silent(address: str) -> bool:
    """By two looks: for one that is lost on its way a controller would be left behind, with all workers."""
    return not await _listens(address) and not await _listens(address)


async def _listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(HEAD_LOOK_SECONDS):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


# -- shared


async def _end_child(name: str, children: dict[str, Child], seconds: float) -> None:
    await children[name].stop(seconds)


def _record(folder: SessionFolder, session: Session, children: dict[str, Child]) -> Session:
    session = replace(session, children={name: child.pid for name, child in children.items()})
    folder.write(session)
    return session


def _reachable(host: str) -> str:
    """Where a client on this machine finds what listens on `host`."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host
