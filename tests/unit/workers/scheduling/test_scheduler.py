"""The scheduler against an executor that believes nothing (tests.plan_checker): same answers, nothing lost."""

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace.errors import InternalError
from headrace.values import BlockCounts, FinishReason, Load, Request, RequestKey, SamplingParams, Usage
from tests.plan_checker import CheckedWorker, FakeModel, PlanChecker
from tests.scheduler_world import World
from tests.unit.workers.scheduling.prompts import NO_EOS, request
from workers.scheduling.plan import RowWork

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


def test_case_35_an_equal_prompt_of_another_salt_or_adapter_finds_nothing() -> None:
    worker = CheckedWorker(NO_EOS)
    plain = request("plain", 13)
    others = [replace(plain, key=RequestKey(name), **{name: "x"}) for name in ("cache_salt", "adapter")]
    for asked in (plain, *others, *(replace(each, key=RequestKey(f"{each.key.request_id} again")) for each in others)):
        worker.scheduler.submit(asked, 0.0)
        worker.run()
        first, *_ = worker.outputs[asked.key, 0]
        assert first.usage is not None
        assert first.usage.cached_tokens == (12 if "again" in asked.key.request_id else 0), asked.key
    adoption = worker.scheduler.adopting.begin(replace(plain, cache_salt="y"), 3)
    assert adoption is not None
    assert adoption.first == 0, "nor does what a decode worker offers of it"
    worker.scheduler.adopting.finish(adoption, landed=False)
    worker.check_empty()


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
        num_waiting=2,
        num_running=1,
        waiting_prefill_tokens=6 + 9,
        context_tokens=6,
        used_blocks=2,
        claimed_tokens=8,
        num_prefilling=1,
        prefilling_tokens=6,
    )
    assert worker.scheduler.load_of([waiting.key, RequestKey("gone")]) == Load(num_waiting=1, waiting_prefill_tokens=9)


def test_a_prompt_is_load_until_it_is_computed_and_not_only_until_it_is_planned() -> None:
    """What a step of half a second is busy with showed in no report: other routers took the worker for an idle one."""
    worker = CheckedWorker(NO_EOS, max_step_tokens=8)
    worker.scheduler.submit(request("a", 13), 0.0)
    left = []
    for act in (worker.launch, worker.launch, worker.land, worker.land):
        act()
        load = worker.scheduler.load()
        left.append((load.waiting_prefill_tokens, load.num_running, load.num_prefilling, load.prefilling_tokens))
    assert left == [(13, 1, 1, 13), (13, 1, 1, 13), (5, 1, 1, 13), (0, 1, 0, 0)]


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
