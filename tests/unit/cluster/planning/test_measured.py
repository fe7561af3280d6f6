"""The planner's model in the simulator, against two real H200 (docs/benchmarks/disagg-h200.jsonl): the same requests. It
was fitted to none of these runs. They are short, 117 to 205 answers each."""

import json
from typing import Any

import pytest

from cluster.planning import measured
from cluster.planning.caveats import as_ms
from cluster.planning.measured import ROOT, compare, fleet_of, kept_runs
from cluster.simulation import cards

RUNS = kept_runs(ROOT / "docs" / "benchmarks" / "disagg-h200.jsonl")
RECORD = json.loads((ROOT / "docs" / "benchmarks" / "plan-measured-h200.json").read_text(encoding="utf-8"))
JUDGED = ("ttft_p50", "ttft_p90", "tpot_p50", "tpot_p90")


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run['deployment']} at {run['rate']:g}/s")
def test_ttft_tpot_and_goodput_are_within_a_tenth_of_what_gpus_did(run: dict[str, Any]) -> None:
    errors = compare(run, fleet_of(run, "h200")).errors
    for name in (*JUDGED, *(name for name in errors if name.startswith("kept"))):
        assert abs(errors[name]) < 0.1, (name, errors[name])


def test_the_record_is_what_the_model_of_now_says_and_the_card_carries_it() -> None:
    """To have it so: python -m cluster.planning.measured, then python -m cluster.simulation.cards.measure"""
    row = next(row for row in RECORD["rows"] if (row["deployment"], row["rate"]) == ("2U", 16.0))
    run = next(run for run in RUNS if (run["deployment"], run["rate"]) == ("2U", 16.0))
    found = compare(run, fleet_of(run, "h200")).predicted
    for name in JUDGED:
        assert row[name]["predicted"] == pytest.approx(found[name], rel=1e-6)
    assert cards.load("h200").record == {
        "runs": RECORD["runs"],
        **{name: abs(each["largest"]) for name, each in RECORD["errors"].items()},
    }
    assert cards.load("h100").record == {}


def test_a_mixed_step_taken_for_the_sum_of_its_parts_would_be_far_off() -> None:
    run = next(run for run in RUNS if (run["deployment"], run["rate"]) == ("2U", 28.0))
    changed = measured.WITHOUT["one reading of the weights for prompts and decodes"](fleet_of(run, "h200"))
    assert compare(run, changed).errors["ttft_p90"] > 0.3


def test_latencies_are_shown_in_no_more_digits_than_the_record_allows() -> None:
    assert [as_ms(seconds) for seconds in (0.0, 0.00654, 0.01315, 0.378, 1.234)] == ["0", "6.5", "13", "380", "1200"]
