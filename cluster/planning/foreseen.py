"""What one pool and two would do with traffic by the model, before a GPU has: runs as `loadtests.disagg` keeps them, of
virtual workers behind production's placement.

    python -m cluster.planning.foreseen --traces azure=FILE.csv --deployments 1P1D:2048 1P1D+tight/256:2048 2U:256 \
        --targets tight=1,0.012 --rates 30 36 42 --state RUNS
    python -m loadtests.disagg --judge "2 × H200 by the model" --state RUNS --out docs/benchmarks/disagg-sim-h200.json

Deployments are named as there; placement is production's for all of them, and knows targets where an SLO is named, or with
`--least-load` the bench's own. How well the model knows GPUs is in docs/planning.md. It has no gaps between tokens:
`smooth` is judged without them.
"""

import argparse
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from cluster.planning.measured import WARM_UP, bench_placement, with_workers
from cluster.simulation import cards
from cluster.simulation.fleet import Fleet, Simulation
from cluster.simulation.policies import POLICIES, Policy
from cluster.simulation.results import Served, Tally
from headrace.deployments import Deployment
from headrace.generators import at_rate
from headrace.traces import TraceRow, read, within
from router.decisions.tenants import Targets

CONTEXT = 32_768
Answer = tuple[float, float | None, None]


def fleet_of(deployment: Deployment, card: str, targets: Mapping[str, Targets]) -> Fleet:
    """Its workers, and a router that knows its targets."""
    fleet = replace(
        with_workers(Fleet(cards.load(card), unified=1), deployment), decode_step_tokens=deployment.decode_chunk
    )
    if deployment.targets:
        fleet = replace(fleet, router=replace(fleet.router, targets=targets[deployment.targets]))
    return fleet


def answers(rows: Sequence[TraceRow], fleet: Fleet, placement: Callable[[int], Policy]) -> list[Answer | None]:
    """(TTFT, TPOT, no gaps) of each request that came after the warm-up; None where it did not finish."""
    tally = Tally(fleet.roles)
    Simulation(fleet, placement, tally).run(rows)
    return [_answer(one) for one in tally.served if one.arrived_at >= WARM_UP * rows[-1].seconds]


def _answer(one: Served) -> Answer | None:
    if one.outcome != "finished" or one.first_token_at is None or one.ended_at is None:
        return None
    steps = one.num_generated - 1
    tpot = round((one.ended_at - one.first_token_at) / steps, 6) if steps else None
    return round(one.first_token_at - one.arrived_at, 6), tpot, None


def _targets(text: str) -> tuple[str, Targets]:
    name, _, seconds = text.partition("=")
    ttft, tpot = map(float, seconds.split(","))
    return name, Targets(ttft, tpot)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--traces", nargs="+", metavar="NAME=FILE", required=True)
    parser.add_argument(
        "--deployments", nargs="+", type=Deployment.parse, metavar="2U:512|1P1D+tight/256:2048", required=True
    )
    parser.add_argument("--rates", nargs="+", type=float, required=True, help="requests a second, all GPUs")
    parser.add_argument("--targets", nargs="*", type=_targets, default=[], metavar="NAME=TTFT,TPOT", help="seconds")
    parser.add_argument("--card", default="h200", choices=cards.names())
    parser.add_argument("--run-seconds", type=float, default=20.0)
    parser.add_argument("--least-load", action="store_true", help="place as the bench does without an SLO's name")
    parser.add_argument("--state", type=pathlib.Path, required=True, help="to which runs are added")
    arguments = parser.parse_args()
    placement = bench_placement if arguments.least_load else POLICIES["ours"]
    for trace, path in (each.split("=", 1) for each in arguments.traces):
        rows, too_long = within(read(pathlib.Path(path)), CONTEXT)
        for deployment in arguments.deployments:
            name, chunk = deployment.name, deployment.chunk
            fleet = fleet_of(deployment, arguments.card, dict(arguments.targets))
            for rate in arguments.rates:
                chosen = at_rate(rows, round(rate * arguments.run_seconds), rate)
                found = answers(chosen, fleet, placement)
                run = {
                    "trace": trace,
                    "deployment": name,
                    "chunk": chunk,
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
