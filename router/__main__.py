"""`python -m router headrace.yaml`: one router, from its configuration until SIGTERM.

It says in one line where it serves. SIGTERM (or Ctrl-C) drains: new requests are refused, those in flight go on for up
to --grace-seconds; a second signal ends it at once.
"""

import argparse
import asyncio
import contextlib
import logging
import pathlib
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence

import uvloop
from prometheus_client import Gauge

from headrace import metrics
from headrace.clock import Clock, SystemClock
from headrace.config import ClusterConfig
from headrace.config_file import load
from headrace.errors import HeadraceError
from headrace.logs import configure
from headrace.otlp import open_spans
from headrace.store import connect
from headrace.tracing import Sampler
from headrace.values import WorkerInfo
from router.core import Core, running_core
from router.decision_log import decision_log
from router.edge.common import Edge
from router.edge.connections import HttpServer, http_config, listen
from router.edge.grpc_api import Health, add_services, open_server
from router.edge.openai import OpenAi
from router.edge.origins import open_to
from router.edge.tls import CertificateGate, Certificates
from router.edge.validate import JobMaker
from router.jobs import Job
from router.keyring import Keyring, load_keyring, read_keys
from router.reports import reachable
from router.spans import recorder
from router.text.detokenize import TextStream
from router.text.served import Models, load_models

DRAIN_SECONDS = 30.0
CLOSE_SECONDS = 2.0
_TASKS = Gauge(metrics.TASKS, "Tasks of the event loop.")
log = logging.getLogger("router")


async def serve(
    config: ClusterConfig,
    *,
    workers: Sequence[str] = (),
    grace_seconds: float = DRAIN_SECONDS,
    serving: Callable[[str], None] = print,
) -> None:
    """Runs one router until it is told to stop; `serving` gets its one line. HeadraceError when it cannot start."""
    clock, tls = SystemClock(), config.router.tls
    certificates = Certificates(tls, clock) if tls is not None else None
    keyring = load_keyring(config)
    models = load_models(config)
    signals = _signals()
    http_socket = listen(config.router.host, config.router.http_port, "router.http_port")
    credentials = certificates.grpc_credentials() if certificates is not None else None
    grpc, grpc_port = open_server(
        config.router.host, config.router.grpc_port, config.limits.max_body_bytes, credentials
    )
    async with contextlib.AsyncExitStack() as ends:
        ends.callback(http_socket.close)
        ends.push_async_callback(grpc.stop, None)
        store = None
        if config.redis.url is not None:
            store = connect(config.redis.url, budget_seconds=config.redis.budget_seconds)
            ends.push_async_callback(store.close)
        note_decision = ends.enter_context(decision_log(config.router.decision_log, time.time))
        router_id = f"{socket.gethostname()}-{secrets.token_hex(4)}"
        sampler = Sampler(config.tracing.sample_fraction, secrets.randbits)
        spans = open_spans(config.tracing.otlp_endpoint, clock, "headrace-router", router_id)
        if spans is not None:
            ends.push_async_callback(spans.close)
        core = await ends.enter_async_context(
            running_core(
                config,
                router_id=router_id,
                open_text=lambda job: _open_text(models, job),
                http_address=reachable(config.router.host, http_socket.getsockname()[1]),
                store=store,
                workers=workers,
                refuse=lambda info: _refuse(models, info),
                clock=clock,
                note_decision=note_decision,
                self_check=config.router.self_check,
                record=recorder(spans, lambda: sampler.new_id(64), with_log=config.logs.requests),
            )
        )
        edge = make_edge(config, models, core, keyring, clock, sampler if spans is not None else None)
        loop = asyncio.get_running_loop()
        _TASKS.set_function(lambda: len(asyncio.all_tasks(loop)))
        health = add_services(grpc, edge)
        app = OpenAi(edge, config.limits.max_body_bytes, time.time, config.router.comment_seconds).app()
        if tls is not None and tls.client_ca_file is not None:
            app = CertificateGate(app)
        app = open_to(config.router.allowed_origins, app)  # outermost: a page may read its refusals
        context = certificates.http_context() if certificates is not None else None
        http = HttpServer(http_config(app, config.router.keep_alive_seconds, int(CLOSE_SECONDS), context))
        changed = asyncio.Event()
        core.sessions.listen(lambda _: changed.set())
        async with asyncio.TaskGroup() as group:
            group.create_task(http.serve([http_socket]), name="http")
            watching = group.create_task(_tell_health(health, changed), name="health")
            await grpc.start()
            host, http_port = config.router.host, http_socket.getsockname()[1]
            serving(f"serving {config.model_name} http={host}:{http_port} grpc={host}:{grpc_port}")
            await _drained(edge, changed, signals, grace_seconds)
            await grpc.stop(CLOSE_SECONDS)
            http.should_exit = True
            watching.cancel()


