"""`headrace replay-decision`: logged placements made again by the `place` that routers run."""

import json
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import click

from headrace.errors import ConfigError
from router.decisions.record import Decision, from_data


@click.command(name="replay-decision")
@click.argument("log", type=click.Path(exists=True, dir_okay=False, path_type=pathlib.Path))
@click.option("--request", "request_id", help="Only the decisions of this request.")
@click.option(
    "--set",
    "changes",
    multiple=True,
    metavar="WORKER.FIELD=VALUE",
    help="Change what the log says of a worker first, such as p0.draining=true, p0.load.waiting_prefill_tokens=0 or "
    "p0.cost.prefill_token_seconds=1e-4; may be given often. Differing is no failure then.",
)
@click.option("--json", "as_json", is_flag=True, help="An object for each decision, one a line.")
def command(log: pathlib.Path, request_id: str | None, changes: tuple[str, ...], as_json: bool) -> None:
    """Make the placements in LOG again, from the logged views, and say which come out otherwise: workers, candidates,
    prices, all of it. The status is 1 when any does.

    LOG is one file of router.decision_log; its older files are LOG.1, LOG.2, ….
    """
    num_made = num_differ = 0
    for place, data in _read(log):
        try:
            logged = from_data(data)
            if request_id not in (None, logged.request_id):
                continue
            for change in changes:
                _change(data["decision"]["view"]["workers"], change)
            made = from_data(data).again()
        except ValueError as error:
            raise ConfigError(f"{place}: {error}") from error
        num_made += 1
        num_differ += made != logged
        _say(logged, made, as_json)
    if not num_made:
        raise ConfigError(f"{log} holds no decision{f' of request {request_id!r}' if request_id else ''}")
    if not as_json:
        click.echo(f"{num_made} decisions made again, {num_differ} differ")
    if num_differ and not changes:
        sys.exit(1)


def _read(log: pathlib.Path) -> Iterator[tuple[str, Any]]:
    """Each line with where it stands. One that is no JSON was cut off, by a full disk or a kill, or is not written to its
    end yet: it is passed over."""
    with log.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                data = json.loads(line)
            except ValueError:
                click.echo(f"{log}, line {number}: passed over, it is not whole", err=True)
                continue
            yield f"{log}, line {number}", data


def _change(workers: Sequence[dict[str, Any]], change: str) -> None:
    """Sets one field of one worker's view, as it stands in the log. A field that is not there is no field."""
    target, equals, value = change.partition("=")
    for worker in workers:
        name = worker["info"]["worker_id"]
        if not equals or not target.startswith(f"{name}."):
            continue
        *path, field = target.removeprefix(f"{name}.").split(".")
        part: Any = worker
        for step in path:
            part = part.get(step) if isinstance(part, dict) else None
        if not isinstance(part, dict) or field not in part:
            raise click.UsageError(f"--set {change}: there is no {'.'.join((*path, field))} in a worker's view")
        try:
            part[field] = json.loads(value)
        except ValueError:
            part[field] = value
        return
    names = ", ".join(worker["info"]["worker_id"] for worker in workers)
    raise click.UsageError(f"--set {change}: must be WORKER.FIELD=VALUE, of one of {names or 'no workers'}")


def _say(logged: Decision, made: Decision, as_json: bool) -> None:
    same = made == logged
    if as_json:
        object_ = {"request_id": logged.request_id, "attempt": logged.key.attempt, "same": same}
        click.echo(json.dumps(object_ | {"logged": _shown(logged), "made": _shown(made)}))
    elif same:
        click.echo(f"{logged.request_id} attempt {logged.key.attempt}: {_shown(made)}")
    elif _shown(made) != _shown(logged):
        click.echo(f"{logged.request_id} attempt {logged.key.attempt}: {_shown(logged)}, now {_shown(made)}")
    else:
        click.echo(f"{logged.request_id} attempt {logged.key.attempt}: {_shown(made)}, by other figures")


def _shown(decision: Decision) -> str:
    chosen = decision.why.chosen
    if chosen is None:
        return f"nowhere ({decision.refused})"
    way = f"{decision.prefill} → {decision.decode}" if decision.prefill is not None else f"{decision.decode} alone"
    return f"{way} at {chosen.price_seconds * 1e3:,.3f} ms"
