"""The scheduler against an executor that believes nothing (tests.plan_checker): same answers, nothing lost."""

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace.errors import ConfigError, ContextLengthExceeded, InternalError, InvalidRequest, Overloaded
from headrace.values import BlockCounts, FinishReason, Load, Request, RequestKey, SamplingParams, Usage
from tests.plan_checker import CheckedWorker, FakeModel, PlanChecker
from tests.scheduler_world import World
from tests.unit.workers.scheduling.prompts import NO_EOS, prefilled, request
from workers.scheduling.plan import RowWork
from workers.scheduling.scheduler import SchedulerLimits

STAGES = st.sampled_from([1, 1, 2, 3])

# -- properties


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), overlap=st.booleans(), stages=STAGES)
@example(seed=5212, overlap=False, stages=1).via("a sample that ends before the plan that makes its copy")
@example(seed=1208, overlap=True, stages=1).via("an arrival that preempts one behind it in the same pass")
def test_whatever_happens_every_answer_is_the_models_and_every_block_comes_back(
    seed: int, overlap: bool, stages: int
) -> None:
    """Random prompts, hand-offs, reads, failures, cancels, deadlines, preemptions, cache resets on two small workers."""
    world = World(seed, overlap=overlap, num_micro_batches=stages)
    world.live(120)
    world.settle()
    world.check()


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), overlap=st.booleans(), stages=STAGES)
def test_with_nothing_going_wrong_every_request_is_answered(seed: int, overlap: bool, stages: int) -> None:
    world = World(seed, overlap=overlap, calm=True, num_micro_batches=stages)
    world.live(100)
    num_taken = len(world.local) + len(world.handoffs) + len(world.answered)
    world.settle()
    world.check()
    assert len(world.answered) == num_taken


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), overlap=st.booleans(), calm=st.booleans(), stages=STAGES)
def test_pools_that_shrink_and_preemption_at_any_moment_change_no_answer(
    seed: int, overlap: bool, calm: bool, stages: int
) -> None:
    world = World(seed, overlap=overlap, calm=calm, pressed=True, num_micro_batches=stages)
    world.live(120)
    world.settle()
    world.check()


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), overlap=st.booleans(), pressed=st.booleans(), stages=STAGES)
def test_samples_stopped_in_the_middle_change_no_other_answer(
    seed: int, overlap: bool, pressed: bool, stages: int
) -> None:
    world = World(seed, overlap=overlap, pressed=pressed, stopping=True, num_micro_batches=stages)
    world.live(200)
    world.settle()
    world.check()


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_one_step_ahead_gives_what_the_plain_loop_gives(seed: int) -> None:
    plain, ahead = World(seed, overlap=False, calm=True), World(seed, overlap=True, calm=True)
    answers = []
    for world in (plain, ahead):
        for _ in range(10):
            world._submit(world.prefill)
        world.settle()
        answers.append({key: world.prefill.tokens(key) for _, _, key in world.answered})
    assert answers[0] == answers[1]


# -- one request


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_prompt", [1, 3, 4, 5, 7, 8, 9, 40])
def test_prompts_at_every_edge_of_blocks_and_chunks(num_prompt: int, overlap: bool) -> None:
    worker = CheckedWorker(max_step_tokens=8, overlap=overlap)
    asked = request("a", num_prompt, max_tokens=9)
    worker.scheduler.submit(asked, 0.0)
    worker.run()
    worker.check_answer(asked)
    worker.check_empty()


@pytest.mark.parametrize("overlap", [False, True])
def test_case_41_a_stopped_sample_computes_no_further_and_the_last_one_carries_the_usage(overlap: bool) -> None:
    worker = CheckedWorker(NO_EOS, overlap=overlap)
    asked = request("a", 8, max_tokens=40, n=3)
    worker.scheduler.submit(asked, 0.0)
    while len(worker.tokens(asked.key, 2)) < 5:
        worker.turn()
    stopped = [worker.scheduler.stop_sample(asked.key, index, 0.0) for index in (0, 2)]
    assert [(output.token_ids, output.finish, output.usage) for output in stopped if output] == [
        ((), FinishReason.STOP, None)
    ] * 2
    worker.collect(output for output in stopped if output)
    before = worker.checker.num_tokens
    worker.run()
    assert len(worker.tokens(asked.key, 1)) == 40
    assert worker.checker.num_tokens - before == 40 - len(worker.tokens(asked.key, 0)) - (1 if overlap else 0)
    last = worker.outputs[asked.key, 1][-1]
    assert last.usage == Usage(8, 40 + sum(len(worker.tokens(asked.key, index)) for index in (0, 2)))
    assert last.timeline is not None
    worker.check_empty()


