"""A plan that takes a second: one GPU type, one model, 150 simulated requests."""

from typing import Any

from cluster.planning import asked, plan, shapes
from cluster.planning.plan import Plan

SMALL: dict[str, Any] = {
    "model": "meta-llama/Llama-3.1-8B",
    "gpus": [{"type": "h200", "price_per_hour": 3.0}],
    "traffic": {
        "requests_per_second": 6.0,
        "input_tokens": {"mean": 1500, "cv": 0.5},
        "output_tokens": {"mean": 40, "cv": 0.5},
        "peak_to_mean": 1.5,
    },
    "slo": {"ttft_seconds": 0.5, "tpot_seconds": 0.02},
    "api": {"per_million_input": 0.5, "per_million_output": 1.5},
    "simulate": {"requests": 150},
}


def made(**changes: object) -> Plan:
    wanted = asked.parse({**SMALL, **changes})
    model = shapes.known(wanted.model)
    assert model is not None
    return plan.make(wanted, model)


def with_traffic(**changes: object) -> dict[str, object]:
    return {"traffic": {**SMALL["traffic"], **changes}}
