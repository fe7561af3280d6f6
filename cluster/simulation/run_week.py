"""A week of traffic before the production autoscaler, and what it cost.

    python -m cluster.simulation.run_week [--days 7] [--seed 1] [--rate 150] [--spots] [--json out.json]

`cluster.simulation.week` says what is simulated.
"""

import argparse
import json
import pathlib
import sys
from dataclasses import asdict

from cluster.scaling.values import Size
from cluster.simulation.fluid import World
from cluster.simulation.spots import spots
from cluster.simulation.week import Traffic, clairvoyant, coarse_up, fewest, follow
from headrace.goodput import Slo


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--days", type=float, default=7.0)
    parser.add_argument("--rate", type=float, default=150.0, help="requests a second at the peak of a day")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--card", default="h200")
    parser.add_argument(
        "--spots", action="store_true", help="moments of it again, request by request, and nothing else"
    )
    parser.add_argument("--json", type=pathlib.Path, help="writes what was found")
    arguments = parser.parse_args()
    world = World.of(arguments.card)
    traffic = Traffic.of(arguments.days, arguments.rate, arguments.seed)
    rules = world.rules(most=64)
    first = fewest(world, coarse_up(float(traffic.rates[0])))
    ours = follow(world, traffic, rules, {"prefill": Size(first.prefill), "decode": Size(first.decode)})
    if arguments.spots:
        slo = Slo(world.target.ttft_seconds, world.target.tpot_seconds)
        print(json.dumps([asdict(spot) for spot in spots(arguments.card, slo, traffic, ours, arguments.seed)]))
        return 0
    least, theirs = clairvoyant(world, traffic, rules.target.attainment)
    constant = follow(
        world,
        Traffic.constant(24, arguments.rate / 2, arguments.seed),
        rules,
        {"prefill": Size(1), "decode": Size(1)},
    )
    steady = {hour: number for hour, number in constant.changes.items() if hour >= 1}
    found = {
        "days": arguments.days,
        "rate": arguments.rate,
        "seed": arguments.seed,
        "arrivals": ours.arrivals,
        "attainment": ours.attainment,
        "late": ours.late,
        "slow": ours.slow,
        "gpu_hours": ours.gpu_hours,
        "most_gpus": ours.most_gpus,
        "changes": sum(ours.changes.values()),
        "most_changes_an_hour": ours.most_changes_an_hour,
        "kinds": dict(ours.kinds),
        "clairvoyant_gpu_hours": least,
        "clairvoyant_attainment": theirs,
        "ratio": ours.gpu_hours / least,
        "constant_changes_an_hour": max(steady.values(), default=0),
        "constant_changes_a_day": sum(steady.values()),
        "constant_attainment": constant.attainment,
        "gpu_hours_by_cause": {cause: round(hours, 1) for cause, hours in ours.surplus.items()},
    }
    for name, value in found.items():
        print(f"{name:28} {value}", file=sys.stderr)
    print(json.dumps(found))
    if arguments.json:
        arguments.json.write_text(json.dumps({**found, "trace": ours.trace}), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