def test_one_step_ahead_decode_rows_say_what_you_drew_last() -> None:
    worker = CheckedWorker(NO_EOS)
    worker.scheduler.submit(request("a", 4, max_tokens=3), 0.0)
    worker.run()
    assert [plan.work for plan in worker.plans] == [
        (RowWork(0, 0, 4, (1, 2, 3, 4), (0,), 1),),
        (RowWork(0, 4, 1, None, (1,), 1),),
        (RowWork(0, 5, 1, None, (), 1),),
    ]
    assert [plan.num_decodes for plan in worker.plans] == [0, 1, 1]


def test_the_token_drawn_after_the_end_is_dropped_and_only_then_the_blocks_are_free() -> None:
    worker = CheckedWorker(FakeModel(eos_token_ids=frozenset(range(32))))
    worker.scheduler.submit(request("a", 4, max_tokens=9), 0.0)
    worker.launch()
    worker.launch()
    assert worker.land().outputs[0].finish is FinishReason.STOP
    assert worker.scheduler.counts() == BlockCounts(free=62, quarantined=2)
    assert worker.launch() is None
    assert worker.land().outputs == []
    worker.check_empty()


def test_a_finish_by_length_is_known_ahead_and_nothing_is_computed_beyond_it() -> None:
    worker = CheckedWorker(NO_EOS)
    worker.scheduler.submit(request("a", 4, max_tokens=5), 0.0)
    worker.run()
    assert worker.checker.num_tokens == 4 + 4


@pytest.mark.parametrize("overlap", [False, True])
def test_case_21_max_tokens_one_yields_one_token(overlap: bool) -> None:
    worker = CheckedWorker(NO_EOS, overlap=overlap)
    worker.scheduler.submit(request("a", 6, max_tokens=1), 0.0)
    worker.run()
    (output,) = worker.outputs[RequestKey("a"), 0]
    assert (len(output.token_ids), output.finish, output.usage) == (1, FinishReason.LENGTH, Usage(6, 1, 0))
    assert worker.checker.num_tokens == 6


def test_logprobs_run_parallel_to_the_tokens_of_those_who_asked() -> None:
    worker = CheckedWorker(NO_EOS)
    worker.scheduler.submit(request("a", num_logprobs=2), 0.0)
    worker.scheduler.submit(request("b", first=2), 0.0)
    worker.run()
    for output in worker.outputs[RequestKey("a"), 0]:
        assert output.logprobs == tuple(PlanChecker.logprobs(token) for token in output.token_ids)
    assert all(output.logprobs == () for output in worker.outputs[RequestKey("b"), 0])


# -- the prefix cache


def test_a_second_request_starts_behind_what_is_cached_and_computes_at_least_one_token() -> None:
    worker = CheckedWorker(NO_EOS)
    first, second = request("a", 8), request("b", 8)
    worker.scheduler.submit(first, 0.0)
    worker.run()
    before = worker.checker.num_tokens
    worker.scheduler.submit(second, 0.0)
    worker.run()
    worker.check_answer(second)
    assert worker.outputs[second.key, 0][0].usage == Usage(8, 1, cached_tokens=4)
    assert worker.checker.num_tokens - before == 4 + 3


def test_output_is_cached_too_for_the_next_turn() -> None:
    worker = CheckedWorker(NO_EOS)
    first = request("a", 6, max_tokens=11)
    worker.scheduler.submit(first, 0.0)
    worker.run()
    history = (*first.prompt_token_ids, *worker.tokens(first.key))
    again = Request(RequestKey("b"), (*history, 9), SamplingParams(max_tokens=1))
    worker.scheduler.submit(again, 0.0)
    worker.run()
    worker.check_answer(again)
    assert worker.outputs[again.key, 0][0].usage == Usage(18, 1, cached_tokens=16)


def test_reset_cache_forgets_what_is_cached_and_what_is_being_computed() -> None:
    worker = CheckedWorker(NO_EOS)
    worker.scheduler.submit(request("a", 8), 0.0)
    worker.run()
    worker.scheduler.submit(request("b", 12, max_tokens=9, first=2), 0.0)
    worker.launch()
    worker.land()
    assert worker.scheduler.reset_cache() == 2 + 3
    worker.run()
    assert worker.ledger.snapshot() == ()
    assert worker.scheduler.counts() == BlockCounts(free=64)


def test_case_05_abort_between_chunks_frees_once_and_publishes_only_what_was_final() -> None:
    """Four chunks of two blocks; cancelled while the third is in flight."""
    worker = CheckedWorker(NO_EOS, max_step_tokens=8)
    worker.scheduler.submit(request("a", 32), 0.0)
    worker.launch()
    worker.land()
    worker.launch()
    worker.land()
    worker.launch()
    assert worker.scheduler.cancel(RequestKey("a"), 0.0)
    assert not worker.scheduler.cancel(RequestKey("a"), 0.0)
    assert worker.scheduler.counts() == BlockCounts(free=58, quarantined=6)
    assert worker.land().outputs == []
    worker.check_empty()
    assert worker.scheduler.counts() == BlockCounts(free=60, cached=4)
    assert not worker.scheduler.has_work


