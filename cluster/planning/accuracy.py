"""How far predictions are from simulations:  python -m cluster.planning.accuracy --out docs/benchmarks/plan-accuracy.json

Random plans: models, cards, layouts, lengths, bursts, pools, and how busy those are. What is compared is a prediction and
a run of the production router under a virtual clock, on the same requests. Errors are predicted ÷ simulated − 1.
"""

import argparse
import json
import pathlib
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from random import Random
from typing import Any

from cluster.planning.asked import TokensAsked, TrafficAsked
from cluster.planning.check import simulate
from cluster.planning.gpus import measured
from cluster.planning.load import Length, Load, Pools, Target
from cluster.planning.memory import Budget, budget
from cluster.planning.options import Option, worker_of
from cluster.planning.prediction import Overload, Prediction
from cluster.planning.shapes import KNOWN, Precision
from cluster.planning.traffic import Traffic, gap_scv, of
from headrace.values import ParallelLayout

CONTEXT = 32_768
NUM_REQUESTS = 800
MODELS = {"meta-llama/Llama-3.1-8B": 1, "Qwen/Qwen3-32B": 2, "meta-llama/Llama-3.1-70B": 4}


def case(seed: int) -> tuple[Option, Traffic, Load, Target] | None:
    """A random plan; None where its pools never catch up, whatever the rate."""
    random = Random(f"plan {seed}")
    model = KNOWN[random.choice(list(MODELS))]
    gpu, precision = measured(random.choice(("h100", "h200"))), Precision()
    layout = ParallelLayout(MODELS[model.name])
    found = budget(model, gpu, layout, precision, context_tokens=CONTEXT)
    if not isinstance(found, Budget):
        return None
    worker = worker_of(model, gpu, found, precision, num_links=layout.tp, max_num_seqs=256, max_step_tokens=8192)
    asked = TrafficAsked(
        requests_per_second=1.0,
        input_tokens=TokensAsked(mean=10 ** random.uniform(2.5, 3.9), cv=random.choice((0.0, 0.5, 1.0))),
        output_tokens=TokensAsked(mean=10 ** random.uniform(1.3, 2.3), cv=random.choice((0.0, 0.5, 1.0))),
        burstiness=random.choice((1.0, 1.0, 2.0)),
    )
    traffic = of(asked, max_context_tokens=CONTEXT, num_rows=2 * NUM_REQUESTS, seed=seed)
    if random.random() < 0.35:
        kind, pools = "aggregated", Pools(unified=random.choice((1, 2, 3, 4, 6)))
    else:
        kind, pools = "disaggregated", Pools(random.choice((1, 2, 3, 4, 6)), random.choice((1, 1, 2, 3)))
    option = Option(kind, gpu, found, found, worker, worker, pools, pools, "")  # type: ignore[arg-type]
    busy = random.uniform(0.2, 0.85)
    target = Target(2.0, 0.04)
    # The run's own requests: what is left is the error of the prediction, not of a sample.
    rows = traffic.rows[:NUM_REQUESTS]
    lengths = [Length(row.input_tokens, row.output_tokens) for row in rows]
    peak = Load(1.0, lengths, gap_scv(rows))
    load = replace(peak, requests_per_second=_rate_at(option, peak, target, busy))
    return option, traffic, load, target


def _rate_at(option: Option, load: Load, target: Target, busy: float) -> float:
    """Requests a second at which the busier pool is this busy."""
    low, high = 1e-3, 1e4
    for _ in range(50):
        middle = (low * high) ** 0.5
        found = option.predict(option.pools, replace(load, requests_per_second=middle), target)
        over = isinstance(found, Overload) or max(found.prefill_busy, found.decode_busy) > busy
        low, high = (low, middle) if over else (middle, high)
    return low


def compare(seed: int) -> dict[str, Any] | None:
    made = case(seed)
    if made is None:
        return None
    option, traffic, load, target = made
    predicted = option.predict(option.pools, load, target)
    if not isinstance(predicted, Prediction):
        return None
    stay = predicted.ttft_mean_seconds + predicted.tpot_mean_seconds * traffic.output_tokens
    simulated = simulate(
        option.pools,
        option.prefill,
        option.decode,
        traffic,
        load.requests_per_second,
        target,
        num_requests=NUM_REQUESTS,
        max_context_tokens=CONTEXT + 512,
        stay_seconds=stay,
        seed=seed,
    )
    if simulated.scale < 1 or simulated.unfinished:
        return None
    errors = {
        f"{name}_{key}": ours[key] / theirs[key] - 1
        for name, ours, theirs in (
            ("ttft", predicted.ttft_seconds, simulated.ttft_seconds),
            ("tpot", predicted.tpot_seconds, simulated.tpot_seconds),
        )
        for key in ("p50", "p90", "p99")
        if theirs.get(key)
    }
    errors["goodput"] = predicted.attainment - simulated.attainment
    return {
        "seed": seed,
        "gpu": option.gpu.name,
        "layout": option.layouts,
        "pools": asdict(option.pools),
        "kind": option.kind,
        "requests_per_second": load.requests_per_second,
        "input_tokens": traffic.input_tokens,
        "output_tokens": traffic.output_tokens,
        "gap_scv": load.gap_scv,
        "prefill_busy": predicted.prefill_busy,
        "decode_busy": predicted.decode_busy,
        "errors": errors,
        "predicted": {
            "ttft": predicted.ttft_seconds,
            "tpot": predicted.tpot_seconds,
            "attainment": predicted.attainment,
        },
        "simulated": {
            "ttft": simulated.ttft_seconds,
            "tpot": simulated.tpot_seconds,
            "attainment": simulated.attainment,
        },
    }


def distribution(found: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Of each error: median, the middle 80 % of cases, and the share of cases within 15 %."""
    names = sorted({name for one in found for name in one["errors"]})
    return {name: _spread(sorted(one["errors"][name] for one in found if name in one["errors"])) for name in names}


def _spread(values: list[float]) -> dict[str, float]:
    def at(share: float) -> float:
        return values[min(int(share * len(values)), len(values) - 1)]

    within = sum(abs(value) <= 0.15 for value in values) / len(values)
    return {"p10": at(0.1), "p50": at(0.5), "p90": at(0.9), "within_15_percent": within, "cases": float(len(values))}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--cases", type=int, default=60)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--commit", default="", help="noted in the result")
    parser.add_argument("--out", type=pathlib.Path)
    arguments = parser.parse_args()
    started = time.process_time()
    found: list[dict[str, Any]] = []
    for seed in range(arguments.first, arguments.first + arguments.cases):
        one = compare(seed)
        if one is None:
            continue
        found.append(one)
        print(
            json.dumps({key: one[key] for key in ("seed", "kind", "gpu", "pools", "prefill_busy", "errors")}),
            flush=True,
        )
        if arguments.out is not None:
            result = {
                "command": " ".join(["python -m cluster.planning.accuracy", *sys.argv[1:]]),
                "commit": arguments.commit,
                "date": datetime.now(UTC).date().isoformat(),
                "cpu_seconds": round(time.process_time() - started, 1),
                "all": distribution(found),
                **{
                    kind: distribution([case for case in found if case["kind"] == kind])
                    for kind in ("disaggregated", "aggregated")
                },
                "cases": found,
            }
            arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
