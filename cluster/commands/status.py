"""`headrace status`: the pools, who is in them, what they do, how they reach each other."""

import asyncio
import contextlib
import json
import os
import pathlib
from dataclasses import asdict, replace

import click
from rich.console import Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from cluster.commands.screen import screen
from cluster.config_place import load
from cluster.session import Session, SessionFolder, find, remembered
from cluster.snapshot import Snapshot, WorkerStatus, take
from headrace.config import ClusterConfig
from headrace.errors import ConfigError

WATCH_SECONDS = 1.0
COLORS = {"ready": "green", "starting": "yellow", "draining": "yellow", "drained": "yellow", "dead": "red"}


@click.command(name="status")
@click.option("--cluster", help="The cluster's name; not needed when there is one.")
@click.option(
    "--config",
    type=click.Path(path_type=pathlib.Path),
    help="Instead: a cluster that others run, by its headrace.yaml; its Redis also by $HEADRACE_REDIS_URL.",
)
@click.option("--watch", is_flag=True, help="Keep looking, once a second, until Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="One object; with --watch one a line.")
def command(cluster: str | None, config: pathlib.Path | None, watch: bool, as_json: bool) -> None:
    """Show every pool and worker: role, load, KV blocks, hand-offs, and each link with the reason for its kind.

    Ends with 1 where Redis does not answer, so that nobody knows who works; workers that fail are a picture like any other.
    """
    session = read(cluster) if config is None else described(load(config), config)
    if watch:
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(_follow_lines(session) if as_json else _follow(session))
        return
    snapshot = asyncio.run(take(session))
    if as_json:
        _say(snapshot)
    else:
        screen().print(_render(snapshot))
    if snapshot.blind:
        raise click.exceptions.Exit(1)


def read(cluster: str | None) -> Session:
    """The session of a cluster that runs. ConfigError says what to do when there is none."""
    folder = find(cluster)
    session = folder.read()
    if session is None or not folder.running:
        raise ConfigError(f"{folder.cluster} does not run any more: clean up with `headrace down`")
    return session


def described(config: ClusterConfig, path: pathlib.Path) -> Session:
    """A session that nobody wrote; where neither the file nor the environment names a Redis, that of the cluster of this
    name which runs here. ConfigError when there is none either."""
    url = os.environ.get("HEADRACE_REDIS_URL") or config.redis.url
    if url is None:
        folder = SessionFolder(config.name)
        session = folder.read()
        if session is None or not folder.running:
            raise ConfigError(
                "redis.url must be given, or $HEADRACE_REDIS_URL: it is where workers are found (no cluster "
                f"{config.name!r} runs here)",
                key="redis.url",
            )
        return session
    router = config.router
    return Session(
        cluster=config.name,
        pid=0,
        config_path=str(path),
        model_name=config.model_name,
        http_url=router.http_url(),
        grpc_address=router.grpc_address(),
        redis_url=url,
        ready=True,
        tls=remembered(router.tls),
    )


async def _follow(session: Session) -> None:
    with Live(refresh_per_second=4) as live:
        while True:
            live.update(_render(await take(session)))
            await asyncio.sleep(WATCH_SECONDS)


async def _follow_lines(session: Session) -> None:
    while True:
        _say(await take(session))
        await asyncio.sleep(WATCH_SECONDS)


def _say(snapshot: Snapshot) -> None:
    # What is a set, as a list in order: JSON has none.
    click.echo(json.dumps(asdict(replace(snapshot, session=snapshot.session.shown())), default=sorted))


def _render(snapshot: Snapshot) -> RenderableType:
    session = snapshot.session
    where = escape(f"{session.model_name}  {session.http_url}/v1  {session.grpc_address}")
    head = f"[bold]{session.cluster}[/]  {where}"
    if not session.ready:
        head += "  [yellow]starting[/]"
    if snapshot.controller:
        head += f"\n[red]controller: {escape(snapshot.controller)}[/]"
    return Group(head, _workers(snapshot), *_notes(snapshot))


def _workers(snapshot: Snapshot) -> Table:
    """A line for each pool, and one for each of its workers. Blocks are counts; hand-offs those in and out."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for column in ("WORKER", "ROLE", "LAYOUT", "STATE", "CHECK"):
        table.add_column(column, no_wrap=True)
    for column in ("RUN/WAIT", "USED", "CACHED", "PINNED", "BLOCKS", "IN/OUT"):
        table.add_column(column, no_wrap=True, justify="right")
    for pool in sorted({*snapshot.desired, *(worker.record.pool for worker in snapshot.workers)}):
        members = [worker for worker in snapshot.workers if worker.record.pool == pool]
        ready = sum(worker.record.phase == "ready" for worker in members)
        wanted = f"/{snapshot.desired.get(pool, 0)}" if snapshot.desired else ""
        table.add_row(f"[bold]{pool}[/] {ready}{wanted}")
        for member in members:
            table.add_row(*_cells(member))
    return table


def _cells(worker: WorkerStatus) -> list[str]:
    record, report = worker.record, worker.report
    name = f"  {record.worker_id}.{record.generation}"
    state = f"[{COLORS.get(record.phase, 'white')}]{record.phase}[/]"
    cells = [name, report.role if report else record.role, record.layout, state, worker.check.partition(":")[0]]
    if report is None:
        return cells
    load, blocks = report.load, report.blocks
    counts = (blocks.active, blocks.cached, blocks.pinned, blocks.total)
    handoffs = f"{report.num_handoffs_in}/{report.num_handoffs_out}"
    return [*cells, f"{load.num_running}/{load.num_waiting}", *map(str, counts), handoffs]


def _notes(snapshot: Snapshot) -> list[str]:
    """Why a worker is not there, what one waits for, or is wrong with it; and each link with the reason for its kind."""
    notes = [f"[red]{worker_id}[/] {escape(reason)}" for worker_id, reason in sorted(snapshot.failures.items())]
    for worker in snapshot.workers:
        report = worker.report
        reason = worker.silence or worker.record.reason or (report.unhealthy_reason if report else "")
        if reason:
            notes.append(f"[yellow]{worker.record.worker_id}[/] {escape(reason)}")
        if ":" in worker.check:
            notes.append(f"[yellow]{worker.record.worker_id}[/] self-check {worker.check}")
        notes += [
            f"{worker.record.worker_id} ← {link.worker_id}  {link.kind}, {link.state}, "
            f"{link.num_bytes / 2**20:.1f} MiB moved: {escape(link.reason)}"
            for link in (report.links if report else ())
        ]
    return notes
