"""What the planner's model says of traffic that GPUs have served, beside what they did with it:

    python -m cluster.planning.measured --out docs/benchmarks/plan-measured-h200.json

Each run that `loadtests.disagg` kept is simulated with its own requests, workers, chunks and placement. The cost model
knows none of these runs: it is fitted to what one engine, its kernels and one pair of workers did
(`cluster.simulation.cards`). `without` says what each part of the model is worth: the same runs with that part as a
simpler model has it.
"""

import argparse
import json
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from random import Random
from typing import Any

from cluster.planning.check import card
from cluster.planning.gpus import BASIS, find
from cluster.planning.memory import Budget, budget
from cluster.planning.options import worker_of
from cluster.planning.shapes import Precision
from cluster.simulation.fleet import Fleet, Simulation
from cluster.simulation.policies import Simple, prompt_load, sequence_load
from cluster.simulation.results import Served, Tally
from headrace import traces
from headrace.deployments import Deployment
from headrace.devicecost import DeviceCost
from headrace.generators import at_rate
from headrace.goodput import Slo, percentiles
from headrace.traces import TraceRow
from headrace.values import ParallelLayout, Role
from router.decisions.view import WorkerView

ROOT = pathlib.Path(__file__).resolve().parents[2]
TRACES = {"azure": ROOT / "examples" / "azure_sample.csv"}  # the first rows of what the kept runs played
WARM_UP = 0.2  # of a run's traffic, which its `seconds` leave out
JUDGED = ("p50", "p90")
SLOS = {
    f"{ttft:g} s, {tpot:g} ms": Slo(ttft, tpot / 1e3)
    for ttft, tpot in ((1.0, 8.0), (1.0, 9.0), (1.0, 10.0), (1.0, 12.0), (1.0, 20.0), (0.5, 30.0))
}


@dataclass(frozen=True, slots=True)
class Found:
    """Of one run: by name (`ttft_p50` and so on in seconds; `kept …`, the share of requests within an SLO)."""

    predicted: Mapping[str, float]
    measured: Mapping[str, float]

    @property
    def errors(self) -> dict[str, float]:
        """Predicted ÷ measured − 1."""
        return {name: self.predicted[name] / value - 1 for name, value in self.measured.items() if value}


