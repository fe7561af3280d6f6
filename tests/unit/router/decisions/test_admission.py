from typing import Any

import pytest

from headrace.costmodel import CostModel
from headrace.errors import DeadlineExceeded, InvalidRequest, NoWorkers, Overloaded, QuotaExceeded
from headrace.values import Load, Role
from router.decisions.admission import (
    MIN_DEPARTURES,
    Admission,
    Admitted,
    Entrant,
    Queued,
    Rules,
    Shed,
)
from router.decisions.room import WORKER_BACKLOG
from router.decisions.tenants import Tenant
from router.decisions.view import View, WorkerView
from tests.null_worker import worker_info
from tests.unit.router.decisions.admitting import COST, FULL, ONE_FREE, bounded, offer, view


def test_room_is_what_decoding_workers_run_and_a_little_more() -> None:
    for at, room in ((view(0, 3), 4 + 1 + 2 * WORKER_BACKLOG), (view(500, 3), 1 + WORKER_BACKLOG)):
        admission = bounded(99)
        decisions = [offer(admission, f"r{number}", at) for number in range(room + 1)]
        assert decisions == [Admitted()] * room + [Queued(0)]


def test_where_workers_come_for_those_who_wait_no_worker_at_all_is_no_reason_to_refuse() -> None:
    admission = Admission(Rules(2, waits_for_workers=True))
    assert offer(admission, "a", view()) == Queued(0)
    assert offer(admission, "b", view(), n=3) == Queued(1)
    assert isinstance(offer(admission, "c", view()), Shed), "the queue is bounded as ever"
    assert admission.admit(view(), 1.0) == []
    assert admission.admit(view(0), 2.0) == ["a", "b"]


def test_nobody_who_decodes_is_refused_at_once() -> None:
    for nobody in (view(), view(0, role=Role.PREFILL), view(0, draining=True)):
        decision = offer(bounded(4), "a", nobody)
        assert isinstance(decision, Shed)
        assert decision.reason == "no_workers"
        assert isinstance(decision.error, NoWorkers)


def test_admitted_while_there_is_room_counting_what_is_admitted_and_not_placed_yet() -> None:
    admission = bounded(4)
    at = view(4 + WORKER_BACKLOG - 2)
    assert offer(admission, "a", at) == Admitted()
    assert offer(admission, "b", at) == Admitted()
    assert offer(admission, "c", at) == Queued(0)
    admission.begun("a")
    assert admission.admit(at, 0.0) == ["c"]


def test_more_samples_than_any_worker_runs_hold_up_nobody() -> None:
    admission, busy = bounded(4), view(4)
    decision = offer(admission, "a", busy, n=4 + WORKER_BACKLOG + 1)
    assert isinstance(decision, Shed)
    assert isinstance(decision.error, InvalidRequest)
    assert decision.error.field == "n"
    assert isinstance(offer(admission, "b", busy, n=5), Shed)
    assert offer(admission, "c", busy) == Admitted()


def test_higher_priority_first_and_first_come_first_served_within_it() -> None:
    admission = bounded(9)
    for name, priority in (("a", 0), ("b", 5), ("c", 0), ("d", 5)):
        offer(admission, name, FULL, priority=priority)
    assert offer(admission, "e", FULL, priority=1) == Queued(2)
    order = []
    for _ in range(5):
        order += admission.admit(view(4 + WORKER_BACKLOG - 1), 0.0)
        admission.begun(order[-1])
    assert order == ["b", "d", "e", "a", "c"]
    assert len(admission) == 0


def test_a_newcomer_does_not_pass_those_who_wait() -> None:
    admission = bounded(9)
    offer(admission, "a", FULL)
    assert isinstance(offer(admission, "b", view(0)), Queued)
    assert admission.admit(view(0), 0.0) == ["a", "b"]


def test_case_54_beyond_the_cap_requests_are_shed_with_the_numbers_and_a_time() -> None:
    admission = bounded(2)
    offer(admission, "a", FULL)
    offer(admission, "b", FULL)
    decision = offer(admission, "c", FULL)
    assert isinstance(decision, Shed)
    assert isinstance(decision.error, Overloaded)
    assert decision.error.numbers == {"limit": "2", "actual": "2"}
    assert decision.error.retry_after_seconds == decision.retry_after_seconds == 1.0


