"""The one value that the page shows: bounded, whole, and of JSON."""

import json
from dataclasses import replace

import pytest

from cluster.console.view import MAX_PAIRS, MAX_REQUESTS, MAX_TEXT, MAX_WORKERS, Heard, as_json, point, scene, stages
from cluster.growth import Growth
from router.explanations import Failure
from tests.unit.cluster.console.looks import CHAT, growth, look, recent, routed, worker


def test_a_scene_is_json_and_a_point_of_it_is_what_is_drawn_over_time() -> None:
    shown = scene(
        look(
            workers=(worker("decode-0", used=50, num_running=3), worker("prefill-0", "prefill")),
            desired={"decode": 1, "prefill": 1},
            reports={"r": routed(queued=3, in_flight=4)},
            minute=growth(met=9, failed=1),
            window=growth(300.0, met=9, failed=1),
        ),
        CHAT,
    )
    assert json.loads(json.dumps(shown, allow_nan=False)) == json.loads(json.dumps(shown))
    kept = point(shown)
    assert (kept["queued"], kept["in_flight"], kept["attainment"]) == (3, 4, 0.9)
    assert kept["pools"]["decode"] == [1, 1, 0.5, 0.5]


def test_what_is_no_finite_number_is_null_and_the_page_lives() -> None:
    """NaN in a worker's cost model, or Infinity in a plan, is no JSON: no browser read the scene any more."""
    shown = {"a": [1.0, float("nan")], "b": {"c": (float("inf"), "x", None, 3)}}
    assert json.loads(as_json(shown)) == {"a": [1.0, None], "b": {"c": [None, "x", None, 3]}}
    assert json.loads(as_json({"a": (1.5, 2)})) == {"a": [1.5, 2]}


def test_whatever_the_cluster_a_scene_has_a_bound() -> None:
    """5,000 workers, 10,000 pairs, 1,000 requests, and a reason of a megabyte."""
    name = "w" * 60
    workers = [worker(f"{name}-{number}", used=number % 100, num_running=1) for number in range(5000)]
    workers.append(worker("broken", silence="x" * 2**20))
    pairs = {(f"p{number % 100}", f"d{number // 100}"): 1 + number % 7 for number in range(10_000)}
    shown = scene(
        look(
            workers=workers,
            minute=Growth(60.0, {}, {}, pairs),
            heard=[Heard("r", tuple(recent(f"q{number}") for number in range(1000)))],
        ),
        CHAT,
    )
    rows = shown["workers"]["rows"]
    assert (len(rows), shown["workers"]["left_out"]) == (MAX_WORKERS, 5001 - MAX_WORKERS)
    assert "broken" in {row[0] for row in rows}
    assert max(len(str(cell)) for row in rows for cell in row) == MAX_TEXT
    assert len(shown["flows"]["pairs"]) == MAX_PAIRS
    assert sum(number for *_, number in shown["flows"]["pairs"]) + shown["flows"]["left_out"] == sum(pairs.values())
    assert (len(shown["requests"]["rows"]), shown["requests"]["left_out"]) == (MAX_REQUESTS, 1000 - MAX_REQUESTS)
    assert len(json.dumps(shown)) < 500_000


def test_workers_stand_in_the_order_of_their_numbers() -> None:
    rows = scene(look(workers=[worker(f"decode-{number}") for number in (10, 9, 1)]), CHAT)["workers"]["rows"]
    assert [row[0] for row in rows] == ["decode-1", "decode-9", "decode-10"]


def test_hand_offs_between_pools_are_those_between_their_workers() -> None:
    workers = [worker("prefill-0", "prefill"), worker("decode-0"), worker("decode-1")]
    pairs = {("prefill-0", "decode-0"): 3, ("prefill-0", "decode-1"): 4, ("", "decode-1"): 2, ("gone", "decode-0"): 1}
    flows = scene(look(workers=workers, minute=Growth(60.0, {}, {}, pairs)), CHAT)["flows"]
    assert flows["pools"] == [["prefill", "decode", 7], ["", "decode", 2], ["?", "decode", 1]]
    assert flows["pairs"][0] == ["prefill-0", "decode-1", 4]


def test_the_stages_of_a_request_add_up_to_its_time() -> None:
    parts = stages(recent())
    assert parts == [
        ("queue", 0.27),
        ("wait", 0.1),
        ("prefill", 0.2),
        ("transfer", 0.06),
        ("other", 0.07),
        ("decode", 1.3),
    ]
    assert sum(seconds for _, seconds in parts) == pytest.approx(recent().outline.seconds)


@pytest.mark.parametrize(
    ("state", "ttft", "expected"),
    [
        ("queued", None, [("queue", 2.0)]),
        ("prefill", None, [("queue", 0.25), ("prefill", 1.75)]),
        ("decode", 0.7, [("queue", 0.25), ("prefill", 0.45), ("decode", 1.3)]),
    ],
)
def test_of_a_request_that_runs_the_stages_are_what_its_router_saw(
    state: str, ttft: float | None, expected: list[tuple[str, float]]
) -> None:
    runs = recent(outcome=state, ago=None)
    timeline = replace(runs.outline.timeline, ttft_stages={})
    runs = replace(runs, outline=replace(runs.outline, ttft_seconds=ttft, timeline=timeline))
    assert [(name, round(seconds, 6)) for name, seconds in stages(runs)] == expected


def test_the_time_of_a_request_without_a_first_token_is_not_taken_for_work() -> None:
    lost = recent(outcome="WorkerLost")
    lost = replace(lost, outline=replace(lost.outline, ttft_seconds=None))
    assert stages(lost) == [("queue", 0.25), ("other", 1.75)]


def test_those_that_run_longest_come_first_then_those_that_ended_last_whichever_router_has_them() -> None:
    heard = [
        Heard("a", (recent("runs", "decode", ago=None), recent("older", ago=9.0))),
        Heard("b", (recent("newer", ago=2.0),)),
        Heard("c", silence="hung"),
    ]
    rows = scene(look(heard=heard), CHAT)["requests"]["rows"]
    assert [(row["id"], row["router"], row["runs"]) for row in rows] == [
        ("runs", "a", True),
        ("newer", "b", False),
        ("older", "a", False),
    ]


def test_a_request_that_failed_somewhere_says_where() -> None:
    failed = recent(outcome="WorkerLost")
    failure = Failure(0, "decode-1", "WorkerLost", "it said nothing")
    failed = replace(failed, outline=replace(failed.outline, failures=(failure,)))
    (row,) = scene(look(heard=[Heard("a", (failed,))]), CHAT)["requests"]["rows"]
    assert row["failures"] == [{"worker": "decode-1", "error": "WorkerLost: it said nothing"}]
