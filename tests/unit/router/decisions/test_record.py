import json
from dataclasses import replace

import pytest
from hypothesis import given, settings

from headrace.values import RequestKey
from router.decisions.placement import Ask, place
from router.decisions.record import VERSION, Decision, from_line, to_line
from router.decisions.view import View
from tests.unit.router.decisions.placing import d, p
from tests.unit.router.decisions.strategies import decisions

KEY = RequestKey("router:1")


@settings(deadline=None)
@given(decisions())
def test_a_decision_is_the_same_after_its_line(decision: Decision) -> None:
    line = to_line(decision, 1.5)
    assert "\n" not in line
    assert from_line(line) == decision


@settings(deadline=None)
@given(decisions())
def test_production_s_place_says_the_same_to_what_was_logged(decision: Decision) -> None:
    """Workers, candidates, prices, near-equals and refusals: all of it."""
    assert from_line(to_line(decision, 1.5)).again() == decision


def test_another_view_is_another_decision() -> None:
    """A replay that did not look at the view would call these equal."""
    ask, workers = Ask(1000, 100), (p("p1"), p("p2"), d("d"))
    logged = Decision.of("r", KEY, View(workers), 0.0, place(ask, View(workers), 0.0))
    gone = {logged.prefill}
    drained = tuple(replace(worker, draining=worker.worker_id in gone) for worker in workers)
    again = replace(logged, view=View(drained)).again()
    assert {again.prefill, logged.prefill} == {"p1", "p2"}
    assert again != logged


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{}", "not a logged decision"),
        ("[1]", "not a logged decision"),
        ("nonsense", "Expecting value"),
        (
            json.dumps({"version": VERSION + 1, "decision": {}}),
            f"version {VERSION + 1} of the decision log; this build",
        ),
        (json.dumps({"version": VERSION, "decision": {"request_id": 1}}), "Decision.request_id: str was expected"),
    ],
)
def test_a_line_that_is_no_decision_of_this_version_is_refused(line: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_line(line)


def test_a_line_says_nothing_of_a_prompt_but_its_length() -> None:
    """The fields that a line may have, written out: one more is to be thought about."""
    view = View((p("p"), d("d")))
    line = json.loads(to_line(Decision.of("r", KEY, view, 0.0, place(Ask(1000, 100), view, 0.0)), 1.5))
    assert set(line) == {"version", "at", "decision"}
    assert set(line["decision"]) == {
        "request_id", "key", "now", "view", "why", "decode", "prefill", "cached_tokens", "prefill_tokens", "refused",
    }  # fmt: skip
    assert set(line["decision"]["why"]["ask"]) == {
        "num_prompt_tokens", "max_tokens", "n", "cached_tokens", "local_prefill_max_tokens", "decode", "excluded", "tie",
            "ttft_seconds", "tpot_seconds",
    }  # fmt: skip