def kept_runs(path: pathlib.Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def rows_of(run: Mapping[str, Any], files: Mapping[str, pathlib.Path]) -> list[TraceRow]:
    """The beginning of the trace with its time stretched to the rate, as the bench plays it."""
    rows = traces.read(files[run["trace"]])
    count = round(run["seconds"] / (1 - WARM_UP) * run["rate"]) + 1
    if count > len(rows):
        raise SystemExit(f"{run['trace']}: the run played {count} rows, and {files[run['trace']]} has {len(rows)}")
    return at_rate(rows, count, run["rate"])


def fleet_of(run: Mapping[str, Any], gpu_name: str) -> Fleet:
    """The run's workers; as there, decode workers compute no prompts."""
    gpu, precision = find(gpu_name, 1.0), Precision()
    found = budget(BASIS, gpu, ParallelLayout(), precision, context_tokens=8192)
    assert isinstance(found, Budget)
    worker = worker_of(BASIS, gpu, found, precision, num_links=1, max_num_seqs=256, max_step_tokens=run["chunk"])
    fleet = Fleet(card(worker, gpu_name), unified=1)
    fleet = replace(fleet, router=replace(fleet.router, local_prefill_max_tokens=0))
    return with_workers(fleet, Deployment.parse(f"{run['deployment']}:{run['chunk']}"))


def with_workers(fleet: Fleet, deployment: Deployment) -> Fleet:
    prefill, decode, unified = map(deployment.roles.count, (Role.PREFILL, Role.DECODE, Role.UNIFIED))
    return replace(fleet, prefill=prefill, decode=decode, unified=unified, max_step_tokens=deployment.chunk)


def bench_placement(seed: int) -> Simple:
    """Fewest prompt tokens on their way there, then fewest sequences; the first of equals."""

    def least(load: Callable[[WorkerView], float]) -> Callable[..., WorkerView]:
        return lambda ask, workers, prefix: min(workers, key=load)

    return Simple("bench", least(prompt_load), least(sequence_load))


def replay(rows: Sequence[TraceRow], fleet: Fleet) -> list[Served]:
    """The requests that came after a run's warm-up, as the model has them."""
    tally = Tally(fleet.roles)
    Simulation(fleet, bench_placement, tally).run(rows)
    begun = WARM_UP * rows[-1].seconds
    return [one for one in tally.served if one.arrived_at >= begun]


def compare(run: Mapping[str, Any], fleet: Fleet, files: Mapping[str, pathlib.Path] = TRACES) -> Found:
    answers = [(ttft, tpot) for ttft, tpot, _ in run["answers"]]
    served = [_latencies(one) for one in replay(rows_of(run, files), fleet)]
    if len(served) != len(answers):
        raise SystemExit(f"{run['deployment']} at {run['rate']:g}/s: {len(answers)} answers of {len(served)} requests")
    return Found(_summary(served), _summary(answers))


def _latencies(one: Served) -> tuple[float, float | None]:
    assert one.first_token_at is not None
    assert one.ended_at is not None
    steps = one.num_generated - 1
    return one.first_token_at - one.arrived_at, (one.ended_at - one.first_token_at) / steps if steps else None


def _summary(latencies: Sequence[tuple[float, float | None]]) -> dict[str, float]:
    ttft = percentiles([one for one, _ in latencies])
    tpot = percentiles([one for _, one in latencies if one is not None])
    kept = {f"kept {name}": sum(slo.met(*one) for one in latencies) / len(latencies) for name, slo in SLOS.items()}
    return {
        **{f"{name}_{p}": found[p] for name, found in (("ttft", ttft), ("tpot", tpot)) for p in ("p50", "p90", "p99")},
        **kept,
    }


class SumOfParts(DeviceCost):
    """A step with prompts and decodes takes what both would take alone, but for the smaller base."""

    def step_seconds(
        self,
        prefill_tokens: int,
        mean_context: float,
        num_sequences: int = 0,
        context_tokens: int = 0,
        *,
        padding_tokens: int = 0,
    ) -> float:
        tokens = prefill_tokens + padding_tokens
        computed = self.prefill_base_seconds + self.prefill_token_seconds * tokens
        attended = self.grid.attended(prefill_tokens, tokens + num_sequences)
        seconds = computed + self.prefill_token_context_seconds * attended * mean_context
        if num_sequences:
            seconds += self.decode_step_seconds(num_sequences, context_tokens)
            seconds -= min(self.decode_base_seconds, self.prefill_base_seconds)
        return seconds


def _sums(fleet: Fleet) -> Fleet:
    cost = fleet.card.cost
    parts = {one.name: getattr(cost, one.name) for one in fields(cost)}
    return replace(fleet, card=replace(fleet.card, cost=SumOfParts(**parts)))


WITHOUT: dict[str, Callable[[Fleet], Fleet]] = {
    "one reading of the weights for prompts and decodes": _sums,
    "padding to graphs": lambda fleet: replace(fleet, graph_tokens=()),
    "a result's way to the host": lambda fleet: replace(fleet, landing_seconds=0.0),
    "messages": lambda fleet: replace(fleet, router=replace(fleet.router, message_seconds=0.0)),
    "prompts of up to 64 tokens handed over too": lambda fleet: replace(
        fleet, router=replace(fleet.router, local_prefill_max_tokens=64)
    ),
}


def spread(found: Sequence[Found]) -> dict[str, dict[str, float]]:
    """Of each quantity's errors over all runs: the mean of their sizes, the largest one with its sign, and how many."""
    of = {
        "ttft": [error for one in found for name, error in one.errors.items() if name in _judged("ttft")],
        "tpot": [error for one in found for name, error in one.errors.items() if name in _judged("tpot")],
        "goodput": [error for one in found for name, error in one.errors.items() if name.startswith("kept")],
    }
    return {
        name: {
            "mean": sum(map(abs, errors)) / len(errors),
            "largest": max(errors, key=abs),
            "figures": float(len(errors)),
        }
        for name, errors in of.items()
    }


def _judged(name: str) -> set[str]:
    return {f"{name}_{p}" for p in JUDGED}


def report(
    path: pathlib.Path, gpu_name: str, files: Mapping[str, pathlib.Path], num_resampled: int = 400
) -> dict[str, Any]:
    runs = kept_runs(path)
    found = [compare(run, fleet_of(run, gpu_name), files) for run in runs]
    return {
        "runs": len(runs),
        "answers": sum(len(run["answers"]) for run in runs),
        "source": f"docs/benchmarks/{path.name}",
        "errors": spread(found),
        "chance": {
            name: sum(value) / len(value)
            for name in ("ttft_p50", "ttft_p90", "tpot_p50", "tpot_p90")
            if (value := [_chance(run["answers"], name, num_resampled) for run in runs])
        },
        "without": {
            name: spread([compare(run, change(fleet_of(run, gpu_name)), files) for run in runs])
            for name, change in WITHOUT.items()
        },
        "rows": [
            {
                "deployment": run["deployment"],
                "chunk": run["chunk"],
                "rate": run["rate"],
                "answers": len(run["answers"]),
                **{
                    name: {"predicted": one.predicted[name], "measured": value, "error": one.errors.get(name)}
                    for name, value in one.measured.items()
                },
            }
            for run, one in zip(runs, found, strict=True)
        ],
    }


def _chance(answers: Sequence[Sequence[float]], name: str, num_resampled: int) -> float:
    """By how much, relatively, this percentile of so few answers varies by chance: its deviation over resamples."""
    kind, percentile = name.split("_")
    values = [one[("ttft", "tpot").index(kind)] for one in answers if one[1] is not None]
    random = Random(name)
    drawn = [percentiles(random.choices(values, k=len(values)))[percentile] for _ in range(num_resampled)]
    mean = sum(drawn) / len(drawn)
    return float((sum((one - mean) ** 2 for one in drawn) / len(drawn)) ** 0.5 / mean)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--runs", type=pathlib.Path, default=ROOT / "docs" / "benchmarks" / "disagg-h200.jsonl")
    parser.add_argument(
        "--traces", nargs="*", default=[], metavar="NAME=FILE", help="as loadtests.disagg was given them"
    )
    parser.add_argument("--commit", default="", help="noted in the result")
    parser.add_argument("--out", type=pathlib.Path)
    arguments = parser.parse_args()
    named = dict(each.split("=", 1) for each in arguments.traces)
    files = {**TRACES, **{name: pathlib.Path(path) for name, path in named.items()}}
    result = {
        "command": " ".join(["python -m cluster.planning.measured", *sys.argv[1:]]),
        "commit": arguments.commit,
        "date": datetime.now(UTC).date().isoformat(),
        **report(arguments.runs, arguments.gpu, files),
    }
    print(json.dumps({name: result[name] for name in ("errors", "chance", "without")}, indent=1))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
