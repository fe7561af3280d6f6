"""Who gets room, who is refused or waits for it, and prompts that are computed for others to read."""

from typing import Any

import pytest

from headrace.errors import ConfigError, ContextLengthExceeded, InvalidRequest, Overloaded
from headrace.values import BlockCounts, FinishReason, Request, RequestKey, SamplingParams
from tests.plan_checker import CheckedWorker, FakeModel
from tests.unit.workers.scheduling.prompts import NO_EOS, prefilled, request
from workers.scheduling.scheduler import SchedulerLimits

# -- room


def test_preemption_takes_the_youngest_and_it_comes_back_before_new_prompts() -> None:
    worker = CheckedWorker(NO_EOS, num_blocks=8, max_num_seqs=3, max_step_tokens=32)
    old, young = (request(name, 11, max_tokens=12, first=at) for at, name in enumerate("ab", 1))
    new = request("c", 11, max_tokens=1, first=3)
    worker.scheduler.submit(old, 0.0)
    worker.scheduler.submit(young, 0.0)
    worker.launch()
    worker.scheduler.submit(new, 0.0)
    worker.run()
    for asked in (old, young, new):
        worker.check_answer(asked)
    starts = [start.prompt_ids[0] for plan in worker.plans for start in plan.starts]
    assert starts == [1, 2, 2, 3]
    last = worker.outputs[young.key, 0][-1]
    assert last.timeline is not None
    assert last.timeline.num_preemptions == 1
    worker.check_empty()


@pytest.mark.parametrize(
    ("position", "overlap"), [(position, overlap) for overlap in (False, True) for position in range(1, 26 + overlap)]
)
def test_preempted_on_demand_at_any_position_it_is_answered_as_ever(position: int, overlap: bool) -> None:
    worker = CheckedWorker(NO_EOS, max_step_tokens=6, overlap=overlap)
    asked = request("q", 13, max_tokens=14)
    worker.scheduler.submit(asked, 0.0)
    while not worker.scheduler.preempt_at(position):
        worker.turn()
    worker.run()
    worker.check_answer(asked)
    assert worker.scheduler.num_preemptions == 1
    assert not worker.scheduler.preempt_at(0)
    worker.check_empty()


def test_one_preemption_at_a_time_while_its_blocks_are_on_their_way() -> None:
    """One step ahead, a victim's blocks are free only after its step: whoever needs them waits, and takes no second."""
    worker = CheckedWorker(NO_EOS, num_blocks=12, max_num_seqs=4, max_step_tokens=64)
    asked = [request(name, 13, max_tokens=9, first=at) for at, name in enumerate("abc", 1)]
    for each in asked:
        worker.scheduler.submit(each, 0.0)
    worker.run()
    assert worker.scheduler.num_preemptions == 1
    for each in asked:
        worker.check_answer(each)


def test_a_sequence_that_would_free_nothing_is_not_preempted() -> None:
    """Samples of one prompt share its blocks; the youngest holds none of its own when the oldest needs one."""
    worker = CheckedWorker(NO_EOS, num_blocks=3, max_num_seqs=2, overlap=False)
    asked = request("a", 8, max_tokens=4, n=2)
    worker.scheduler.submit(asked, 0.0)
    worker.run()
    worker.check_answer(asked)
    worker.check_empty()


def test_higher_priority_starts_first_and_is_preempted_last() -> None:
    worker = CheckedWorker(NO_EOS, max_num_seqs=1)
    worker.scheduler.submit(request("low", first=1), 0.0)
    worker.scheduler.submit(request("high", first=2, priority=5), 0.0)
    worker.run()
    assert [start.prompt_ids[0] for plan in worker.plans for start in plan.starts] == [2, 1]


def test_a_prompt_that_does_not_fit_is_passed_only_so_often() -> None:
    """Two small prompts always run and keep the pool too full for the large one; small ones come without end."""
    worker = CheckedWorker(NO_EOS, num_blocks=12, max_num_seqs=3, max_step_tokens=64, max_bypass=3)
    worker.scheduler.submit(request("small0", 8, max_tokens=8), 0.0)
    worker.turn()
    large = request("large", 40, max_tokens=2, first=2)
    worker.scheduler.submit(large, 0.0)
    for number in range(1, 30):
        worker.scheduler.submit(request(f"small{number}", 8, max_tokens=8, first=3 + number % 20), 0.0)
    order = []
    for _ in range(2000):
        plan = worker.launch() if len(worker.flights) < 2 else None
        order += [] if plan is None else [start.prompt_ids for start in plan.starts]
        if worker.flights and (plan is None or len(worker.flights) == 2):
            worker.land()
    assert order.index(large.prompt_token_ids) == 3, "three passed, then it was next"
    assert worker.finish(large.key) is FinishReason.LENGTH
    worker.check_empty()


