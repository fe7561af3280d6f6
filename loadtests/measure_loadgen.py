"""How much the load generator carries on one core, with a paced server on another: streams and tokens (`bench-operate`).

    python -m loadtests.measure_loadgen ADDRESS grpc|http SECONDS      # one run in a process of its own; prints JSON

All streams begin within RAMP_SECONDS and then go on together; figures are of the time in which all are open.
"""

import asyncio
import json
import os
import statistics
import subprocess
import sys
from contextlib import AbstractAsyncContextManager
from typing import Any

import uvloop

from headrace.traces import Prompts, TraceRow
from loadtests.bench_stream import process as child
from loadtests.open_loop import process
from loadtests.open_loop.answers import Outcome, asks
from loadtests.open_loop.client import Client
from loadtests.open_loop.grpc_client import grpc_client
from loadtests.open_loop.http_client import http_client
from loadtests.open_loop.loop import run
from loadtests.open_loop.measures import num_tokens_between
from loadtests.open_loop.strain import strains
from loadtests.report import Row

NUM_STREAMS, TOK_S = 2000, 20_000
OFFERED_TOK_S = 22_000  # what is sent at a pace arrives at that pace at best
RAMP_SECONDS, TOGETHER_SECONDS = 4.0, 10.0
TOKENS_PER_MESSAGE = 4
INPUT_TOKENS = 64


async def once(address: str, edge: str, seconds: float) -> dict[str, Any]:
    """One run: what it carried while all streams were open, and what that cost."""
    client: AbstractAsyncContextManager[Client] = (
        grpc_client(address) if edge == "grpc" else http_client(f"http://{address}")
    )
    output_tokens = round((RAMP_SECONDS + seconds) * OFFERED_TOK_S / NUM_STREAMS)
    rows = [TraceRow(at, at * RAMP_SECONDS / NUM_STREAMS, INPUT_TOKENS, output_tokens) for at in range(NUM_STREAMS)]
    async with client as served:
        await served.served()
        found = await run(asks(rows, Prompts(400)), served)
    begin = RAMP_SECONDS + 0.5
    end = min(answer.ended for answer in found.answers)
    effort = found.effort
    return {
        "streams": found.peak_in_flight,
        "finished": sum(answer.outcome is Outcome.FINISHED for answer in found.answers),
        "tok_s": num_tokens_between(found.answers, begin, end) / (end - begin),
        "cpu_share": effort.cpu_share,
        "late_p99_ms": statistics.quantiles(effort.lateness_seconds, n=100)[-1] * 1e3,
        "lag_p99_ms": statistics.quantiles(effort.lag_seconds, n=100)[-1] * 1e3,
        "strains": strains(effort),
    }


async def several(edge: str, num_runs: int) -> list[dict[str, Any]]:
    first, *others = sorted(os.sched_getaffinity(0))
    words = ("--grpc", "--tokens-per-message", str(TOKENS_PER_MESSAGE)) if edge == "grpc" else ()
    pace = ("--token-seconds", str(NUM_STREAMS / OFFERED_TOK_S))
    async with child("-m", "loadtests.paced_server", *pace, *words) as address:
        found = []
        for at in range(num_runs):
            command = [sys.executable, "-m", "loadtests.measure_loadgen", address, edge, str(TOGETHER_SECONDS)]
            done = await asyncio.to_thread(
                subprocess.run,
                command,
                check=True,
                stdout=subprocess.PIPE,
                preexec_fn=lambda: os.sched_setaffinity(0, {others[0] if others else first}),
            )
            found.append(json.loads(done.stdout))
            print(f"{edge} run {at + 1} of {num_runs}: {found[-1]}", file=sys.stderr, flush=True)
    return found


def measure(num_runs: int) -> list[Row]:
    """A run that strained the generator, or lost a stream, counts as nothing."""
    process.ready()
    rows = []
    for edge, suffix, note in (
        ("http", "", "SSE, an event for every token"),
        ("grpc", "_grpc", f"gRPC, {TOKENS_PER_MESSAGE} tokens a message"),
    ):
        runs = asyncio.run(several(edge, num_runs))
        sound = [not one["strains"] and one["finished"] == NUM_STREAMS for one in runs]
        detail = {
            key: statistics.median(one[key] for one in runs) for key in ("cpu_share", "late_p99_ms", "lag_p99_ms")
        }
        for name, key, unit, must in (
            ("streams", "streams", "streams", NUM_STREAMS),
            ("tok_s", "tok_s", "tok/s", TOK_S),
        ):
            samples = [float(one[key]) if fine else 0.0 for one, fine in zip(runs, sound, strict=True)]
            rows.append(
                Row(
                    f"loadgen_{name}{suffix}",
                    statistics.median(samples),
                    unit,
                    "higher",
                    must=must,
                    samples=samples,
                    note=f"{NUM_STREAMS} streams, {OFFERED_TOK_S} tok/s offered, one core; {note}",
                    detail=detail,
                )
            )
    return rows


if __name__ == "__main__":
    process.ready()
    print(json.dumps(uvloop.run(once(sys.argv[1], sys.argv[2], float(sys.argv[3])))))
