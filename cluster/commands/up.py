"""`headrace up`: a cluster in the foreground, or (--detach) in the background once it serves."""

import asyncio
import contextlib
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TextIO

import click
from rich.console import Console
from rich.markup import escape

from cluster.config_place import load
from cluster.launch import Report, Step, running, watch
from cluster.progress import json_lines, shown, write_line
from cluster.session import Session, SessionFolder
from cluster.signals import Interrupted, Signals, raised
from headrace.config import ClusterConfig
from headrace.errors import HeadraceError

Ready = Callable[[Session], None]


@click.command(name="up")
@click.argument("config", type=click.Path(path_type=pathlib.Path), default="headrace.yaml")
@click.option("--detach", "in_background", is_flag=True, help="Return once it serves; `headrace down` ends it.")
@click.option("--json", "as_json", is_flag=True, help="Progress as JSON lines.")
@click.option("--progress-fd", type=int, hidden=True)
def command(config: pathlib.Path, in_background: bool, as_json: bool, progress_fd: int | None) -> None:
    """Start the cluster that CONFIG describes: Redis, Ray, workers, router.

    CONFIG is a YAML file, headrace.yaml unless named; see examples/. Runs until Ctrl-C.
    """
    if progress_fd is not None:
        _in_background(config, progress_fd)
        return
    console = Console(stderr=as_json)
    if in_background:
        session = detach(config, as_json, console)
    else:
        session = None
        with reporting(as_json, console) as report:
            serve(load(config), config.resolve(), report, lambda started: say_ready(started, as_json, console))
    if session is not None:
        say_ready(session, as_json, console)


def serve(config: ClusterConfig, path: pathlib.Path, report: Report, ready: Ready) -> None:
    """Runs the cluster until a signal asks for its end (an ordinary way out; Interrupted while it does not serve yet) or
    it cannot go on (an error)."""

    async def serving() -> None:
        signals = Signals(report)
        serves = False
        folder = SessionFolder(config.name, until_exit=True)
        try:
            async with running(config, str(path), folder, signals.report) as cluster:
                serves = True
                ready(cluster.session)
                await watch(cluster, signals.report)
        except asyncio.CancelledError:
            if signals.received is None:
                raise
            report(Step("end", "nothing is left", done=True))
            if not serves:
                raise Interrupted(signals.received) from None

    asyncio.run(serving())


def detach(config: pathlib.Path, as_json: bool, console: Console) -> Session:
    """Starts `up` in a session of its own and follows it until it serves."""
    folder = SessionFolder(load(config).name)
    folder.path.mkdir(parents=True, exist_ok=True, mode=0o700)
    reading, writing = os.pipe()
    command = [sys.executable, "-m", "cluster.cli", "up", str(config.resolve()), "--progress-fd", str(writing)]
    with raised(), reporting(as_json, console) as report:
        with folder.log("up").open("ab") as log:
            process = subprocess.Popen(
                command,
                pass_fds=(writing,),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        os.close(writing)
        with os.fdopen(reading, encoding="utf-8") as lines:
            try:
                return _follow(lines, report, folder)
            except Interrupted:
                process.terminate()
                with contextlib.suppress(HeadraceError):
                    _follow(lines, report, folder)
                process.wait()
                raise


def _follow(lines: TextIO, report: Report, folder: SessionFolder) -> Session:
    for line in lines:
        event: dict[str, Any] = json.loads(line)
        if "session" in event:
            return Session(**event["session"])
        if "error" in event:
            raise HeadraceError(event["error"])
        report(Step(**event))
    raise HeadraceError(f"it ended before it served: see {folder.log('up')}")


def _in_background(config: pathlib.Path, progress_fd: int) -> None:
    """The other end of detach: progress goes to the pipe until it serves, and to the log from then on."""
    pipe = os.fdopen(progress_fd, "w", encoding="utf-8")
    to_pipe, to_log = json_lines(pipe), json_lines(sys.stderr)

    def report(step: Step) -> None:
        (to_log if pipe.closed else to_pipe)(step)

    def ready(session: Session) -> None:
        write_line(pipe, {"session": asdict(session)})
        pipe.close()

    try:
        serve(load(config), config, report, ready)
    except HeadraceError as error:
        if not pipe.closed:
            write_line(pipe, {"error": " ".join(error.message.split())})
        raise


def reporting(as_json: bool, console: Console) -> contextlib.AbstractContextManager[Report]:
    return contextlib.nullcontext(json_lines(sys.stdout)) if as_json else shown(console)


def say_ready(session: Session, as_json: bool, console: Console) -> None:
    if as_json:
        write_line(sys.stdout, {"session": asdict(session.shown())})
        return
    where = f"{session.http_url}/v1 (OpenAI) and {session.grpc_address} (gRPC)"
    console.print(f"\n[bold]{escape(session.model_name)}[/] is served at {escape(where)}.", soft_wrap=True)
    if session.console_url:
        console.print(f"What it does, live: {escape(session.console_url)}", soft_wrap=True)
    console.print("Talk to it with `headrace chat`; end it with `headrace down`.", soft_wrap=True)
