"""`headrace bench`, without the part that looks up a cluster: python -m loadtests.open_loop '{"edge": "http", …}'

The argument is a Plan as JSON, with `out` (a folder) and `dry_run` beside it. The API key is $HEADRACE_API_KEY. Errors are
one line on stderr and status 1; 130 when it was interrupted.
"""

import json
import os
import pathlib
import random
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import uvloop
from rich.console import Console

from headrace.errors import ConfigError, HeadraceError
from headrace.tls import TLS_VARIABLE, ClientTls
from headrace.traces import Prompts
from loadtests import report
from loadtests.open_loop import html, pictures, process
from loadtests.open_loop.answers import Answer, Outcome, asks
from loadtests.open_loop.client import Client
from loadtests.open_loop.grpc_client import grpc_client
from loadtests.open_loop.http_client import http_client
from loadtests.open_loop.plan import VOCAB_SIZE, Plan, Source
from loadtests.open_loop.show import TABLE_WIDTH, Showing, dry, notes, table
from loadtests.open_loop.sweep import Folder, Point, result, sweep

PACKAGES = ("headrace", "grpcio", "httptools", "uvloop", "numpy")


def main() -> int:
    try:
        return bench(json.loads(sys.argv[1]))
    except HeadraceError as error:
        print(f"headrace: {' '.join(error.message.split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("headrace: interrupted; rates that were through are kept where --out was given", file=sys.stderr)
        return 130


def bench(given: Mapping[str, Any]) -> int:
    given = dict(given)
    out, dry_run = given.pop("out", None), given.pop("dry_run", False)
    folder = Folder(pathlib.Path(out)) if out is not None else None
    kept = folder.kept_plan() if folder is not None else None
    if "salt" not in given:
        given["salt"] = kept["salt"] if kept is not None else random.SystemRandom().randrange(2**30)
    plan = Plan.of(given)
    console = Console()
    console.width = max(console.width, TABLE_WIDTH)
    if dry_run:
        source = Source(plan)
        for rate in source.rates:
            console.print("\n".join(dry(source.at(rate))), highlight=False)
        return 0
    process.ready()
    plan, points = uvloop.run(_measured(plan, folder, Console(stderr=True)))
    console.print(table(points))
    console.print(
        f"SLO: TTFT {plan.slo.ttft_seconds:g} s, TPOT {plan.slo.tpot_seconds * 1e3:g} ms; ± is half of the 95 % interval",
        highlight=False,
    )
    said = result(plan, points, _environment())
    for line in (said["knee"]["said"] if len(points) > 1 else "", *notes(points)):
        if line:
            console.print(line, highlight=False, soft_wrap=True)
    if folder is not None:
        _write(folder, plan, points, said, console)
    if not any(point.summary.outcomes[Outcome.FINISHED] for point in points):
        raise ConfigError(f"none of {sum(point.summary.num_requests for point in points)} requests was answered")
    return 0


async def _measured(plan: Plan, folder: Folder | None, console: Console) -> tuple[Plan, list[Point]]:
    """The plan with its model, and what came of it. Nothing is written before the server has answered."""
    key = os.environ.get("HEADRACE_API_KEY") or None
    tls = ClientTls(**json.loads(said)) if (said := os.environ.get(TLS_VARIABLE)) else None
    opened: AbstractAsyncContextManager[Client] = (
        grpc_client(plan.address, model=plan.model, api_key=key, tls=tls)
        if plan.edge == "grpc"
        else http_client(plan.address, model=plan.model, api_key=key, tls=tls)
    )
    async with opened as client:
        served = await client.served()
        plan = replace(plan, model=served.model)
        source = Source(plan, served.max_context_tokens)
        await _tried(client, source)
        if folder is not None:
            folder.open(plan)
        return plan, await sweep(plan, source, client, folder, Showing(console))


async def _tried(client: Client, source: Source) -> None:
    """One token of a first prompt: what the server refuses of it, it would refuse of all."""
    first = source.at(source.rates[0]).rows[0]
    (ask,) = asks([replace(first, number=first.number + 2**31, prefix_ids=(), output_tokens=1)], Prompts(VOCAB_SIZE))
    await client.prepare(ask)(Answer(0, 0.0, lambda: 0.0))


def _environment() -> dict[str, Any]:
    return {"bench": "load", "hardware": report.cpu(), "commit": report.commit(), "versions": report.versions(PACKAGES)}


def _write(folder: Folder, plan: Plan, points: Sequence[Point], said: dict[str, Any], console: Console) -> None:
    folder.keep_result(said)
    picture = None
    if find_spec("matplotlib") is None:
        console.print("no plots: they need matplotlib, pip install 'headrace[plots]'", highlight=False)
    else:
        picture = pictures.draw(plan, points)
        (folder.path / "curve.png").write_bytes(picture)
    (folder.path / "report.html").write_text(html.page(plan, points, said, picture), encoding="utf-8")
    console.print(f"kept in {folder.path}: result.json, report.html", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
