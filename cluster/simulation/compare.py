"""Policies beside each other on the same traffic: a run each, a table, JSON."""

from collections.abc import Iterable, Sequence
from typing import Any

from rich.table import Table

from cluster.simulation.fleet import Fleet, Simulation
from cluster.simulation.results import Summary, Tally, summarise
from headrace.goodput import Slo
from headrace.traces import TraceRow


def run(
    fleet: Fleet, policy: str, rows: Iterable[TraceRow], *, slo: Slo, seed: int = 0, slice_seconds: float = 1.0
) -> tuple[Summary, Tally]:
    tally = Tally(fleet.roles, slice_seconds)
    Simulation(fleet, policy, tally, seed=seed).run(rows)
    return summarise(policy, tally, slo), tally


def table(summaries: Sequence[Summary]) -> Table:
    found = Table(show_edge=False, pad_edge=False)
    for name in ("policy", "TTFT p50 s", "p90", "p99", "TPOT p50 ms", "p99", "E2E p90 s", "goodput /s", "SLO met"):
        found.add_column(name, justify="left" if name == "policy" else "right")
    for name in ("hits", "alone", "prefill ×mean", "decode ×mean", "unfinished"):
        found.add_column(name, justify="right")
    for one in summaries:
        ttft, tpot, e2e = one.ttft_seconds, one.tpot_seconds, one.e2e_seconds
        found.add_row(
            one.policy,
            *(f"{ttft.get(p, float('nan')):.3f}" for p in ("p50", "p90", "p99")),
            *(f"{tpot.get(p, float('nan')) * 1e3:.1f}" for p in ("p50", "p99")),
            f"{e2e.get('p90', float('nan')):.2f}",
            f"{one.goodput_per_second:.2f}",
            f"{one.attainment:.1%}",
            f"{one.hit_rate:.1%}",
            str(one.placed_alone),
            _balance(one, "prefill", "unified"),
            _balance(one, "decode"),
            str(one.num_requests - one.outcomes.get("finished", 0)),
        )
    return found


def _balance(one: Summary, *roles: str) -> str:
    return next((f"{one.balance[role]:.2f}" for role in roles if role in one.balance), "")


def as_json(fleet: Fleet, slo: Slo, runs: Sequence[tuple[Summary, Tally]], traffic: str) -> dict[str, Any]:
    """What was run and what came of it, with each worker's slices of time."""
    return {
        "traffic": traffic,
        "fleet": {
            "card": fleet.card.as_json(),
            **{
                name: getattr(fleet, name)
                for name in ("prefill", "decode", "unified", "routers", "block_size", "max_step_tokens")
            },
        },
        "slo": {"ttft_seconds": slo.ttft_seconds, "tpot_seconds": slo.tpot_seconds},
        "runs": [
            {
                **summary.as_json(),
                "slice_seconds": tally.slice_seconds,
                "workers": {
                    worker_id: {
                        "busy_seconds": [round(seconds, 4) for seconds in worker.busy_seconds],
                        "prefill_tokens": worker.prefill_tokens,
                        "decode_tokens": worker.decode_tokens,
                    }
                    for worker_id, worker in tally.workers.items()
                },
            }
            for summary, tally in runs
        ],
    }
