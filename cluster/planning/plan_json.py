"""A plan as JSON: what the console lays reality beside. docs/planning.md says what each key is."""

from dataclasses import asdict
from typing import Any

from cluster.planning.caveats import recorded, unsure
from cluster.planning.memory import Budget
from cluster.planning.options import Option
from cluster.planning.outlook import prediction_json
from cluster.planning.plan import Plan
from cluster.planning.settle import Round

FORMAT = 1


def as_json(plan: Plan) -> dict[str, Any]:
    option, chosen, asked = plan.option, plan.chosen, plan.asked
    return {
        "format": FORMAT,
        "asked": asked.model_dump(mode="json"),
        "model": {
            **asdict(plan.model),
            "num_params": plan.model.num_params,
            "attention": plan.model.attention,
            "weight_bytes": plan.model.weight_bytes(asked.held),
            "kv_bytes_per_token": plan.model.kv_bytes_per_token(asked.held),
        },
        "traffic": {
            "about": plan.traffic.about,
            "mean_per_second": plan.traffic.mean_per_second,
            "peak_per_second": plan.traffic.peak.requests_per_second,
            "sized_for_per_second": plan.load.requests_per_second,
            "input_tokens": plan.traffic.input_tokens,
            "output_tokens": plan.traffic.output_tokens,
            "hit_rate": plan.traffic.hit_rate,
            "gap_scv": plan.load.gap_scv,
            "num_too_long": plan.traffic.num_too_long,
        },
        "memory": {name: [_budget_json(one, plan) for one in found] for name, found in plan.budgets.items()},
        "does_not_fit": {name: [one.reason for one in found] for name, found in plan.too_large.items()},
        "chosen": {
            **_option_json(option),
            "holds_in_simulation": chosen.holds if chosen.rounds else None,
            "reason": option.reason,
            "cluster": cluster(plan),
            "predicted": prediction_json(plan.prediction),
            "predicted_without_spare": prediction_json(option.predict(option.needed, plan.load, asked.slo.target)),
            "simulated": chosen.full.as_json() if chosen.full is not None else None,
            "rounds": [_round_json(one) for one in chosen.rounds],
            "gpu": {name: figure.as_json() for name, figure in option.gpu.figures().items()},
            "uncertainty": option.gpu.uncertainty,
            "cost_model": {"prefill": asdict(option.prefill.cost), "decode": asdict(option.decode.cost)},
        },
        "other_kind": None
        if plan.other is None
        else {
            **_option_json(plan.other.option),
            "holds_in_simulation": plan.other.holds if plan.other.rounds else None,
            "rounds": [_round_json(one) for one in plan.other.rounds],
        },
        "ways": [_option_json(one) for one in plan.ways[:16]],
        "money": asdict(plan.money),
        "break_even": None if plan.break_even is None else asdict(plan.break_even),
        "what_if": [asdict(one) for one in plan.what_ifs],
        "by_hour": plan.by_hour,
        "rooflines": [{**asdict(one), "bound": one.bound, "reached": one.reached} for one in plan.rooflines],
        "doubt": unsure(option, plan.what_ifs),
        "record": recorded(plan.option, plan.model, plan.asked.held),
        "assumptions": plan.assumptions,
        "unknowns": plan.unknowns,
        "warnings": plan.warnings,
    }


def cluster(plan: Plan) -> dict[str, Any] | None:
    """The part of a cluster's file that the plan decides. `kv_bytes` is one for all: the smaller worker's. None: the engine
    serves no such precision."""
    if not plan.asked.held.is_served:
        return None
    option, engine = plan.option, plan.asked.engine
    pools: dict[str, Any] = {}
    for role, budget in (
        ("prefill", option.prefill_budget),
        ("decode", option.decode_budget),
        ("unified", option.decode_budget),
    ):
        if number := getattr(option.pools, role):
            layout = budget.layout
            pools[role] = {"role": role, "replicas": number, "tp": layout.tp, "pp": layout.pp}
    used = [option.decode_budget] if option.kind == "aggregated" else [option.prefill_budget, option.decode_budget]
    return {
        "pools": pools,
        "engine": {
            "device": "cuda",
            "dtype": plan.asked.precision,
            "kv_bytes": min(budget.kv_bytes for budget in used),
            "max_num_seqs": engine.max_num_seqs,
            "max_step_tokens": engine.max_step_tokens,
        },
    }


def _round_json(one: Round) -> dict[str, Any]:
    return {
        "pools": asdict(one.pools),
        "predicted": prediction_json(one.predicted),
        "simulated": one.simulated.as_json(),
    }


def _budget_json(budget: Budget, plan: Plan) -> dict[str, Any]:
    context = plan.traffic.input_tokens + plan.traffic.output_tokens
    found = {**asdict(budget), "layout": str(budget.layout)}
    return found | {"max_sequences_at_mean_context": budget.max_sequences(context)}


def _option_json(option: Option) -> dict[str, Any]:
    return {
        "kind": option.kind,
        "gpu_type": option.gpu.name,
        "measured": option.gpu.is_measured,
        "layouts": {"prefill": str(option.prefill_budget.layout), "decode": str(option.decode_budget.layout)},
        "needed": asdict(option.needed),
        "pools": asdict(option.pools),
        "num_gpus": option.num_gpus,
        "per_month": option.per_month,
    }
