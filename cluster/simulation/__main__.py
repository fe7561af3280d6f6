"""The comparison behind docs/routing.md:  python -m cluster.simulation --trace FILE --out docs/benchmarks/sim-NAME.json"""

import argparse
import json
import pathlib
import time
from dataclasses import replace

from cluster.simulation import cards, generators, sweep
from cluster.simulation.fleet import Fleet
from cluster.simulation.policies import POLICIES
from cluster.simulation.results import Slo
from headrace import traces

FRACTIONS = "0.2,0.4,0.6,0.8,1.0,1.2"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=pathlib.Path, required=True)
    parser.add_argument("--requests", type=int, default=4000, help="of the trace, from a place that the seed chooses")
    parser.add_argument("--fractions", default=FRACTIONS, help="of capacity")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--card", default="h100")
    parser.add_argument("--prefill", type=int, default=8)
    parser.add_argument("--decode", type=int, default=8)
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--capacity", type=float, help="requests a second, if known")
    parser.add_argument("--out", type=pathlib.Path)
    arguments = parser.parse_args()
    card = cards.load(arguments.card)
    scale = arguments.block_size / 32
    card = replace(card, num_blocks=int(card.num_blocks / scale), block_bytes=int(card.block_bytes * scale))
    fleet = Fleet(card, prefill=arguments.prefill, decode=arguments.decode, block_size=arguments.block_size)
    rows, num_removed = traces.within(traces.read(arguments.trace), fleet.max_context_tokens)
    slo = Slo()
    started = time.process_time()
    per_second = arguments.capacity
    if per_second is None:
        first = generators.window(rows, arguments.requests, 1)
        per_second = sweep.capacity(fleet, first, slo, generators.rate(first))
    print(f"capacity {per_second:.2f} requests a second", flush=True)
    seeds = range(1, arguments.seeds + 1)
    found = sweep.sweep(
        fleet,
        arguments.policies.split(","),
        [float(fraction) for fraction in arguments.fractions.split(",")],
        seeds,
        lambda seed: generators.window(rows, arguments.requests, seed),
        slo,
        per_second,
        lambda line: print(line, flush=True),
    )
    result = {
        "trace": arguments.trace.name,
        "requests_removed": num_removed,
        "requests_per_run": arguments.requests,
        "seeds": list(seeds),
        "fleet": {
            "card": card.as_json(),
            "prefill": fleet.prefill,
            "decode": fleet.decode,
            "block_size": fleet.block_size,
        },
        "slo": {"ttft_seconds": slo.ttft_seconds, "tpot_seconds": slo.tpot_seconds},
        "capacity_per_second": per_second,
        "cpu_seconds": round(time.process_time() - started, 1),
        "verdict": sweep.verdict(found),
        "runs": found,
    }
    print(json.dumps({key: result["verdict"][key] for key in ("ttft_p90_vs_best_other", "max_goodput_ratio")}))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
