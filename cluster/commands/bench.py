"""`headrace bench`: open-loop load on a cluster that runs here, or on any server of OpenAI's completions.

The control plane and load tests do not import each other, so this is a door: it finds the cluster's address as `headrace
chat` does, and becomes the process that makes the load.
"""

import json
import os
import pathlib
import sys
from dataclasses import asdict
from typing import Any

import click

from cluster.commands.status import read
from cluster.commands.tls_options import tls_options
from headrace.tls import TLS_VARIABLE, ClientTls

ABOVE_NOUGHT = click.FloatRange(min=0, min_open=True)
AT_LEAST_ONE = click.IntRange(min=1)


@click.command(name="bench")
@click.option("--cluster", help="The cluster's name; not needed when there is one.")
@click.option("--address", help="A router's gRPC address, instead of a cluster that runs here.")
@click.option(
    "--url", help="A server of OpenAI's /v1/completions, ours or another's, instead of a cluster that runs here."
)
@click.option("--http", is_flag=True, help="The cluster that runs here over HTTP and not over gRPC.")
@click.option("--model", help="The model's name; the first that is served, unless given.")
@click.option("--api-key", envvar="HEADRACE_API_KEY", help="Or $HEADRACE_API_KEY.")
@tls_options
@click.option(
    "--trace", help="Replay these requests: Azure .csv or Mooncake .jsonl, with the prefixes that they share."
)
@click.option(
    "--shape", help="Or made traffic: smooth (the default), shared-block, hot-prefix, long-among, short-among, paced."
)
@click.option("--bend", help="Arrivals as bursts, ramp or day instead of Poisson or the trace's own.")
@click.option(
    "--rate", type=ABOVE_NOUGHT, help="Requests a second; of a trace its own, unless given; of made traffic 1."
)
@click.option("--rates", help="Several, one after the other, such as 1,2,4: a throughput–latency curve and its knee.")
@click.option("--seconds", type=ABOVE_NOUGHT, help="Of traffic at each rate.  [default: 60]")
@click.option("--requests", type=AT_LEAST_ONE, help="At each rate, instead of --seconds.")
@click.option("--input-tokens", type=AT_LEAST_ONE, help="Of each prompt, instead of the traffic's own lengths.")
@click.option("--output-tokens", type=AT_LEAST_ONE, help="Of each answer, instead of the traffic's own lengths.")
@click.option("--slo", help="What a good request is, such as ttft=0.5,tpot=50ms.  [default: ttft=3,tpot=50ms]")
@click.option(
    "--warmup", type=click.FloatRange(min=0), help="Seconds at the start that do not count.  [default: a tenth]"
)
@click.option("--timeout", type=ABOVE_NOUGHT, help="Seconds that a request may take.  [default: 600]")
@click.option("--seed", type=int, help="Of arrivals and lengths: the same seed, the same traffic.  [default: 0]")
@click.option(
    "--salt",
    type=click.IntRange(0, 2**30 - 1),
    help="Of tokens; drawn unless given, so that no earlier run's prompts are found in a cache.",
)
@click.option(
    "--out", help="A folder for JSON, plots and an HTML report; a sweep that was interrupted goes on from there."
)
@click.option("--dry-run", is_flag=True, help="Show what would be sent, and send nothing.")
def command(
    cluster: str | None,
    address: str | None,
    url: str | None,
    http: bool,
    api_key: str | None,
    tls: ClientTls | None,
    rate: float | None,
    rates: str | None,
    out: str | None,
    dry_run: bool,
    **traffic: Any,
) -> None:
    """Send open-loop load, and say what came of it: TTFT, TPOT, ITL, goodput with 95 % intervals.

    Requests go out at their times whether or not earlier ones were answered, and latencies count from then. Failed,
    shed and timed-out requests are not good ones. It says so when the load generator itself is the bottleneck.
    """
    if rate is not None and rates is not None:
        raise click.UsageError("give either --rate or --rates")
    if address is not None and url is not None:
        raise click.UsageError("give either --address or --url")
    if traffic["trace"] is not None and traffic["shape"] is not None:
        raise click.UsageError("give either --trace or --shape")
    plan = {name: value for name, value in traffic.items() if value is not None}
    plan["edge"], plan["address"], found = _target(cluster, address, url, http, dry_run)
    if rate is not None:
        plan["rates"] = (rate,)
    elif rates is not None:
        plan["rates"] = rates
    if out is not None:
        plan["out"] = str(pathlib.Path(out))
    plan["dry_run"] = dry_run
    tls = tls or found
    environment = {**os.environ, "HEADRACE_API_KEY": api_key or ""}
    environment[TLS_VARIABLE] = json.dumps(asdict(tls)) if tls is not None else ""
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, "-m", "loadtests.open_loop", json.dumps(plan)], environment)


def _target(
    cluster: str | None, address: str | None, url: str | None, http: bool, dry_run: bool
) -> tuple[str, str, ClientTls | None]:
    """(edge, where, how it is met by TLS as far as that is known). A dry run needs none."""
    if url is not None:
        return "http", url, None
    if address is not None:
        return "grpc", address, None
    if dry_run:
        return "grpc", "", None
    session = read(cluster)
    return *(("http", session.http_url) if http else ("grpc", session.grpc_address)), session.client_tls