@pytest.mark.parametrize(("pace_seconds", "expected"), [(0.5, 4.0), (0.01, 1.0), (100.0, 60.0)])
def test_retry_after_is_how_long_the_queue_takes_at_the_pace_it_has(pace_seconds: float, expected: float) -> None:
    """What was admitted in a quiet hour before says nothing of it."""
    admission, row = bounded(8), view(4 + WORKER_BACKLOG - 1)
    assert offer(admission, "long ago", view(0), now=0.0) == Admitted()
    admission.begun("long ago")
    for at in range(8):
        offer(admission, f"q{at}", FULL, now=3600.0)
    for at in range(8):
        (name,) = admission.admit(row, 3600.0 + at * pace_seconds)
        admission.begun(name)
        offer(admission, f"next{at}", FULL, now=3600.0 + at * pace_seconds)
    decision = offer(admission, "late", FULL, now=3600.0 + 8 * pace_seconds)
    assert isinstance(decision, Shed)
    assert decision.retry_after_seconds == expected


def test_many_samples_run_when_they_fit_or_when_nothing_else_does() -> None:
    """Those who waited for a larger worker, which has left since: they, too, do not wait for ever."""
    admission, n = bounded(8), 4 + WORKER_BACKLOG + 1
    assert isinstance(offer(admission, "big", view(n - 1, max_num_seqs=n), n=n), Queued)
    offer(admission, "small", view(1))
    assert admission.admit(view(1), 0.0) == []  # and the small one does not pass it for ever
    assert admission.admit(view(0), 0.0)[0] == "big"


def test_whoever_leaves_is_not_called_and_who_was_called_has_left() -> None:
    admission = bounded(8)
    offer(admission, "a", FULL)
    offer(admission, "b", FULL)
    assert admission.leave("a")
    assert not admission.leave("a")
    assert admission.admit(view(0), 0.0) == ["b"]
    assert not admission.leave("b")


# -- order, under a virtual clock


# -- room for prompts


def test_prompts_wait_here_while_the_workers_have_enough_to_prefill() -> None:
    admission = Admission(Rules(99, prefill_backlog_seconds=1.0))
    busy, free = (view(1, 1, waiting_tokens=number, max_num_seqs=64) for number in (10_000, 9_000))
    assert offer(admission, "a", busy, num_prompt_tokens=1500) == Queued(0)
    offer(admission, "b", busy, num_prompt_tokens=1500)
    offer(admission, "c", busy, num_prompt_tokens=1500)
    assert admission.admit(busy, 0.0) == []
    assert admission.admit(free, 0.0) == ["a", "b"]  # 2 workers × 0.1 s of room: 2,000 tokens, begun by the second
    for name in "ab":
        admission.begun(name)
    assert admission.admit(view(0, 0), 0.0) == ["c"]


def test_what_decode_prefills_by_itself_does_not_wait_for_prefill_workers() -> None:
    admission = Admission(Rules(99, prefill_backlog_seconds=1.0, local_prefill_max_tokens=64))
    busy = view(1, waiting_tokens=20_000, max_num_seqs=64)
    assert offer(admission, "long", busy, num_prompt_tokens=1500) == Queued(0)
    asked = Entrant("cached", 5000)
    assert admission.offer(asked, busy, 0.0, lambda: 64) == Admitted()
    assert isinstance(admission.offer(Entrant("not", 5000), busy, 0.0, lambda: 65), Queued)
    assert admission.offer(Entrant("no row", 5000), FULL, 0.0, lambda: 64) == Queued(0)


def test_what_nobody_has_measured_bounds_nothing() -> None:
    admission = Admission(Rules(99, prefill_backlog_seconds=1.0))
    assert offer(admission, "a", view(1, waiting_tokens=10**6, cost=CostModel(), max_num_seqs=64)) == Admitted()


def test_a_giant_that_is_computed_holds_up_nobody() -> None:
    """Others are computed beside it, or where they decode: a few prompts are no queue, however long."""
    admission, info = Admission(Rules(99, prefill_backlog_seconds=1.0)), worker_info("w", Role.UNIFIED)
    for number in range(WORKER_BACKLOG + 1):
        load = Load(1 + number, 0, 10**6 + 100 * number)
        decision = offer(admission, f"r{number}", View((WorkerView(info, Role.UNIFIED, load, COST, 100),)))
        admission.begun(f"r{number}")
        assert isinstance(decision, Queued) == (1 + number >= WORKER_BACKLOG)


# -- refusals


def test_what_would_not_begin_before_its_deadline_is_refused_at_once() -> None:
    admission = bounded(99)
    for number in range(MIN_DEPARTURES + 10):
        offer(admission, f"r{number}", FULL)
    for number in range(MIN_DEPARTURES):
        assert len(admission.admit(ONE_FREE, float(number))) == 1
        admission.begun(f"r{number}")
    decision = offer(admission, "hasty", FULL, seconds_left=5.0, now=8.0)
    assert isinstance(decision, Shed)
    assert (decision.reason, decision.error.numbers) == ("deadline", {"limit": "5.000", "actual": "10.000"})
    assert decision.retry_after_seconds == 10.0
    assert isinstance(offer(admission, "patient", FULL, seconds_left=20.0, now=8.0), Queued)
    gone = offer(admission, "gone", FULL, seconds_left=0.0)
    assert isinstance(gone, Shed)
    assert isinstance(gone.error, DeadlineExceeded)