def make_edge(
    config: ClusterConfig,
    models: Models,
    core: Core,
    keyring: Keyring,
    clock: Clock | None = None,
    sampler: Sampler | None = None,
) -> Edge:
    return Edge(
        models,
        JobMaker(config.limits, lambda: secrets.randbits(64), lambda: reach(core), core.tenancy),
        core.answers,
        clock or SystemClock(),
        unready=lambda: core.catching_up() or (None if config.starts_from_zero else unready(core)),
        draw_id=lambda: secrets.token_hex(8),
        keyring=keyring,
        tenancy=core.tenancy,
        sampler=sampler,
        splits=lambda: core.revisions.split.percent > 0,
    )


def unready(core: Core) -> str | None:
    """Why no request could be served: none of the workers that answer decodes. (One that decodes can prefill too.)"""
    workers = core.requests.view().workers
    if any(worker.role.decodes and not worker.draining for worker in workers):
        return None
    why = "takes requests" if any(worker.role.decodes for worker in workers) else "is connected"
    reports = {session.info.worker_id: session.report for session in core.sessions.live()}
    unwell = [
        f"; {name}: {report.unhealthy_reason}" for name, report in reports.items() if report and report.unhealthy_reason
    ]
    return f"no worker that decodes {why} ({len(workers)} connected in all{''.join(unwell)})"


def reach(core: Core) -> int | None:
    """The longest context of a worker that decodes; None when none is connected."""
    return max(
        (worker.max_context_tokens for worker in core.requests.base_view().workers if worker.decodes), default=None
    )


async def _drained(
    edge: Edge, changed: asyncio.Event, signals: "asyncio.Queue[signal.Signals]", grace_seconds: float
) -> None:
    """Returns when it is time to close: told to stop, and then drained, out of time, or told again."""
    log.info("%s: draining", (await signals.get()).name)
    drained = asyncio.ensure_future(edge.drain())
    again = asyncio.ensure_future(signals.get())
    changed.set()
    try:
        await asyncio.wait((drained, again), timeout=grace_seconds, return_when=asyncio.FIRST_COMPLETED)
        log.info("drained" if drained.done() else "closing with requests in flight")
    finally:
        drained.cancel()
        again.cancel()


async def _tell_health(health: Health, changed: asyncio.Event) -> None:
    while True:
        await changed.wait()
        changed.clear()
        await health.changed()


def _signals() -> "asyncio.Queue[signal.Signals]":
    received: asyncio.Queue[signal.Signals] = asyncio.Queue()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, received.put_nowait, number)
    return received


def _open_text(models: Models, job: Job) -> TextStream:
    text = models.get(job.model).text
    return text.stream(job.stop, min_tokens=job.sampling.min_tokens, continues=job.continues)


def _refuse(models: Models, info: WorkerInfo) -> str | None:
    """A worker whose token ids mean other text than this router's serves nobody here."""
    theirs = info.compatibility.tokenizer
    if theirs in {model.tokenizer_digest for model in models}:
        return None
    return f"tokenizer is {theirs} there and {', '.join(model.tokenizer_digest for model in models)} here"


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m router", description="One router of a Headrace cluster.")
    parser.add_argument("config", type=pathlib.Path, help="the cluster's headrace.yaml")
    parser.add_argument("--redis-url", help="instead of redis.url of the configuration")
    parser.add_argument(
        "--worker", action="append", default=[], metavar="HOST:PORT", help="a worker to reach though it holds no lease"
    )
    parser.add_argument(
        "--api-keys-file", type=pathlib.Path, help="one API key a line, beside router.api_keys of the configuration"
    )
    parser.add_argument(
        "--grace-seconds", type=float, default=DRAIN_SECONDS, help="how long a drain waits (default: %(default)g)"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    try:
        config = load(options.config)
        configure(config.logs.format)
        if options.redis_url:
            config = config.model_copy(update={"redis": config.redis.model_copy(update={"url": options.redis_url})})
        if options.api_keys_file:
            keys = (*config.router.api_keys, *read_keys(options.api_keys_file, "--api-keys-file"))
            config = config.model_copy(update={"router": config.router.model_copy(update={"api_keys": keys})})
        serving = serve(
            config,
            workers=options.worker,
            grace_seconds=options.grace_seconds,
            serving=lambda line: print(line, flush=True),
        )
        uvloop.run(serving)
    except HeadraceError as error:
        print(f"router: {error.message}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