def test_a_short_prompt_passes_beside_one_that_needs_many_steps() -> None:
    worker = CheckedWorker(NO_EOS, max_step_tokens=16, overlap=False)
    worker.scheduler.submit(request("long", 120, max_tokens=1), 0.0)
    worker.turn()
    worker.scheduler.submit(request("short", 8, max_tokens=1, first=2), 0.0)
    worker.turn()
    assert worker.finish(RequestKey("short")) is FinishReason.LENGTH
    assert [work.num_tokens for work in worker.plans[1].work] == [8, 8], "half of the budget is left to the long one"
    worker.run()
    assert worker.finish(RequestKey("long")) is FinishReason.LENGTH


def test_rows_are_no_more_than_tokens_of_a_step_so_that_each_gets_its_own() -> None:
    worker = CheckedWorker(NO_EOS, max_num_seqs=8, max_step_tokens=3)
    asked = [request(f"r{number}", 5, max_tokens=6, first=number + 1) for number in range(8)]
    for each in asked:
        worker.scheduler.submit(each, 0.0)
    worker.run()
    for each in asked:
        worker.check_answer(each)


# -- refused at intake, changing nothing


def test_case_28_a_prompt_that_leaves_no_room_in_the_context_is_refused_with_numbers() -> None:
    worker = CheckedWorker(FakeModel(max_context_tokens=16))
    for num_prompt in (16, 17):
        with pytest.raises(ContextLengthExceeded) as error:
            worker.scheduler.submit(request("a", num_prompt), 0.0)
        assert error.value.numbers == {"field": "prompt", "limit": "15", "actual": str(num_prompt)}
    asked = request("a", 15, max_tokens=9)
    worker.scheduler.submit(asked, 0.0)
    worker.run()
    worker.check_answer(asked)
    assert worker.finish(asked.key) is FinishReason.LENGTH


def test_what_could_not_fit_an_empty_pool_is_refused_with_numbers() -> None:
    worker = CheckedWorker(NO_EOS, num_blocks=4)
    with pytest.raises(InvalidRequest, match=r"4 blocks of 4 tokens, got 6 \+ 12 tokens, which need 5"):
        worker.scheduler.submit(request("a", 6, max_tokens=12), 0.0)
    fits = request("a", 6, max_tokens=11)
    worker.scheduler.submit(fits, 0.0)
    worker.run()
    worker.check_answer(fits)


def test_case_54_the_backlog_is_bounded() -> None:
    worker = CheckedWorker(NO_EOS, max_waiting=2)
    for name in "ab":
        worker.scheduler.submit(request(name), 0.0)
    for take in (worker.scheduler.submit, worker.scheduler.expect):
        with pytest.raises(Overloaded) as error:
            take(request("c"), 0.0)
        assert error.value.numbers == {"limit": "2", "actual": "2"}
    assert worker.scheduler.load().num_waiting == 2


def test_bad_requests_are_refused_by_name() -> None:
    scheduler = CheckedWorker(NO_EOS, max_num_seqs=2).scheduler
    with pytest.raises(InvalidRequest, match="prompt token id must be from 0 to 31, got 32"):
        scheduler.submit(Request(RequestKey("a"), (1, 32), SamplingParams(max_tokens=1)), 0.0)
    with pytest.raises(InvalidRequest, match="stop_token_ids must be token ids from 0 to 31, got 40"):
        scheduler.submit(request("a", stop_token_ids=(40,)), 0.0)
    with pytest.raises(InvalidRequest, match="n must be at most 2"):
        scheduler.submit(request("a", n=3), 0.0)
    with pytest.raises(InvalidRequest, match="held_blocks must be from 0 to 1, got 2"):
        scheduler.ticket(request("a", 8), 2, 0.0)
    scheduler.submit(request("a"), 0.0)
    with pytest.raises(InvalidRequest, match="is here already"):
        scheduler.submit(request("a"), 0.0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_num_seqs", 0),
        ("max_step_tokens", 0),
        ("max_context_tokens", 1),
        ("claim_fraction", 0.0),
        ("max_bypass", 0),
    ],
)
def test_impossible_limits_are_refused_by_name(name: str, value: float) -> None:
    limits: dict[str, Any] = {
        "max_num_seqs": 1,
        "max_step_tokens": 1,
        "max_context_tokens": 9,
        "max_waiting": 1,
        "pin_seconds": 1.0,
    }
    with pytest.raises(ConfigError, match=name):
        SchedulerLimits(**limits | {name: value})


