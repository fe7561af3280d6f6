"""A plan beside reality, and the autoscaler's record."""

import json
import pathlib
from dataclasses import replace
from typing import Any

import pytest

from cluster.console.decisions import MAX_DECISIONS, changes, scaling
from cluster.console.plan_file import PlanFile
from cluster.console.planned import Measured, compared
from cluster.console.pools import pools_of
from cluster.growth import Growth
from cluster.scaling.values import Size
from headrace.errors import ConfigError
from tests.unit.cluster.console.looks import growth, worker
from tests.unit.cluster.console.records import PLAN, turn

MINUTE = Growth(
    60.0,
    {"arrivals": 180, "prompt_tokens": 18_000, "cached_tokens": 4, "computed_tokens": 6, "ttft_seconds": 36.0},
    {("chat", "met"): 120},
    {("p", "d"): 180},
)
WINDOW = replace(growth(300.0, met=90, missed_ttft=10), counts={"ended": 100, "generated_tokens": 1000})


def measured() -> Measured:
    workers = (worker("prefill-0", "prefill"), worker("decode-0"), worker("decode-1", phase="starting"))
    return Measured(pools_of(workers, {}, 2.0), MINUTE, MINUTE, WINDOW, tpot_seconds=0.019)


def test_each_figure_of_a_plan_stands_beside_what_was_measured() -> None:
    found = compared(PLAN, measured())
    rows = {row["what"]: (row["planned"], row["now"], row["off"]) for row in found["rows"]}
    assert rows == {
        "requests a second, sized for": (2.0, 3.0, True),
        "requests a second, mean": (1.0, 3.0, None),
        "prompt tokens": (100.0, 100.0, False),
        "generated tokens": (10.0, 10.0, False),
        "cache hit rate": (0.5, 0.4, True),
        "prefill workers": (1, 1, False),
        "decode workers": (2, 1, False),
        "GPUs": (6, 6, False),
        "a month at the plan's price": (6000.0, 6000.0, False),
        "mean TTFT": (0.2, 0.2, False),
        "median TPOT": (0.02, 0.019, False),
        "targets met": (0.95, 0.9, True),
        "requests a second that met them": (1.9, 2.0, None),
    }
    assert found["off"] == 3


def test_what_is_not_measured_is_not_off() -> None:
    rows = compared(PLAN, Measured((), Growth(), Growth(), Growth()))["rows"]
    assert {row["what"] for row in rows if row["off"]} == set()


@pytest.mark.parametrize("plan", [{}, {"format": 2}, {"format": 1}, {**PLAN, "chosen": None}])
def test_what_is_no_plan_of_this_format_is_said_to_be_none(plan: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"no plan|format 2"):
        compared(plan, measured())


def test_a_plan_is_read_again_when_its_file_changes_and_never_ends_a_console(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "plan.json"
    file = PlanFile(path)
    assert isinstance(file.read(), ConfigError)
    path.write_text(json.dumps(PLAN), encoding="utf-8")
    assert file.read() == PLAN
    for content in ("{", "[]"):
        path.write_text(content, encoding="utf-8")
        assert isinstance(file.read(), ConfigError)


def test_the_autoscaler_s_decisions_come_newest_first_with_their_ages_and_changes() -> None:
    decisions = [turn(number, float(number), 2) for number in range(1, 40)]
    shown = scaling(turn(39, 100.0, 2), decisions)
    assert (shown["mode"], shown["budget_gpus"], shown["gpus"]) == ("controller", 8, 4)
    assert shown["pools"][0] | {"least": 1, "most": 4, "desired": "2"} == shown["pools"][0]
    assert [one["number"] for one in shown["decisions"]] == list(range(39, 39 - MAX_DECISIONS, -1))
    first = shown["decisions"][0]
    assert (first["ago"], first["outcome"]) == (61.0, "outcome 39")
    assert json.dumps(shown, allow_nan=False)


def test_only_pools_that_change_are_named() -> None:
    before = {"prefill": Size(2), "decode": Size(3)}
    assert changes(before, {"prefill": Size(2), "decode": Size(3, 1)}) == "decode 3 → 3 (1 lent)"
    assert changes(before, before) == ""
