"""What several routers cost: hit rate, balance and TTFT by their number, with and without telling each other of placements.

    python -m cluster.simulation.copies --trace FILE --out docs/benchmarks/sim-routers.json --plot sim-routers.png

`--plot` alone draws what is in --out. A stretch of the trace each seed, the same for every number of routers.
"""

import argparse
import json
import pathlib
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from cluster.simulation import cards, compare
from cluster.simulation.fleet import Fleet
from headrace import generators, traces
from headrace.goodput import Slo
from headrace.pyplot import pyplot


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--trace", type=pathlib.Path)
    parser.add_argument("--requests", type=int, default=1000, help="of the trace, from a place that the seed chooses")
    parser.add_argument("--rates", default="8,12,16", help="requests a second")
    parser.add_argument("--routers", default="1,3,8", help="how many")
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--card", default="h100")
    parser.add_argument("--block-size", type=int, default=128)
    parser.add_argument("--commit", default="", help="noted in the result")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--plot", type=pathlib.Path)
    arguments = parser.parse_args()
    if arguments.trace is not None:
        _measure(arguments)
    if arguments.plot is not None:
        draw(json.loads(arguments.out.read_text(encoding="utf-8")), arguments.plot)


def _measure(arguments: argparse.Namespace) -> None:
    card, scale = cards.load(arguments.card), arguments.block_size / 32
    card = replace(card, num_blocks=int(card.num_blocks / scale), block_bytes=int(card.block_bytes * scale))
    fleet = Fleet(card, prefill=8, decode=8, block_size=arguments.block_size)
    rows, _ = traces.within(traces.read(arguments.trace), fleet.max_context_tokens)
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    numbers = [int(number) for number in arguments.routers.split(",")]
    ways = [(number, told) for number in numbers for told in ((True,) if number == 1 else (True, False))]
    runs: list[dict[str, Any]] = []
    started = time.process_time()
    for seed in seeds:
        for rate in map(float, arguments.rates.split(",")):
            stretch = generators.window(rows, arguments.requests, seed)
            stretch = generators.scaled(stretch, rate / generators.rate(stretch))
            for number, told in ways:
                fleet = replace(fleet, routers=number, told=told)
                summary, _ = compare.run(fleet, "ours", stretch, slo=Slo(), seed=seed)
                runs.append({"routers": number, "told": told, "rate": rate, "seed": seed, **summary.as_json()})
                print(
                    f"{rate:g}/s seed {seed}, {number} routers, told {told}: {summary.hit_rate:.3f} hits, "
                    f"balance {summary.balance['prefill']:.2f}, TTFT p90 {summary.ttft_seconds['p90']:.2f} s",
                    flush=True,
                )
    result = {
        "trace": arguments.trace.name,
        "requests_per_run": arguments.requests,
        "fleet": {"card": card.as_json(), "prefill": 8, "decode": 8, "block_size": fleet.block_size},
        "message_seconds": fleet.router.message_seconds,
        "event_seconds": fleet.event_seconds,
        "commit": arguments.commit,
        "command": " ".join(["python -m cluster.simulation.copies", *sys.argv[1:]]),
        "date": datetime.now(UTC).date().isoformat(),
        "seeds": list(seeds),
        "cpu_seconds": round(time.process_time() - started, 1),
        "runs": runs,
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def mean(runs: Sequence[Mapping[str, Any]], name: str) -> float:
    """Of all these runs: a summary's figure."""
    values = [_figure(run, name) for run in runs]
    return sum(values) / len(values)


def _figure(run: Mapping[str, Any], name: str) -> float:
    match name:
        case "balance":
            return float(run["balance"]["prefill"])
        case "ttft_p90":
            return float(run["ttft_seconds"]["p90"])
        case _:
            return float(run[name])


def draw(result: Mapping[str, Any], path: pathlib.Path) -> None:
    """Hit rate, balance and p90 TTFT over the number of routers, a line a rate; dashed: they tell each other nothing."""
    plt = pyplot()
    runs = result["runs"]
    numbers = sorted({run["routers"] for run in runs})
    panels = (
        ("hit_rate", "of prompt tokens, cached"),
        ("balance", "busiest prefill worker ÷ mean"),
        ("ttft_p90", "TTFT p90, s"),
    )
    figure, all_axes = plt.subplots(1, len(panels), figsize=(14, 4.5), layout="constrained")
    for axes, (name, title) in zip(all_axes, panels, strict=True):
        for at, rate in enumerate(sorted({run["rate"] for run in runs})):
            for told in (True, False):
                of = [
                    [r for r in runs if (r["routers"], r["rate"]) == (n, rate) and (n == 1 or r["told"] is told)]
                    for n in numbers
                ]
                label = f"{rate:g} a second" + ("" if told else ", untold")
                axes.plot(
                    numbers, [mean(one, name) for one in of], "o-" if told else "o--", color=f"C{at}", label=label
                )
        axes.set(xlabel="routers", ylabel=title, xticks=numbers)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    all_axes[0].legend()
    figure.suptitle(
        f"{result['trace']}, 8 + 8 workers, {len(result['seeds'])} stretches of {result['requests_per_run']}"
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main()