def test_a_pace_of_another_day_refuses_nobody() -> None:
    admission = bounded(99)
    for number in range(2 * MIN_DEPARTURES):
        assert offer(admission, f"r{number}", view(0), now=100.0 * number) == Admitted()
        admission.begun(f"r{number}")
    offer(admission, "first", FULL, now=5000.0)
    assert isinstance(offer(admission, "hasty", FULL, seconds_left=1.0, now=5000.0), Queued)


def test_case_54_a_full_queue_is_not_one_tenants() -> None:
    greedy, modest = Tenant("greedy"), Tenant("modest")
    admission = bounded(3, greedy, modest)
    for name in "abc":
        offer(admission, name, FULL, tenant="greedy")
    decision = offer(admission, "m", FULL, tenant="modest")
    assert isinstance(decision, Queued)
    assert decision.pushed_out is not None
    victim = decision.pushed_out
    assert (victim.name, victim.tenant, victim.shed.reason) == ("c", "greedy", "pushed_out")
    assert isinstance(victim.shed.error, Overloaded)
    assert len(admission) == 3
    refused = offer(admission, "d", FULL, tenant="greedy")
    assert isinstance(refused, Shed)
    assert refused.reason == "queue_full"
    refused = offer(admission, "n", FULL, tenant="modest")  # 2 of 3 against 1: no better than it is
    assert isinstance(refused, Shed)
    assert sorted(admission.admit(view(0), 0.0)) == ["a", "b", "m"]


QUOTAS = {
    "quota_requests": Tenant("t", requests_per_minute=2),
    "quota_tokens": Tenant("t", tokens_per_minute=250),
    "quota_concurrency": Tenant("t", max_concurrent=2),
}


@pytest.mark.parametrize("reason", QUOTAS)
def test_beyond_its_quota_a_tenant_is_refused_and_others_are_not(reason: str) -> None:
    admission = bounded(9, QUOTAS[reason], Tenant("other"))
    asked: dict[str, Any] = {"tenant": "t", "num_prompt_tokens": 60, "max_tokens": 40}
    assert offer(admission, "a", view(0), **asked) == Admitted()
    assert offer(admission, "b", FULL, **asked) == Queued(0)
    decision = offer(admission, "c", view(0), **asked)
    assert isinstance(decision, Shed)
    assert isinstance(decision.error, QuotaExceeded)
    assert decision.reason == reason
    assert decision.error.retry_after_seconds == decision.retry_after_seconds >= 1.0
    assert isinstance(offer(admission, "d", view(0), tenant="other"), Queued)
    admission.leave("b")
    admission.ended(Entrant("b", **asked), 0, ran=False)  # it never ran: but for having asked, it cost nothing
    again = offer(admission, "e", view(0), **asked)
    assert isinstance(again, Shed) == (reason == "quota_requests")


def test_what_is_refused_for_another_reason_costs_no_quota() -> None:
    admission = bounded(1, Tenant("t", requests_per_minute=2))
    offer(admission, "a", FULL, tenant="t")
    for number in range(5):
        decision = offer(admission, f"r{number}", FULL, tenant="t")
        assert isinstance(decision, Shed)
        assert decision.reason == "queue_full"
    admission.leave("a")
    assert offer(admission, "b", view(0), tenant="t") == Admitted()


def test_what_no_quota_could_ever_hold_is_the_clients_to_change() -> None:
    admission = bounded(9, Tenant("t", tokens_per_minute=100))
    decision = offer(admission, "a", view(0), tenant="t", num_prompt_tokens=60, max_tokens=50)
    assert isinstance(decision, Shed)
    assert isinstance(decision.error, InvalidRequest)
    assert decision.error.numbers["limit"] == "100"
    assert decision.error.numbers["needed"] == "110"
    assert offer(admission, "b", view(0), tenant="t", num_prompt_tokens=60, max_tokens=40) == Admitted()


def test_an_answer_from_anothers_tokens_costs_a_request_and_a_slot() -> None:
    admission = bounded(9, Tenant("t", tokens_per_minute=10, max_concurrent=1))
    shared = Entrant("a", 500, 500, tenant="t")
    assert admission.share(shared, 0.0) is None
    assert admission.share(Entrant("b", tenant="t"), 0.0) is not None
    admission.ended(shared, 0, ran=False)
    assert admission.share(Entrant("c", tenant="t"), 0.0) is None