# -- several samples


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_prompt", [6, 8])
def test_a_prompt_is_computed_once_for_all_its_samples(num_prompt: int, overlap: bool) -> None:
    worker = CheckedWorker(NO_EOS, overlap=overlap)
    asked = request("a", num_prompt, max_tokens=5, n=3)
    worker.scheduler.submit(asked, 0.0)
    worker.run()
    worker.check_answer(asked)
    worker.check_empty()
    assert worker.checker.num_tokens == num_prompt + 3 * 4
    assert sum(len(plan.copies) for plan in worker.plans) == (2 if num_prompt % 4 else 0)
    last = max(
        (o for k in range(3) for o in worker.outputs[asked.key, k]),
        key=lambda o: o.usage is not None and o.num_generated,
    )
    assert last.usage == Usage(num_prompt, 15, 0)


def test_samples_whose_copy_finds_no_block_compute_the_prompts_end_again() -> None:
    worker = CheckedWorker(NO_EOS, num_blocks=3)
    asked = request("a", 10, max_tokens=3, n=3)
    worker.scheduler.submit(asked, 0.0)
    worker.run()
    worker.check_answer(asked)
    worker.check_empty()
    assert worker.scheduler.num_preemptions >= 2


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
    with pytest.raises(InvalidRequest, match="stop_token_ids must be from 0 to 31, got 40"):
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


# -- ways out and views


def test_deadlines_end_requests_in_every_state() -> None:
    worker = CheckedWorker(NO_EOS, max_num_seqs=1)
    worker.scheduler.submit(request("runs", seconds_left=5.0), 10.0)
    worker.turn(10.0)
    worker.scheduler.submit(request("waits", seconds_left=3.0, first=2), 10.0)
    worker.scheduler.expect(request("expected", seconds_left=4.0, first=3), 10.0)
    worker.scheduler.expect(request("claimed", 8, seconds_left=4.0, first=4), 10.0)
    worker.scheduler.incoming.claim(RequestKey("claimed"))
    worker.scheduler.submit(request("patient", first=5), 10.0)
    assert worker.scheduler.expire(12.9) == ([], [])
    assert worker.scheduler.expire(13.0) == ([RequestKey("waits")], [])
    late, _ = worker.scheduler.expire(20.0)
    assert {key.request_id for key in late} == {"runs", "expected", "claimed"}
    worker.run(20.0)
    assert worker.finish(RequestKey("patient")) is FinishReason.LENGTH
    worker.check_empty()
    assert worker.scheduler.load() == Load()


def test_load_says_what_waits_and_runs_and_whose_it_is() -> None:
    worker = CheckedWorker(NO_EOS, max_num_seqs=1)
    running, waiting, expected = request("a", 6), request("b", 9, first=2), request("c", 8, first=3)
    worker.scheduler.submit(running, 0.0)
    worker.launch()
    worker.scheduler.submit(waiting, 0.0)
    worker.scheduler.expect(expected, 0.0)
    worker.scheduler.incoming.claim(expected.key)
    assert worker.scheduler.load() == Load(
        num_waiting=2, num_running=1, waiting_prefill_tokens=6 + 9, context_tokens=6, used_blocks=2, claimed_tokens=8
    )
    assert worker.scheduler.load_of([waiting.key, RequestKey("gone")]) == Load(num_waiting=1, waiting_prefill_tokens=9)


def test_a_prompt_is_load_until_it_is_computed_and_not_only_until_it_is_planned() -> None:
    """What a step of half a second is busy with showed in no report: other routers took the worker for an idle one."""
    worker = CheckedWorker(NO_EOS, max_step_tokens=8)
    worker.scheduler.submit(request("a", 13), 0.0)
    left = []
    for act in (worker.launch, worker.launch, worker.land, worker.land):
        act()
        left.append(worker.scheduler.load().waiting_prefill_tokens)
    assert left == [13, 13, 5, 0]
    assert worker.scheduler.load().num_running == 1


def test_there_is_work_until_the_last_result_is_in() -> None:
    worker = CheckedWorker(NO_EOS)
    assert not worker.scheduler.has_work
    worker.scheduler.submit(request("a", max_tokens=1, n=2), 0.0)
    assert worker.scheduler.has_work
    worker.launch()
    assert worker.launch() is None
    assert worker.scheduler.has_work
    worker.land()
    assert not worker.scheduler.has_work


def test_results_come_in_order_and_with_all_their_tokens() -> None:
    worker = CheckedWorker(NO_EOS)
    worker.scheduler.submit(request("a"), 0.0)
    worker.launch()
    result = worker.flights.popleft()
    with pytest.raises(InternalError, match="plan 9 is not the next"):
        worker.scheduler.apply(type(result)(9, result.token_ids), 0.0)
    with pytest.raises(InternalError, match="draws 1 tokens, its result holds 2"):
        worker.scheduler.apply(type(result)(1, (*result.token_ids, 3)), 0.0)
