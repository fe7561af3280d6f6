"""`headrace canary`: a second revision beside what serves: begin it, see how it does, give it more, keep it, end it."""

import asyncio
import json
import pathlib
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import click
from rich.console import Group, RenderableType
from rich.table import Table

from cluster.canary import operators
from cluster.canary.evidence import decode_sides
from cluster.canary.judge import judge, timed
from cluster.canary.report import Standing, figures
from cluster.canary.store import CanaryState
from cluster.canary.values import Event, State
from cluster.commands.autoscale import cluster_options, session_of
from cluster.commands.screen import screen
from cluster.config_place import load
from cluster.session import Session
from cluster.state import BUDGET_SECONDS
from headrace.config_file import check_canary
from headrace.errors import ConfigError, InternalError
from headrace.reports import RevisionCounts
from headrace.store import connect
from router.decisions import codec

T = TypeVar("T")
TRIES = 5
NONE = "there never was a canary in this cluster"


@click.group(name="canary")
def command() -> None:
    """A second revision beside what serves: begin it, see how it does, give it more, keep it, end it."""


@command.command(name="status")
@cluster_options
def status(cluster: str | None, config: pathlib.Path | None, as_json: bool) -> None:
    """The last canary: where it stands, and both revisions over the same time."""
    _show(session_of(cluster, config), as_json)


@command.command(name="start")
@click.option("--percent", type=float, help="Of the conversations, instead of canary.percent.")
@cluster_options
def start(percent: float | None, cluster: str | None, config: pathlib.Path | None, as_json: bool) -> None:
    """Begin the canary that the file's section `canary` describes."""
    session = session_of(cluster, config)
    path = pathlib.Path(session.config_path) if config is None else config
    whole = load(path)
    canary = whole.canary
    if canary is None:
        raise ConfigError(f"{path}: canary: must be given: it says what to begin", key="canary")
    check_canary(whole, canary, str(path))
    _ask(session, lambda state, now: operators.start(state, whole, canary, percent, now), as_json)


@command.command(name="set-share")
@click.argument("percent", type=float)
@cluster_options
def set_share(percent: float, cluster: str | None, config: pathlib.Path | None, as_json: bool) -> None:
    """Give it another share, in PERCENT of the conversations; 0 holds it."""
    _ask(session_of(cluster, config), lambda state, now: operators.set_share(state, percent, now), as_json)


@command.command(name="promote")
@click.option("--force", is_flag=True, help="Though it does not count as good yet.")
@cluster_options
def promote(force: bool, cluster: str | None, config: pathlib.Path | None, as_json: bool) -> None:
    """Replace the workers of what serves by its own, one at a time."""
    _ask(session_of(cluster, config), lambda state, now: operators.promote(state, now, force=force), as_json)


@command.command(name="abort")
@click.option("--reason", default="", help="Kept with the record.")
@cluster_options
def abort(reason: str, cluster: str | None, config: pathlib.Path | None, as_json: bool) -> None:
    """Take its share away; its workers finish what they have and end."""
    _ask(session_of(cluster, config), lambda state, now: operators.abort(state, reason, now), as_json)


@command.command(name="explain")
@click.option("--check", is_flag=True, help="Judge again from the recorded counts; status 1 when one differs.")
@cluster_options
def explain(check: bool, cluster: str | None, config: pathlib.Path | None, as_json: bool) -> None:
    """What happened to the last canaries, and the figures that it rests on."""

    async def read(redis: CanaryState) -> tuple[list[Event], float]:
        return await redis.events(), await redis.time()

    events, now = _asked(session_of(cluster, config), read)
    if not events:
        raise ConfigError(NONE)
    if as_json:
        click.echo(json.dumps([codec.encode(event) for event in events]))
    else:
        screen().print(_events(events, now))
    if check:
        verify(events)