# -- tickets


def test_case_16_what_waits_to_be_read_is_bounded_and_others_go_on() -> None:
    worker = CheckedWorker(NO_EOS, num_blocks=20, max_pinned_fraction=0.5)
    for at, name in enumerate("abc", 1):
        worker.scheduler.ticket(request(name, 20, first=at), 0, 0.0)
    worker.run()
    assert worker.scheduler.counts() == BlockCounts(free=10, pinned=10)
    local = request("local", 8, first=9)
    worker.scheduler.submit(local, 0.0)
    worker.run()
    worker.check_answer(local)
    assert worker.scheduler.load().num_waiting == 1
    worker.scheduler.release(RequestKey("a"), 0.0)
    chunks = [chunk for events in worker.run() for chunk in events.chunks]
    assert [chunk.key.request_id for chunk in chunks if chunk.last] == ["c"]


def test_a_ticket_that_starves_for_pins_holds_up_tickets_alone() -> None:
    worker = CheckedWorker(NO_EOS, num_blocks=20, max_pinned_fraction=0.5, max_bypass=1)
    prefilled(worker, request("pinned", 24))
    worker.scheduler.ticket(request("large", 30, first=2), 0, 0.0)
    worker.scheduler.ticket(request("small", 8, first=3), 0, 0.0)
    worker.scheduler.ticket(request("late", 8, first=4), 0, 0.0)
    locals_ = [request(f"local{number}", 8, first=10 + number) for number in range(3)]
    for each in locals_:
        worker.scheduler.submit(each, 0.0)
    chunks = [chunk.key.request_id for events in worker.run() for chunk in events.chunks if chunk.last]
    assert chunks == ["small"], "one passed the large ticket, then it is the next"
    for each in locals_:
        worker.check_answer(each)


def test_the_tickets_of_a_slow_puller_let_those_of_others_pass() -> None:
    worker = CheckedWorker(NO_EOS, num_blocks=20, max_pinned_fraction=1.0, max_peer_pinned_fraction=0.4)
    for at, (name, peer) in enumerate([("a", "slow"), ("b", "slow"), ("c", "other")], 1):
        worker.scheduler.ticket(request(name, 20, first=at), 0, 0.0, peer)
    chunks = [chunk for events in worker.run() for chunk in events.chunks]
    assert [chunk.key.request_id for chunk in chunks if chunk.last] == ["a", "c"]


def test_a_ticket_is_never_preempted_its_blocks_may_be_being_read() -> None:
    worker = CheckedWorker(NO_EOS, num_blocks=8, max_step_tokens=6, overlap=False)
    old = request("old", 6, max_tokens=24)
    worker.scheduler.submit(old, 0.0)
    worker.turn()
    worker.scheduler.ticket(request("ticket", 20, first=2), 0, 0.0)
    chunks = []
    while worker.scheduler.counts().pinned == 0:
        chunks += worker.turn().chunks
    assert all(worker.checker.epochs[block] == epoch for chunk in chunks for block, epoch in chunk.blocks)
    worker.run()
    worker.scheduler.release(RequestKey("ticket"), 0.0)
    worker.run()
    worker.check_answer(old)
    worker.check_empty()


def test_pins_end_by_release_or_by_their_deadline_which_renewal_moves() -> None:
    worker = CheckedWorker(NO_EOS, pin_seconds=5.0)
    for at, name in enumerate("abc", 1):
        prefilled(worker, request(name, 6, first=at), now=100.0)
    worker.scheduler.renew(RequestKey("b"), 103.0)
    worker.scheduler.renew(RequestKey("gone"), 103.0)
    worker.scheduler.release(RequestKey("c"), 103.0)
    worker.scheduler.release(RequestKey("c"), 103.0)
    assert worker.scheduler.expire(104.9) == ([], [])
    assert worker.scheduler.expire(105.0) == ([], [RequestKey("a")])
    assert worker.scheduler.expire(107.9) == ([], [])
    assert worker.scheduler.expire(108.0) == ([], [RequestKey("b")])
    worker.check_empty()


def test_a_release_before_the_last_chunk_gives_the_ticket_up() -> None:
    worker = CheckedWorker(NO_EOS, max_step_tokens=8)
    worker.scheduler.ticket(request("a", 30), 0, 0.0)
    worker.launch()
    worker.scheduler.release(RequestKey("a"), 0.0)
    assert worker.land().chunks == []
    worker.run()
    worker.check_empty()
