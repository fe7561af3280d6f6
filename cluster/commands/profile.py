"""`headrace profile`: a torch trace of a live worker for some steps, and a table of what each cost."""

import asyncio
import json
import pathlib
from collections.abc import Iterable
from dataclasses import asdict, replace

import click
from rich.table import Table

from cluster.commands.screen import screen
from cluster.commands.status import described, read
from cluster.config_place import load
from cluster.leased import leased_workers
from cluster.session import Session
from cluster.worker_client import WorkerClient
from headrace.errors import InvalidRequest
from headrace.store import connect
from workers.ranks.profiles import MOST_STEPS, ProfiledStep, RankProfile

BUDGET_SECONDS = 2.0


@click.command(name="profile")
@click.argument("worker")
@click.option("--cluster", help="The cluster's name; not needed when there is one, or WORKER is HOST:PORT.")
@click.option(
    "--config",
    type=click.Path(path_type=pathlib.Path),
    help="Instead: a cluster that others run, by its headrace.yaml.",
)
@click.option(
    "--redis-url", envvar="HEADRACE_REDIS_URL", help="Of that cluster, instead of its own. Or $HEADRACE_REDIS_URL."
)
@click.option("--steps", type=click.IntRange(1, MOST_STEPS), default=50, show_default=True, help="How many.")
@click.option(
    "--seconds", type=click.FloatRange(0.1, 600), default=30.0, show_default=True, help="Ends with fewer after so long."
)
@click.option("--out", type=click.Path(path_type=pathlib.Path), default="trace.json.gz", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="One object instead of tables.")
def command(
    worker: str,
    cluster: str | None,
    config: pathlib.Path | None,
    redis_url: str | None,
    steps: int,
    seconds: float,
    out: pathlib.Path,
    as_json: bool,
) -> None:
    """Trace WORKER, an id or HOST:PORT, while it serves, and show for each step its tokens, CPU and GPU time, and idle.

    The trace opens in Perfetto or chrome://tracing; ranks other than 0 have files of their own beside it. While it is
    taken steps are somewhat slower.
    """
    session = None if ":" in worker else _session(cluster, config, redis_url)
    ranks = asyncio.run(_profile(worker, session, steps, seconds))
    for found in ranks:
        path = out if found.rank == 0 else out.with_name(f"rank{found.rank}-{out.name}")
        path.write_bytes(found.trace)
        if not as_json:
            _show(found)
            click.echo(f"rank {found.rank}: {len(found.steps)} steps, trace in {path}")
    if as_json:
        click.echo(
            json.dumps([{"rank": found.rank, "steps": [asdict(step) for step in found.steps]} for found in ranks])
        )


def _session(cluster: str | None, config: pathlib.Path | None, redis_url: str | None) -> Session:
    """Of the cluster whose Redis knows where the worker is."""
    if config is None:
        session = read(cluster)
    else:
        settings = load(config)
        url = redis_url or settings.redis.url
        session = described(
            settings.model_copy(update={"redis": settings.redis.model_copy(update={"url": url})}), config
        )
    return replace(session, redis_url=redis_url or session.redis_url)


async def _profile(worker: str, session: Session | None, steps: int, seconds: float) -> tuple[RankProfile, ...]:
    address = worker if session is None else await _address(worker, session)
    async with WorkerClient(address) as client:
        return await client.profile(steps, seconds)


async def _address(worker: str, session: Session) -> str:
    store = connect(session.redis_url, BUDGET_SECONDS)
    try:
        found = {leased.info.worker_id: leased.info.address for leased in await leased_workers(store, session.cluster)}
    finally:
        await store.close()
    if worker not in found:
        raise InvalidRequest.out_of_range("worker", worker, f"one of {', '.join(found) or 'no workers'}")
    return found[worker]


def _show(profile: RankProfile) -> None:
    table = Table(title=f"rank {profile.rank}")
    for name in ("step", "prefill tokens", "decode tokens", "CPU ms", "GPU ms", "idle ms"):
        table.add_column(name, justify="right")
    for step in profile.steps:
        table.add_row(str(step.number), *_cells([step]))
    if profile.steps:
        table.add_section()
        table.add_row("all", *_cells(profile.steps))
    screen().print(table)


def _cells(steps: Iterable[ProfiledStep]) -> list[str]:
    steps = list(steps)
    tokens = (sum(s.num_prefill_tokens for s in steps), sum(s.num_decode_tokens for s in steps))
    seconds = (sum(s.cpu_seconds for s in steps), sum(s.gpu_seconds for s in steps), sum(s.idle_seconds for s in steps))
    return [*map(str, tokens), *(f"{each * 1e3:.3f}" for each in seconds)]
