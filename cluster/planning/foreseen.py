"""What one pool and two would do with traffic by the model, before a GPU has: runs as `loadtests.disagg` keeps them, of
virtual workers behind production's placement.

    python -m cluster.planning.foreseen --traces azure=FILE.csv --deployments 1P1D:2048 2U:256 --rates 30 36 42 --state RUNS
    python -m loadtests.disagg --judge "2 × H200 by the model" --state RUNS --out docs/benchmarks/disagg-sim-h200.json

How well the model knows GPUs is in docs/planning.md. It has no gaps between tokens: `smooth` is judged without them.
"""

import argparse
import json
import pathlib
from collections.abc import Sequence
from dataclasses import replace

from cluster.planning.measured import WARM_UP
from cluster.simulation import cards
from cluster.simulation.fleet import Fleet, Simulation
from cluster.simulation.results import Tally
from cluster.simulation.router import Served
from headrace.traces import TraceRow, read, within

CONTEXT = 32_768
Answer = tuple[float, float | None, None]


def fleet_of(name: str, chunk: int, card: str) -> Fleet:
    """`2U`: of two workers that do both; `1P1D`: of one each."""
    if name.endswith("U"):
        return Fleet(cards.load(card), unified=int(name[:-1]), max_step_tokens=chunk)
    prefill, decode = map(int, name[:-1].split("P"))
    return Fleet(cards.load(card), prefill=prefill, decode=decode, max_step_tokens=chunk)


def rows_at(rows: Sequence[TraceRow], rate: float, seconds: float) -> list[TraceRow]:
    """The trace's beginning with its time stretched to the rate, as the bench plays it."""
    chosen = rows[: max(2, round(rate * seconds))]
    scale = (len(chosen) - 1) / rate / chosen[-1].seconds
    return [replace(row, seconds=row.seconds * scale) for row in chosen]


def answers(rows: Sequence[TraceRow], fleet: Fleet) -> list[Answer | None]:
    """(TTFT, TPOT, no gaps) of each request that came after the warm-up; None where it did not finish."""
    tally = Tally(fleet.roles)
    Simulation(fleet, "ours", tally).run(rows)
    return [_answer(one) for one in tally.served if one.arrived_at >= WARM_UP * rows[-1].seconds]


def _answer(one: Served) -> Answer | None:
    if one.outcome != "finished" or one.first_token_at is None or one.ended_at is None:
        return None
    steps = one.num_generated - 1
    tpot = round((one.ended_at - one.first_token_at) / steps, 6) if steps else None
    return round(one.first_token_at - one.arrived_at, 6), tpot, None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--traces", nargs="+", metavar="NAME=FILE", required=True)
    parser.add_argument("--deployments", nargs="+", metavar="2U:512|1P1D:2048", required=True)
    parser.add_argument("--rates", nargs="+", type=float, required=True, help="requests a second, all GPUs")
    parser.add_argument("--card", default="h200", choices=cards.names())
    parser.add_argument("--run-seconds", type=float, default=20.0)
    parser.add_argument("--state", type=pathlib.Path, required=True, help="to which runs are added")
    arguments = parser.parse_args()
    for trace, path in (each.split("=", 1) for each in arguments.traces):
        rows, too_long = within(read(pathlib.Path(path)), CONTEXT)
        for name, chunk in (each.split(":") for each in arguments.deployments):
            fleet = fleet_of(name, int(chunk), arguments.card)
            for rate in arguments.rates:
                chosen = rows_at(rows, rate, arguments.run_seconds)
                found = answers(chosen, fleet)
                run = {
                    "trace": trace,
                    "deployment": name,
                    "chunk": int(chunk),
                    "num_gpus": fleet.num_workers,
                    "rate": rate,
                    "seconds": (1 - WARM_UP) * chosen[-1].seconds,
                    "num_too_long": too_long,
                    "answers": found,
                }
                with arguments.state.open("a", encoding="utf-8") as lines:
                    lines.write(json.dumps(run) + "\n")
                print(f"  {trace} {name}:{chunk} at {rate:g}/s: {len(found)} requests", flush=True)


if __name__ == "__main__":
    main()
