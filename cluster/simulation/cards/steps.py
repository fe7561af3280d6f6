"""What a card says of single steps beside what they took (docs/benchmarks/steps-CARD.json, by loadtests.gpu_steps):

    python -m cluster.simulation.cards.steps --out docs/benchmarks/steps-model-h200.json

Two numbers are fitted to such steps, and to those of a prompt alone: how much slower a program is that shares a context,
and how round the corner of the roofline is (headrace.devicecost). Steps that streams decode beside are not fitted to.
"""

import argparse
import json
import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from cluster.simulation import cards
from headrace.costmodel import CostModel
from headrace.devicecost import DeviceCost
from workers.scheduling.work import GRAPH_TOKENS, StepKind, StepWork

BENCHMARKS = pathlib.Path(__file__).resolve().parents[3] / "docs" / "benchmarks"
PARTS_SLOWER = tuple(round(1 + 0.05 * each, 2) for each in range(7))
RIDGES = (3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 12.0, 16.0)


@dataclass(frozen=True, slots=True)
class Step:
    """A row: a median of single steps, `tokens` in all."""

    name: str
    tokens: int
    context: int
    work: StepWork
    seconds: float

    @property
    def fitted(self) -> bool:
        return self.work.kind is StepKind.PREFILL

    def ratio(self, cost: CostModel) -> float:
        """Of the model's seconds to those that it took."""
        return self.work.seconds(cost, GRAPH_TOKENS) / self.seconds


def measured(path: pathlib.Path) -> list[Step]:
    return [
        _step(row) for row in json.loads(path.read_text(encoding="utf-8"))["rows"] if row["name"].startswith("step_")
    ]


def _step(row: Mapping[str, Any]) -> Step:
    _, tokens, streams, _, context = row["name"].split("_")
    held = {name: round(value) for name, value in row["detail"].items()}
    work = StepWork(
        StepKind.MIXED if int(streams) else StepKind.PREFILL,
        num_sequences=held["num_decodes"] + 1,
        num_prefills=1,
        prefill_tokens=held["prefill_tokens"],
        mean_prefill_context=row["detail"]["mean_context"],
        decode_context_tokens=held["decode_context_tokens"],
    )
    return Step(row["name"], int(tokens), int(context), work, row["value"] / 1e3)


def deviation(steps: Sequence[Step], cost: DeviceCost) -> float:
    """Root of the mean square of what the model is off."""
    return float((sum((step.ratio(cost) - 1) ** 2 for step in steps) / len(steps)) ** 0.5)


def fit(steps: Sequence[Step], cost: DeviceCost) -> DeviceCost:
    """`cost` with the two numbers that are the least off on steps of a prompt alone."""
    alone = [step for step in steps if step.fitted]
    grids = [replace(cost.grid, parts_slower=each) for each in PARTS_SLOWER]
    tried = [replace(cost, grid=grid, ridge=ridge) for grid in grids for ridge in RIDGES]
    return min(tried, key=lambda each: deviation(alone, each))


def report(steps: Sequence[Step], cost: DeviceCost) -> dict[str, Any]:
    groups = {"fitted": [one for one in steps if one.fitted], "not fitted": [one for one in steps if not one.fitted]}
    return {
        "parts_slower": cost.grid.parts_slower,
        "ridge": cost.ridge,
        **{
            name: {
                "steps": len(group),
                "deviation": deviation(group, cost),
                "least": min(one.ratio(cost) for one in group),
                "largest": max(one.ratio(cost) for one in group),
            }
            for name, group in groups.items()
            if group
        },
        "rows": [
            {
                "name": one.name,
                "predicted_ms": one.work.seconds(cost, GRAPH_TOKENS) * 1e3,
                "measured_ms": one.seconds * 1e3,
                "ratio": one.ratio(cost),
                "fitted": one.fitted,
            }
            for one in steps
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--card", default="h200")
    parser.add_argument("--commit", default="", help="noted in the result")
    parser.add_argument("--out", type=pathlib.Path)
    arguments = parser.parse_args()
    cost = cards.load(arguments.card).cost
    assert isinstance(cost, DeviceCost)
    path = BENCHMARKS / f"steps-{arguments.card}.json"
    steps = measured(path)
    best = fit(steps, cost)
    print(f"fitted: parts_slower {best.grid.parts_slower:g}, ridge {best.ridge:g}")
    result = {
        "command": f"python -m cluster.simulation.cards.steps --card {arguments.card}",
        "commit": arguments.commit,
        "date": datetime.now(UTC).date().isoformat(),
        "source": f"docs/benchmarks/{path.name}",
        **report(steps, cost),
    }
    print(json.dumps({name: value for name, value in result.items() if name != "rows"}, indent=1))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
