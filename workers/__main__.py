"""`python -m workers`: one worker without Ray. Its other ranks are child processes on this host.

Prints `ready <worker id> <address>` once it takes requests. SIGTERM and SIGINT drain it. Exit codes: 0 drained, 1 lost
or could not start, 2 wrong options.
"""

import asyncio
import logging
import os
import secrets
import signal
import sys
import time
import traceback
import types
import typing
from collections.abc import Callable
from typing import Any, Literal, NoReturn

import click
import uvloop
from prometheus_client import CollectorRegistry, start_http_server
from pydantic import BaseModel, ValidationError

from headrace.config import EngineConfig, HandoffConfig
from headrace.errors import ConfigError, HeadraceError
from headrace.logs import configure
from headrace.otlp import check_endpoint
from headrace.values import STABLE, ParallelLayout, Role, WorkerInfo
from workers.identity import Identity
from workers.ranks.build import build_executor
from workers.serve import serve
from workers.spec import WorkerSpec

Command = Callable[..., None]


def options_of(section: type[BaseModel]) -> Callable[[Command], Command]:
    """One option for every field of a configuration section, under its own name."""

    def decorate(command: Command) -> Command:
        for name, field in reversed(section.model_fields.items()):
            flag = "--" + name.replace("_", "-")
            kind = _click_type(field.annotation)
            if kind is bool:
                flag = f"{flag}/--no-{name.replace('_', '-')}"
            add = click.option(flag, name, type=kind, default=field.default, show_default=True, help=field.description)
            command = add(command)
        return command

    return decorate


def _click_type(annotation: Any) -> Any:
    if typing.get_origin(annotation) is Literal:
        return click.Choice(typing.get_args(annotation))
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return next(kind for kind in typing.get_args(annotation) if kind is not type(None))
    return annotation


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--model", "model_path", required=True, help="A local folder or a hub id.")
@click.option("--worker-id", default=lambda: f"w-{secrets.token_hex(3)}", help="Default: drawn.")
@click.option(
    "--generation", type=click.IntRange(0), default=None, help="Grows with every start. Default: the time in ms."
)
@click.option("--role", type=click.Choice([role.value for role in Role]), default="unified", show_default=True)
@click.option("--tp", type=click.IntRange(1), default=1, show_default=True)
@click.option("--pp", type=click.IntRange(1), default=1, show_default=True)
@click.option("--host", default="127.0.0.1", show_default=True, help="Where to bind, and how peers reach it.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, show_default=True, help="0: any free one.")
@click.option("--node", default="", help="The host's name, for links within a node.")
@click.option("--cluster", default="headrace", show_default=True)
@click.option(
    "--revision", default=STABLE, show_default=True, help="Of these settings: what a canary is told apart by."
)
@click.option("--redis-url", default=None, help="Default: nothing is published.")
@click.option("--redis-budget-seconds", type=float, default=0.25, show_default=True)
@click.option("--lease-seconds", type=float, default=5.0, show_default=True)
@click.option(
    "--grace-seconds", type=click.FloatRange(0), default=30.0, show_default=True, help="How long a drain waits."
)
@click.option(
    "--gpu-hour-price", type=click.FloatRange(0), default=None, help="Of one GPU: what tokens cost is measured."
)
@click.option("--otlp-endpoint", default=None, help="Where spans go: grpc:// or http(s)://. Default: none are made.")
@click.option("--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option("--metrics-port", type=click.IntRange(0, 65535), default=None, help="Serves /metrics there.")
@click.option("--fault-hooks", is_flag=True, help="Takes Control.Faults. For tests.")
@options_of(EngineConfig)
@options_of(HandoffConfig)
def main(**options: Any) -> None:
    """Runs one worker."""
    configure(options["log_format"])
    try:
        spec = spec_of(options)
        identity = Identity.of(spec)
        uvloop.run(_run(spec, identity, options["grace_seconds"], options["metrics_port"]))
    except ConfigError as error:
        raise click.UsageError(error.message) from error
    except HeadraceError as error:
        raise click.ClickException(f"{error.type}: {error.message}") from error
    except OSError as error:
        raise click.ClickException(f"{spec.host}:{spec.port}: {error}") from error


def spec_of(options: dict[str, Any]) -> WorkerSpec:
    """ConfigError names the option that is out of its range."""
    check_endpoint(options["otlp_endpoint"])
    generation = options["generation"]
    direct = ("worker_id", "model_path", "cluster", "redis_url", "redis_budget_seconds", "lease_seconds")
    place = ("host", "port", "node", "fault_hooks", "gpu_hour_price", "otlp_endpoint", "log_format", "revision")
    return WorkerSpec(
        generation=int(time.time() * 1000) if generation is None else generation,
        role=Role(options["role"]),
        layout=ParallelLayout(options["tp"], options["pp"]),
        engine=_section(EngineConfig, options),
        handoff=_section(HandoffConfig, options),
        **{name: options[name] for name in (*direct, *place)},
    )


def _section(section: Any, options: dict[str, Any]) -> Any:
    try:
        return section(**{name: options[name] for name in section.model_fields})
    except ValidationError as error:
        first = error.errors()[0]
        option = "--" + str(first["loc"][0]).replace("_", "-")
        raise ConfigError(f"{option}: {first['msg']}, got {first['input']!r}", key=option) from error


async def _run(spec: WorkerSpec, identity: Identity, grace_seconds: float, metrics_port: int | None) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    executor = await asyncio.to_thread(build_executor, spec)
    registry = CollectorRegistry()
    if metrics_port is not None:
        start_http_server(metrics_port, spec.host, registry)
    await serve(
        spec,
        executor,
        identity=identity,
        ready=_say_ready,
        stop=stop,
        grace_seconds=grace_seconds,
        registry=registry,
    )


def _say_ready(info: WorkerInfo) -> None:
    print(f"ready {info.worker_id} {info.address}", flush=True)


def _run_and_end() -> NoReturn:
    """All is closed when main() is over, but for threads that sit in calls of a communication library which never return:
    an ordinary end of the interpreter aborts over them, and the exit code is lost."""
    code: int | str | None = 1
    try:
        main()
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    _run_and_end()
