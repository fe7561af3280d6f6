"""Ranks as Ray actors. Rank 0 carries the engine and its service on an event loop of its own; no token passes through
Ray, which only starts, watches and ends them.

Every actor serves on one thread of its own and answers the controller on others. The engine's modules are imported
where an actor needs them: the controller names these classes too, and stays without torch.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import replace

import ray

from headrace.errors import WorkerLost
from headrace.values import WorkerInfo
from workers.spec import WorkerSpec


class EngineActor:
    """Rank 0 of one worker: its ranks' meeting place, its engine, its service."""

    def __init__(self, grace_seconds: float = 30.0) -> None:
        self._grace_seconds = grace_seconds
        self._spec: WorkerSpec | None = None
        self._address: Future[str] = Future()
        self._metrics_address = ""
        self._ended: Future[None] = Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()

    def open(self, spec: WorkerSpec) -> str:
        """Begins to serve, once: where the other ranks join. Loading goes on behind it; ready() waits for that."""
        import uvloop
        from prometheus_client import CollectorRegistry, start_http_server

        from headrace.logs import configure
        from workers.ranks.build import build_executor
        from workers.ranks.rendezvous import listen
        from workers.serve import serve

        configure(spec.log_format)
        self._spec = spec = on_this_node(spec)
        rendezvous = listen(spec.host, spec.rendezvous_token)
        address = rendezvous.address

        async def serving() -> None:
            self._loop = asyncio.get_running_loop()
            executor = await asyncio.to_thread(build_executor, spec, rendezvous)
            registry = CollectorRegistry()
            metrics, _ = start_http_server(0, spec.host, registry)
            self._metrics_address = f"{spec.host}:{metrics.server_port}"
            await serve(
                spec,
                executor,
                ready=self._is_ready,
                stop=self._stop,
                grace_seconds=self._grace_seconds,
                registry=registry,
            )

        run_on_thread("service", lambda: uvloop.run(serving()), self._ended)
        return address

    def ready(self) -> tuple[str, str]:
        """Waits until all ranks are warm and the service listens: the addresses of its service and of its metrics. Raises
        what it failed with."""
        self._ended.add_done_callback(self._never_ready)
        return self._address.result(), self._metrics_address

    def watch(self, seconds: float) -> bool:
        """Whether the service ends within `seconds`; raises what it ended with."""
        return ends_within(self._ended, seconds)

    def stop(self) -> None:
        """Drains: refuses new work, finishes what runs and what is pinned, cuts what the grace does not suffice for, and
        ends the service. Returns when it has."""
        if self._loop is not None and not self._ended.done():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._ended.result()

    def describe(self) -> tuple[WorkerSpec | None, tuple[str, str] | None]:
        """Who this is, and where it serves, as ready() says it (None while it does not)."""
        serving = self._address.done() and not self._ended.done()
        return self._spec, (self._address.result(), self._metrics_address) if serving else None

    def _is_ready(self, info: WorkerInfo) -> None:
        self._address.set_result(info.address)

    def _never_ready(self, ended: Future[None]) -> None:
        if not self._address.done():
            self._address.set_exception(ended.exception() or WorkerLost("the service ended before it was ready"))


class RankActor:
    """Any other rank: it joins rank 0 and computes until the worker ends."""

    def __init__(self) -> None:
        self._ended: Future[None] = Future()
        self._joined = False

    def joined(self) -> bool:
        """Whether it was told where rank 0 is."""
        return self._joined

    def join(self, spec: WorkerSpec, address: str, rank: int) -> None:
        """Begins to compute, once."""
        from workers.ranks.rank import rank_main

        self._joined = True
        run_on_thread(f"rank-{rank}", lambda: rank_main(address, spec.rendezvous_token, rank), self._ended)

    def watch(self, seconds: float) -> bool:
        """Whether the rank ends within `seconds`; raises what it ended with."""
        return ends_within(self._ended, seconds)


def on_this_node(spec: WorkerSpec) -> WorkerSpec:
    """The spec as it holds here: an empty host becomes this node's address in the Ray cluster."""
    host = spec.host or str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
    return replace(spec, host=host, node=ray.get_runtime_context().get_node_id())


def ends_within(ended: Future[None], seconds: float) -> bool:
    """Bounded, so that the question of a controller that is gone does not hold a thread for good."""
    done, _ = wait([ended], timeout=seconds)
    if done:
        ended.result()
    return bool(done)


def run_on_thread(name: str, work: Callable[[], None], ended: Future[None]) -> None:
    """Runs `work` beside the actor's methods; `ended` completes with its outcome."""

    def run() -> None:
        try:
            work()
        except BaseException as error:
            ended.set_exception(error)
            raise
        ended.set_result(None)

    threading.Thread(target=run, name=name, daemon=True).start()
