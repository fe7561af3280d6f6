"""`headrace autoscale`: what the autoscaler sees and wants now, and why it did what it did."""

import asyncio
import json
import pathlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

import click
from rich.console import Group, RenderableType
from rich.table import Table

from cluster.autoscaler import sizes
from cluster.commands.screen import screen
from cluster.commands.status import described, read
from cluster.config_place import load
from cluster.scaling.decide import decide
from cluster.scaling.values import Recorded
from cluster.scaling_state import ScalingState
from cluster.session import Session
from cluster.state import BUDGET_SECONDS
from headrace.errors import ConfigError, InternalError
from headrace.store import connect
from router.decisions import codec

F = TypeVar("F", bound=Callable[..., None])
NONE = "nothing is recorded: autoscaling.mode is fixed, or no controller has led yet"


@click.group(name="autoscale")
def command() -> None:
    """What the autoscaler sees and wants, and why it did what it did."""


def cluster_options(function: F) -> F:
    """Options by which a cluster is found, as `headrace status` has them."""
    config = click.option(
        "--config",
        type=click.Path(path_type=pathlib.Path),
        help="A cluster that others run, by its headrace.yaml; its Redis also by $HEADRACE_REDIS_URL.",
    )
    name = click.option("--cluster", help="The cluster's name; not needed when there is one.")
    as_json = click.option("--json", "as_json", is_flag=True, help="As it was recorded.")
    return name(config(as_json(function)))


@command.command(name="status")
@cluster_options
def status(cluster: str | None, config: pathlib.Path | None, as_json: bool) -> None:
    """The last look: load, forecast, what is needed, what is there."""
    now, _ = _read(session_of(cluster, config))
    if now is None:
        raise ConfigError(NONE)
    if as_json:
        click.echo(json.dumps(codec.encode(now)))
    else:
        screen().print(_one(now, now.inputs.now))


@command.command(name="explain")
@click.argument("number", type=int, required=False)
@click.option("--last", type=click.IntRange(1), default=20, show_default=True, help="How many are listed.")
@click.option(
    "--file",
    "source",
    type=click.Path(path_type=pathlib.Path),
    help="Of a run that `explain --json` wrote down before.",
)
@click.option("--check", is_flag=True, help="Decide again on the recorded inputs; status 1 when one differs.")
@cluster_options
def explain(
    number: int | None,
    last: int,
    source: pathlib.Path | None,
    check: bool,
    cluster: str | None,
    config: pathlib.Path | None,
    as_json: bool,
) -> None:
    """The last decisions; or one, by its NUMBER: its inputs, the alternatives, what came of it."""
    now, decisions = (None, _written(source)) if source is not None else _read(session_of(cluster, config))
    if number is not None:
        decisions = [one for one in decisions if one.number == number]
    if not decisions:
        raise ConfigError(NONE if number is None else f"no decision {number} is recorded")
    decisions = decisions[-last:]
    if as_json:
        click.echo(json.dumps([codec.encode(one) for one in decisions]))
    else:
        at = now.inputs.now if now is not None else decisions[-1].inputs.now
        screen().print(_one(decisions[0], at) if number is not None else _list(decisions, at))
    if check:
        verify(decisions)


def verify(decisions: Sequence[Recorded]) -> None:
    """InternalError names those that this version decides otherwise."""
    other = [one.number for one in decisions if decide(one.inputs) != one.decision]
    if other:
        raise InternalError(f"decided otherwise from the same inputs: {', '.join(map(str, other))}")
    click.echo(f"{len(decisions)} decided again, the same", err=True)


def session_of(cluster: str | None, config: pathlib.Path | None) -> Session:
    return read(cluster) if config is None else described(load(config), config)


def _written(source: pathlib.Path) -> list[Recorded]:
    """ConfigError when it is not what `explain --json` of this version writes."""
    try:
        return [codec.decode(Recorded, one) for one in json.loads(source.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"--file: {source} holds no decisions of this version: {error}", key="--file") from error


def _read(session: Session) -> tuple[Recorded | None, list[Recorded]]:
    async def both() -> tuple[Recorded | None, list[Recorded]]:
        store = connect(session.redis_url, BUDGET_SECONDS)
        try:
            state = ScalingState(store, session.cluster)
            return await state.now(), await state.decisions()
        finally:
            await store.close()

    return asyncio.run(both())


def _list(decisions: Sequence[Recorded], now: float) -> RenderableType:
    table = Table("number", "ago", "what", "sizes", "load", "outcome", box=None)
    for one in decisions:
        decision, traffic = one.decision, one.inputs.traffic
        what = decision.kind if not decision.notes else f"{decision.kind}: {decision.notes[0]}"
        load_ = f"{traffic.per_second:.3g}/s" if traffic.routers else "unknown"
        table.add_row(
            str(one.number), _ago(now - one.inputs.now), what, sizes(decision.pools), load_, one.outcome or "under way"
        )
    return table


def _one(one: Recorded, now: float) -> RenderableType:
    inputs, decision = one.inputs, one.decision
    traffic, forecast = inputs.traffic, inputs.forecast
    head = f"decision {one.number}, {_ago(now - inputs.now)} ago" if one.number else "no decision yet"
    lines = [
        f"{head} · {inputs.rules.mode} · {decision.kind} · {one.outcome or 'under way'}",
        f"because  {decision.reason}",
        *(f"note     {note}" for note in decision.notes),
        f"load     {traffic.per_second:.3g} requests/s of {traffic.input_tokens:.0f} + {traffic.output_tokens:.0f} tokens, "
        f"{traffic.hit_rate:.0%} cached, burstiness {traffic.gap_scv:g}; {traffic.queued} wait, the oldest for "
        f"{traffic.oldest_queued_seconds:.1f} s"
        if traffic.routers
        else "load     unknown: no router reports",
        f"targets  {traffic.attainment:.1%} of {traffic.judged} kept them (TTFT missed by {traffic.missed_ttft:.1%}, "
        f"TPOT by {traffic.missed_tpot:.1%}); {inputs.rules.target.attainment:.1%} are wanted, at TTFT "
        f"{inputs.rules.target.ttft_seconds:g} s, TPOT {inputs.rules.target.tpot_seconds:g} s",
        f"ahead    {forecast.peak:.3g}/s: now {forecast.level:.3g}, trend {forecast.trend:.3g}, season "
        + (f"{forecast.season:.3g} of {forecast.days} days" if forecast.days else "unknown yet"),
    ]
    pools = Table(
        "pool", "desired", "to be", "advised", "ready", "lent", "start", "no room", "leave", "KV", "decode", box=None
    )
    for name, seen in inputs.pools.items():
        pools.add_row(
            name,
            str(seen.desired),
            str(decision.pools.get(name, "")),
            str(decision.advised.get(name, "")),
            str(seen.ready),
            str(seen.ready_lent),
            str(seen.starting),
            f"{seen.pending}" + (f" for {seen.pending_seconds:.0f} s" if seen.pending else ""),
            str(seen.leaving),
            f"{seen.kv_used:.0%}",
            str(seen.decoding.sequences),
        )
    others = Table("instead", "GPUs", "would keep the targets", "why not", box=None)
    for other in decision.alternatives:
        kept = "queues without end" if other.attainment is None else f"{other.attainment:.1%}"
        others.add_row(other.what, str(other.gpus), kept, other.why_not)
    return Group("\n".join(lines), pools, *([others] if decision.alternatives else []))


def _ago(seconds: float) -> str:
    return str(timedelta(seconds=round(max(seconds, 0))))
