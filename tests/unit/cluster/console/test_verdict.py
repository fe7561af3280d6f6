"""What is said first, and that it is said with its numbers."""

from dataclasses import replace

import pytest

from cluster.console.pools import Seen, pools_of, ranks_of
from cluster.console.verdict import Level, Sources, Verdict, judge
from tests.unit.cluster.console.looks import CHAT, FINE, growth, worker

TWO = {"prefill": 1, "decode": 1}
CALM = (worker("prefill-0", "prefill", used=1), worker("decode-0", used=10, num_running=1))


def said(*workers: Seen, desired: dict[str, int] | None = None, sources: Sources = FINE, **counts: int) -> Verdict:
    pools = pools_of(workers, TWO if desired is None else desired, 2.0)
    return judge(CHAT, sources, pools, growth(**counts), growth(300.0, **counts))


def test_targets_that_hold_are_the_title() -> None:
    verdict = said(*CALM, met=995, missed_ttft=5)
    assert (verdict.level, verdict.title, verdict.lines) == (
        Level.OK,
        "Targets hold: 99.5 % of 1,000 in five minutes",
        (),
    )


def test_an_attainment_below_the_objective_is_a_warning_and_far_below_it_an_alarm() -> None:
    assert said(*CALM, met=97, missed_ttft=2, failed=1).level is Level.WARN
    verdict = said(*CALM, met=80, missed_ttft=15, missed_both=5)
    assert verdict.level is Level.BAD
    assert (
        verdict.title == "chat: 80.0 % of 100 requests met their targets in the last minute (missed: TTFT 20, TPOT 5)"
    )


def test_a_few_requests_are_no_alarm() -> None:
    assert said(*CALM, failed=9).level is Level.OK


def test_it_never_says_100_percent_of_what_was_missed_by_one() -> None:
    assert said(*CALM, met=99_999, failed=1).title.startswith("Targets hold: 99.9 %")


def test_the_pool_that_is_short_is_named_with_what_it_is_short_of() -> None:
    full = worker("decode-0", used=95, num_running=3)
    assert "decode is short: 95.0 % of KV is held (95 of 100 blocks)" in said(CALM[0], full, met=100).title
    seated = worker("decode-0", used=1, num_running=10)
    assert "decode is short: 10 sequences in 10 places" in said(CALM[0], seated, met=100).title
    behind = worker("prefill-0", "prefill", used=1, waiting_prefill_tokens=4000, num_waiting=3)
    assert (
        "prefill is short: 4.0 s of prompts wait at each worker (4,000 tokens in all)"
        in said(behind, CALM[1], met=100).title
    )


def test_a_backlog_is_the_mean_of_those_that_prefill_by_their_own_cost_model() -> None:
    workers = (
        worker("prefill-0", "prefill", waiting_prefill_tokens=3000, num_waiting=1),
        worker("prefill-1", "prefill", waiting_prefill_tokens=0),
        worker("decode-0", "decode", waiting_prefill_tokens=9000, num_waiting=1),
    )
    pools = {pool.name: pool for pool in pools_of(workers, {}, 2.0)}
    assert (pools["prefill"].backlog_seconds, pools["prefill"].pressure) == (1.5, 0.75)
    assert pools["decode"].backlog_seconds == 0.0


def test_a_prompt_that_is_computed_while_none_waits_is_no_shortage() -> None:
    """Since reports count what is at work, too, a long prompt on an idle worker was a pool that is short of prefill."""
    alone = worker("prefill-0", "prefill", used=1, waiting_prefill_tokens=4000, num_running=1)
    assert said(alone, CALM[1], met=100).level is Level.OK


def test_workers_that_are_missing_or_silent_are_counted_and_a_pool_without_any_is_an_alarm() -> None:
    starting, silent = worker("decode-1", phase="starting"), worker("decode-0", silence="did not answer")
    verdict = said(CALM[0], silent, starting, desired={"prefill": 1, "decode": 2}, met=100)
    assert verdict.level is Level.WARN
    assert {line.text for line in verdict.lines} == {
        "decode has 1 of 2 workers ready",
        "decode: 1 ready workers do not answer",
    }
    verdict = said(CALM[0], met=100)
    assert verdict.level is Level.BAD
    assert "no worker that decodes is ready: nothing is served" in {line.text for line in verdict.lines}


def test_case_a_cluster_that_was_scaled_to_zero_is_no_alarm() -> None:
    """It was: `nothing is served`, in red, every quiet night."""
    pools = pools_of((), {"prefill": 0, "decode": 0}, 2.0)
    verdict = judge(replace(CHAT, from_zero=True), FINE, pools, growth(), growth(300.0))
    assert (verdict.level, verdict.title) == (
        Level.IDLE,
        "all pools are at zero: a request waits for the workers that it starts",
    )
    assert judge(CHAT, FINE, pools, growth(), growth(300.0)).level is Level.BAD, "here a request is refused"
    starting = pools_of((worker("decode-0", phase="starting"),), {"prefill": 0, "decode": 1}, 2.0)
    assert judge(replace(CHAT, from_zero=True), FINE, starting, growth(), growth(300.0)).level is Level.BAD


@pytest.mark.parametrize(
    ("sources", "level", "text"),
    [
        (Sources(None, "Redis did not answer"), Level.UNKNOWN, "Nothing is known yet"),
        (Sources(12.0, "gone", "", 1), Level.WARN, "Redis does not answer: what stands here is 12 s old"),
        (Sources(0.1, "", "none leads just now", 1), Level.WARN, "controller: none leads just now"),
        (Sources(0.1), Level.WARN, "no router reports"),
        (Sources(0.1, num_routers=1, routers_silent={"r": "hung"}), Level.WARN, "router r: hung"),
    ],
)
def test_what_is_not_heard_is_said(sources: Sources, level: Level, text: str) -> None:
    verdict = said(*CALM, sources=sources, met=100)
    assert verdict.level is level
    assert text in verdict.title + " ".join(line.text for line in verdict.lines)


def test_nobody_asking_is_idle_and_no_alarm() -> None:
    assert said(*CALM).level is Level.IDLE


@pytest.mark.parametrize(("layout", "ranks"), [("tp4·pp2", 8), ("tp1·pp1", 1), ("<b>", 1), ("", 1)])
def test_ranks_of_a_layout(layout: str, ranks: int) -> None:
    assert ranks_of(layout) == ranks
