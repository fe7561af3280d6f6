"""The comparison behind docs/routing.md:  python -m cluster.simulation --trace FILE --out docs/benchmarks/sim-NAME.json

`--plot sim-NAME.png` draws it too. The file is written anew after each run. `--resume` goes on from what is in it, whose
fleet, traffic, SLO and capacity must be those that are asked for.
"""

import argparse
import json
import pathlib
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from cluster.simulation import cards, plots, sweep
from cluster.simulation.fleet import Fleet
from cluster.simulation.policies import POLICIES
from headrace import generators, traces
from headrace.errors import ConfigError
from headrace.goodput import Slo
from router.decisions.tenants import Targets

FRACTIONS = "0.2,0.4,0.6,0.8,1.0,1.2"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=pathlib.Path, required=True)
    parser.add_argument("--requests", type=int, default=4000, help="of the trace, from a place that the seed chooses")
    parser.add_argument("--fractions", default=FRACTIONS, help="of capacity")
    parser.add_argument("--seeds", type=int, default=5, help="how many")
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--card", default="h100")
    parser.add_argument("--prefill", type=int, default=8)
    parser.add_argument("--decode", type=int, default=8)
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--capacity", type=float, help="requests a second, if known")
    parser.add_argument("--capacity-from", type=float, help="requests a second where the search for it begins")
    parser.add_argument("--targets", action="store_true", help="the router knows the SLO: it is every request's class")
    parser.add_argument("--commit", default="", help="noted in the result")
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--resume", action="store_true", help="keep the runs that are in --out")
    parser.add_argument("--plot", type=pathlib.Path)
    arguments = parser.parse_args()
    card = cards.load(arguments.card)
    scale = arguments.block_size / 32
    card = replace(card, num_blocks=int(card.num_blocks / scale), block_bytes=int(card.block_bytes * scale))
    fleet = Fleet(card, prefill=arguments.prefill, decode=arguments.decode, block_size=arguments.block_size)
    rows, num_removed = traces.within(traces.read(arguments.trace), fleet.max_context_tokens)
    slo = Slo()
    if arguments.targets:
        targets = Targets(slo.ttft_seconds, slo.tpot_seconds)
        fleet = replace(fleet, router=replace(fleet.router, targets=targets))
    started = time.process_time()
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    asked = {
        "trace": arguments.trace.name,
        "requests_removed": num_removed,
        "requests_per_run": arguments.requests,
        "fleet": {
            "card": card.as_json(),
            "prefill": fleet.prefill,
            "decode": fleet.decode,
            "block_size": fleet.block_size,
            "targets": arguments.targets,
        },
        "slo": {"ttft_seconds": slo.ttft_seconds, "tpot_seconds": slo.tpot_seconds},
    }
    before = _before(arguments.out, asked) if arguments.resume and arguments.out is not None else {}
    per_second = before.get("capacity_per_second", arguments.capacity)
    if per_second is None:
        stretches = [generators.window(rows, arguments.requests, seed) for seed in seeds]
        per_second = sweep.capacity(fleet, stretches, slo, arguments.capacity_from or generators.rate(stretches[0]))
    print(f"capacity {per_second:.2f} requests a second", flush=True)

    def result(found: list[dict[str, Any]]) -> dict[str, Any]:
        seconds = before.get("cpu_seconds", 0.0) + time.process_time() - started
        return {
            **asked,
            "commit": arguments.commit,
            "command": " ".join(["python -m cluster.simulation", *sys.argv[1:]]),
            "date": datetime.now(UTC).date().isoformat(),
            "seeds": list(seeds),
            "capacity_per_second": per_second,
            "cpu_seconds": round(seconds, 1),
            "verdict": sweep.verdict(compared) if (compared := sweep.whole(found, policies)) else {},
            "runs": found,
        }

    def note(line: str, found: list[dict[str, Any]]) -> None:
        print(line, flush=True)
        if arguments.out is not None:
            arguments.out.write_text(json.dumps(result(found), indent=1) + "\n", encoding="utf-8")

    policies = arguments.policies.split(",")
    found = sweep.sweep(
        fleet,
        policies,
        [float(fraction) for fraction in arguments.fractions.split(",")],
        seeds,
        lambda seed: generators.window(rows, arguments.requests, seed),
        slo,
        per_second,
        note,
        before.get("runs", ()),
    )
    verdict = sweep.verdict(found)
    print(json.dumps({key: verdict[key] for key in ("ttft_p90_vs_best_other", "max_goodput_ratio")}))
    if arguments.plot is not None:
        plots.draw_sweep(result(found), arguments.plot)


def _before(path: pathlib.Path, asked: dict[str, Any]) -> dict[str, Any]:
    """What an earlier call left there, if any. ConfigError where it was asked for something else."""
    if not path.exists():
        return {}
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    differs = [name for name, value in asked.items() if found.get(name) != value]
    if differs:
        raise ConfigError(f"{path} holds runs of another {', '.join(differs)}: they cannot be continued")
    return found


if __name__ == "__main__":
    main()