def verify(events: Sequence[Event]) -> None:
    """InternalError names the judgements that this version makes otherwise."""
    judged = [event for event in events if event.judgement is not None]
    other = [event for event in judged if _judged_again(event) != event.judgement]
    if other:
        names = ", ".join(f"{event.state.canary.revision} {event.state.phase.value}" for event in other)
        raise InternalError(f"judged otherwise from the same counts: {names}")
    click.echo(f"{len(judged)} judged again, the same", err=True)


def _judged_again(event: Event) -> object:
    sides, its, look = decode_sides(event.counts), event.state.canary, event.judgement.look if event.judgement else 0
    nothing = RevisionCounts()
    return judge(its, sides.get(event.state.base, nothing), sides.get(its.revision, nothing), look)


def _asked(session: Session, ask: Callable[[CanaryState], Awaitable[T]]) -> T:
    async def asking() -> T:
        store = connect(session.redis_url, BUDGET_SECONDS)
        try:
            return await ask(CanaryState(store, session.cluster))
        finally:
            await store.close()

    return asyncio.run(asking())


def _ask(session: Session, word: Callable[[State | None, float], operators.Asked], as_json: bool) -> None:
    """Writes what an operator asks for, over what stands there now."""

    async def write(redis: CanaryState) -> None:
        for _ in range(TRIES):
            found = await redis.known()
            if await redis.ask(found, *word(found.state, await redis.time())):
                return
        raise InternalError("the canary's state changes all the time: nothing was written")

    _asked(session, write)
    _show(session, as_json)


def _show(session: Session, as_json: bool) -> None:
    async def read(redis: CanaryState) -> Standing | None:
        await redis.known()
        return await redis.standing()

    standing = _asked(session, read)
    if standing is None:
        raise ConfigError(NONE)
    shown = figures(standing)
    if as_json:
        click.echo(json.dumps(shown))
    else:
        screen().print(_one(shown))


def _one(its: dict[str, Any]) -> RenderableType:
    revision, base = its["revision"], its["base"]
    lines = [
        f"canary {its['number']} · {revision} beside {base} · {its['phase']} for {_ago(its['since_seconds'])}",
        f"because  {its['reason']}",
        f"share    {its['percent']:g} % of the conversations, {its['wanted_percent']:g} % wanted",
        f"workers  {', '.join(f'{name} {number}' for name, number in its['pools'].items())}; {its['failures']} failed, "
        f"{its['max_failures']} end it",
        f"compared {_ago(its['window_seconds'])}, looked at {_times(its['looks'])}: {its['verdict']} "
        f"(at {its['confidence']:.0%} over all looks)",
    ]
    both = Table("", "requests", "failed", "in target", "TTFT 50·90·99 %", "TPOT 50·90·99 %", "tokens", box=None)
    for side in its["sides"]:
        times = [" · ".join(map(_ms, side[what].values())) for what in ("ttft", "tpot")]
        parts = [_part(side["failed_part"]), _part(side["attainment"])]
        both.add_row(side["name"], f"{side['requests']:,}", *parts, *times, f"{side['generated_tokens']:,}")
    shown: list[RenderableType] = ["\n".join(lines), both]
    if its["tests"]:
        tests = Table("test", "verdict", "at least", "at most", "allowed", box=None)
        for test in its["tests"]:
            bounds = [f"{test[name]:.3g}" if test[name] is not None else "-" for name in ("low", "high", "limit")]
            tests.add_row(test["name"], test["verdict"], *bounds)
        shown.append(tests)
    else:
        shown.append(f"nothing is judged below {its['min_requests']} requests of each")
    return Group(*shown)


def _events(events: Sequence[Event], now: float) -> RenderableType:
    table = Table("canary", "ago", "revision", "was", "is", "because", box=None)
    for event in events:
        its = event.state
        was = event.before or "-"
        table.add_row(str(its.number), _ago(now - event.at), its.canary.revision, was, its.phase.value, its.reason)
    return table


def _ago(seconds: float) -> str:
    return str(timedelta(seconds=round(max(seconds, 0))))


def _ms(seconds: float | None) -> str:
    return timed(seconds) if seconds is not None else "-"


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def _part(part: float | None) -> str:
    return f"{part:.1%}" if part is not None else "-"
