"""A plan as its file has it, and a turn as the autoscaler records it."""

from typing import Any

from cluster.planning.load import Target
from cluster.scaling.decide import decide
from cluster.scaling.values import Inputs, PoolRules, PoolSeen, Recorded, Rules, Size, Traffic
from headrace.values import ParallelLayout, Role
from tests.unit.cluster.scaling.world import WORKER

PLAN: dict[str, Any] = {
    "format": 1,
    "asked": {"slo": {"attainment": 0.95}},
    "traffic": {
        "about": "made",
        "mean_per_second": 1.0,
        "sized_for_per_second": 2.0,
        "input_tokens": 100.0,
        "output_tokens": 10.0,
        "hit_rate": 0.5,
    },
    "chosen": {
        "kind": "disaggregated",
        "gpu_type": "h200",
        "pools": {"prefill": 1, "decode": 2, "unified": 0},
        "num_gpus": 6,
        "per_month": 6000.0,
        "holds_in_simulation": True,
        "predicted": {
            "ttft_seconds": {"mean": 0.2},
            "tpot_seconds": {"p50": 0.02},
            "goodput_per_second": 1.9,
        },
    },
}


def turn(number: int, at: float, desired: int) -> Recorded:
    """A real decision, of one pool that serves nothing."""
    rules = Rules(
        {"decode": PoolRules(Role.UNIFIED, ParallelLayout(2, 1), 1, 4)}, Target(1.0, 0.1, 0.99), budget_gpus=8
    )
    seen = PoolSeen(Size(desired), WORKER, ready=desired)
    inputs = Inputs(at, rules, {"decode": seen}, Traffic(routers=1))
    return Recorded(number, inputs, decide(inputs), f"outcome {number}")
