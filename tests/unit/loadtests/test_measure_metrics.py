"""The arithmetic of what measuring costs; how much it is, `make bench-operate` says."""

import json
import pathlib

import pytest

from loadtests.measure_metrics import BATCHES, costs, fraction, step_seconds


def test_the_shortest_steps_are_those_of_the_fastest_card(tmp_path: pathlib.Path) -> None:
    for card, rate in (("slow", 100.0), ("fast", 200.0)):
        rows = [{"name": f"decode_b{batch}", "value": rate * batch} for batch in BATCHES]
        (tmp_path / f"engine-{card}.json").write_text(json.dumps({"rows": rows}), encoding="utf-8")
    (tmp_path / "engine-cpu.json").write_text(json.dumps({"rows": []}), encoding="utf-8")
    assert step_seconds(tmp_path) == dict.fromkeys(BATCHES, 0.005)


def test_requests_and_scrapes_are_spread_over_the_steps_between_them() -> None:
    cost = {"worker_step": 1e-6, "message": 1e-7, "request": 2e-4, "scrape": 0.015}
    assert fraction(cost, 100, 0.01) == pytest.approx((1e-6 + 1e-5 + 1e-4) / 0.01 + 0.001)


def test_what_is_measured_is_the_code_that_runs() -> None:
    assert set(costs(400)) == {"worker_step", "message", "request", "scrape", "spans"}
