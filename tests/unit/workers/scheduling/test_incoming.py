"""Hand-offs to a decode worker, against an executor that believes nothing: same answers, nothing lost."""

from typing import Any

import pytest

from headrace.errors import InternalError
from headrace.values import BlockCounts, FinishReason, Request, RequestKey, Timeline, TokenLogprobs, Usage
from tests.plan_checker import CheckedWorker, FakeModel
from tests.unit.workers.scheduling.prompts import NO_EOS, prefilled, request
from workers.scheduling.scheduler import ChunkDone, FirstToken


def hand_over(prefill: CheckedWorker, decode: CheckedWorker, handed: Request, now: float = 0.0) -> ChunkDone:
    """The whole hand-off, read included; the request is then arrived at `decode`."""
    decode.scheduler.expect(handed, now)
    outlook = decode.scheduler.incoming.claim(handed.key)
    chunks = prefilled(prefill, handed, outlook.held_blocks, now)
    read(prefill, decode, handed.key, [block for chunk in chunks for block in chunk.blocks])
    last = chunks[-1]
    decode.collect(decode.scheduler.incoming.arrive(handed.key, last.first_tokens, last.cached_tokens, now))
    prefill.scheduler.release(handed.key, now)
    return last


def read(prefill: CheckedWorker, decode: CheckedWorker, key: RequestKey, theirs: list[tuple[int, int]]) -> None:
    ours = decode.scheduler.incoming.allocate(key, len(theirs))
    assert ours is not None
    pull = decode.scheduler.incoming.begin_pull(ours)
    assert decode.checker.pull(prefill.checker, zip(theirs, ours, strict=True))
    decode.scheduler.incoming.end_pull(pull)


@pytest.mark.parametrize("num_prompt", [1, 3, 4, 5, 19])
@pytest.mark.parametrize("n", [1, 3])
def test_a_handed_over_request_gets_the_same_answer(num_prompt: int, n: int) -> None:
    prefill, decode = CheckedWorker(NO_EOS, max_step_tokens=8), CheckedWorker(NO_EOS)
    asked = request("a", num_prompt, max_tokens=6, n=n)
    hand_over(prefill, decode, asked)
    decode.run()
    decode.check_answer(asked)
    assert decode.checker.num_tokens == 5 * n
    decode.check_empty()
    prefill.check_empty()


def test_chunks_are_announced_as_they_become_final_and_the_partial_block_with_the_last() -> None:
    prefill = CheckedWorker(NO_EOS, max_step_tokens=6)
    chunks = prefilled(prefill, request("a", 18))
    assert [(chunk.first_block, len(chunk.blocks), chunk.last) for chunk in chunks] == [
        (0, 1, False),
        (1, 2, False),
        (3, 2, True),
    ]
    assert all(prefill.checker.epochs[block] == epoch for chunk in chunks for block, epoch in chunk.blocks)
    assert [first.index for first in chunks[-1].first_tokens] == [0]
    assert prefill.scheduler.counts() == BlockCounts(free=59, pinned=5)


def test_a_ticket_that_is_announced_ahead_names_its_blocks_with_each_plan_and_its_tokens_at_the_end() -> None:
    prefill = CheckedWorker(NO_EOS, max_step_tokens=6)
    prefill.scheduler.ticket(request("a", 18), 0, 0.0, ahead=True)
    plan = prefill.launch()
    assert plan is not None
    assert [(chunk.after_step, chunk.first_block, len(chunk.blocks)) for chunk in prefill.ahead] == [
        (plan.number, 0, 1)
    ]
    done = [chunk for events in prefill.run() for chunk in events.chunks]
    assert [(c.first_block, len(c.blocks), c.last) for c in prefill.ahead] == [
        (0, 1, False),
        (1, 2, False),
        (3, 2, False),
    ]
    assert [(chunk.first_block, chunk.blocks, chunk.last, chunk.after_step) for chunk in done] == [(5, (), True, 0)]
    assert [first.index for first in done[0].first_tokens] == [0]
    assert all(prefill.checker.epochs[block] == epoch for chunk in prefill.ahead for block, epoch in chunk.blocks)
    assert prefill.scheduler.counts() == BlockCounts(free=59, pinned=5)


def test_what_the_puller_holds_is_not_announced_and_what_is_cached_comes_with_the_first_chunk() -> None:
    prefill = CheckedWorker(NO_EOS, max_step_tokens=8)
    prefilled(prefill, request("a", 18))
    prefill.scheduler.release(RequestKey("a"), 0.0)
    chunks = prefilled(prefill, request("b", 18), held_blocks=2)
    assert [(chunk.first_block, len(chunk.blocks), chunk.cached_tokens) for chunk in chunks] == [(2, 3, 16)]


def test_a_full_hit_on_decode_leaves_one_token_to_compute_alone() -> None:
    decode = CheckedWorker(NO_EOS)
    decode.scheduler.submit(request("a", 8), 0.0)
    decode.run()
    again = request("b", 8)
    outlook = decode.scheduler.expect(again, 0.0)
    assert (outlook.held_blocks, outlook.remaining, outlook.num_prompt_blocks) == (1, 4, 2)
    decode.scheduler.incoming.fall_back(again.key, again.key, 0.0)
    decode.run()
    decode.check_answer(again)
    assert decode.outputs[again.key, 0][0].usage == Usage(8, 1, 4)


def test_case_21_a_handed_over_first_token_that_is_the_last_pulls_nothing() -> None:
    prefill, decode = CheckedWorker(NO_EOS), CheckedWorker(NO_EOS)
    asked = request("a", 9, max_tokens=1)
    decode.scheduler.expect(asked, 0.0)
    decode.scheduler.incoming.claim(asked.key)
    last = prefilled(prefill, asked)[-1]
    outputs = decode.scheduler.incoming.finish_early(asked.key, last.first_tokens, last.cached_tokens, 0.0)
    assert outputs is not None
    decode.collect(outputs)
    decode.check_answer(asked)
    assert outputs[0].usage == Usage(9, 1, 0)
    decode.check_empty()
    assert not decode.scheduler.cancel(asked.key, 0.0)


@pytest.mark.parametrize(
    "sampling", [{}, {"min_tokens": 3}, {"ignore_eos": True}, {"stop_token_ids": tuple(range(1, 20))}]
)
def test_case_23_the_stop_rule_holds_for_a_first_token_that_arrives(sampling: dict[str, Any]) -> None:
    model = FakeModel(eos_token_ids=frozenset(range(16)))
    for number in range(8):
        prefill, decode, alone = CheckedWorker(model), CheckedWorker(model), CheckedWorker(model)
        asked = request("a", 5 + number, max_tokens=6, **sampling)
        hand_over(prefill, decode, asked)
        decode.run()
        decode.check_answer(asked)
        alone.scheduler.submit(asked, 0.0)
        alone.run()
        assert alone.tokens(asked.key) == decode.tokens(asked.key)
        assert alone.finish(asked.key) == decode.finish(asked.key)
        decode.check_empty()


def test_case_24_samples_that_end_with_their_first_token_are_not_forked() -> None:
    decode = CheckedWorker(NO_EOS)
    asked = request("a", 6, max_tokens=4, n=3, stop_token_ids=(7,))
    decode.scheduler.expect(asked, 0.0)
    decode.scheduler.incoming.claim(asked.key)
    ours = decode.scheduler.incoming.allocate(asked.key, 2)
    assert ours is not None
    firsts = [FirstToken(0, 7), FirstToken(1, 8), FirstToken(2, 7)]
    assert decode.scheduler.incoming.finish_early(asked.key, firsts, 0, 0.0) is None
    outputs = decode.scheduler.incoming.arrive(asked.key, firsts, 4, 0.0)
    assert [(o.index, o.finish) for o in outputs] == [(0, FinishReason.STOP), (1, None), (2, FinishReason.STOP)]
    assert [o.usage for o in outputs] == [Usage(6, 1, 4), None, None]
    assert decode.scheduler.load().num_running == 1
    decode.scheduler.cancel(asked.key, 0.0)
    decode.check_empty()


def test_case_25_first_tokens_keep_their_logprobs() -> None:
    decode, prefill = CheckedWorker(NO_EOS), CheckedWorker(NO_EOS)
    asked = request("a", 6, n=2, num_logprobs=5)
    hand_over(prefill, decode, asked)
    decode.run()
    for index in range(2):
        outputs = decode.outputs[asked.key, index]
        assert [o.logprobs for o in outputs] == [
            (TokenLogprobs(o.token_ids[0], -float(o.token_ids[0])),) for o in outputs
        ]


def test_case_19_a_handed_over_request_that_is_preempted_computes_locally() -> None:
    prefill, decode = CheckedWorker(NO_EOS), CheckedWorker(NO_EOS, num_blocks=8, max_step_tokens=32)
    first = request("local", 12, max_tokens=16)
    decode.scheduler.submit(first, 0.0)
    decode.turn()
    handed = request("handed", 12, max_tokens=16, first=2)
    hand_over(prefill, decode, handed)
    decode.run()
    assert decode.scheduler.num_preemptions >= 1
    decode.check_answer(first)
    decode.check_answer(handed)
    decode.check_empty()


def test_case_01_blocks_that_a_read_may_still_write_go_to_nobody_before_it_ends() -> None:
    decode = CheckedWorker(NO_EOS)
    asked = request("a", 12)
    decode.scheduler.expect(asked, 0.0)
    decode.scheduler.incoming.claim(asked.key)
    ours = decode.scheduler.incoming.allocate(asked.key, 3)
    assert ours is not None
    pull = decode.scheduler.incoming.begin_pull(ours[:2])
    decode.scheduler.cancel(asked.key, 0.0)
    assert decode.scheduler.counts() == BlockCounts(free=62, quarantined=2)
    decode.scheduler.incoming.end_pull(pull)
    decode.check_empty()


def test_case_52_expected_requests_take_no_row_however_long_they_wait() -> None:
    decode = CheckedWorker(NO_EOS, max_num_seqs=2)
    for number in range(5):
        expected = request(f"parked{number}", 8, first=10 + number)
        decode.scheduler.expect(expected, 0.0)
        decode.scheduler.incoming.claim(expected.key)
    decode.scheduler.expect(request("unclaimed", 8, first=20), 0.0)
    assert not decode.scheduler.has_work, "an engine with nothing to compute stands still, and is well"
    assert not decode.scheduler.starting
    asked = request("a")
    decode.scheduler.submit(asked, 0.0)
    decode.run()
    decode.check_answer(asked)


def test_claims_are_bounded_and_count_what_is_held_and_promised() -> None:
    decode = CheckedWorker(NO_EOS, num_blocks=10, claim_fraction=0.8)
    names = [request(name, 16, first=at) for at, name in enumerate("abc", 1)]
    for each in names:
        decode.scheduler.expect(each, 0.0)
    assert decode.scheduler.incoming.may_claim(names[0].key)
    decode.scheduler.incoming.claim(names[0].key)
    assert decode.scheduler.load().claimed_tokens == 16
    assert decode.scheduler.incoming.may_claim(names[1].key)
    decode.scheduler.incoming.claim(names[1].key)
    assert not decode.scheduler.incoming.may_claim(names[2].key)
    decode.scheduler.incoming.allocate(names[0].key, 4)
    assert not decode.scheduler.incoming.may_claim(names[2].key)
    decode.scheduler.cancel(names[0].key, 0.0)
    assert decode.scheduler.incoming.may_claim(names[2].key)


def test_a_prompt_beyond_the_claim_budget_has_its_claim_where_nothing_is_held() -> None:
    """It fits the pool, so it was taken; the budget alone would let it wait for ever."""
    decode = CheckedWorker(NO_EOS, num_blocks=10, claim_fraction=0.5)
    large, small = request("large", 24), request("small", 4, first=2)
    for each in (large, small):
        decode.scheduler.expect(each, 0.0)
    assert decode.scheduler.incoming.may_claim(large.key)
    decode.scheduler.incoming.claim(small.key)
    assert not decode.scheduler.incoming.may_claim(large.key)
    decode.scheduler.cancel(small.key, 0.0)
    assert decode.scheduler.incoming.may_claim(large.key)


def test_promised_blocks_are_not_taken_by_new_prompts() -> None:
    decode = CheckedWorker(NO_EOS, num_blocks=10)
    expected = request("expected", 24)
    decode.scheduler.expect(expected, 0.0)
    decode.scheduler.incoming.claim(expected.key)
    decode.scheduler.submit(request("a", 20, max_tokens=1, first=2), 0.0)
    assert decode.launch() is None
    assert decode.scheduler.incoming.allocate(expected.key, 6) is not None
    decode.scheduler.cancel(expected.key, 0.0)
    decode.run()
    assert decode.finish(RequestKey("a")) is FinishReason.LENGTH


def test_a_running_sequence_that_waits_for_a_hand_offs_blocks_gives_way_to_it() -> None:
    """Each holds what the other needs: nothing is in flight, nothing can be computed, unless one yields."""
    decode = CheckedWorker(NO_EOS, num_blocks=8, max_step_tokens=32)
    grows = request("grows", 12, max_tokens=17)
    decode.scheduler.submit(grows, 0.0)
    decode.turn()
    expected = request("expected", 16, first=2)
    decode.scheduler.expect(expected, 0.0)
    decode.scheduler.incoming.claim(expected.key)
    assert decode.scheduler.incoming.allocate(expected.key, 3) is not None
    decode.run()
    assert decode.scheduler.has_work
    assert decode.scheduler.num_preemptions == 1
    assert decode.scheduler.incoming.allocate(expected.key, 1) is not None
    decode.scheduler.cancel(expected.key, 0.0)
    decode.run()
    decode.check_answer(grows)
    decode.check_empty()


def test_a_hand_off_that_fails_keeps_what_has_landed() -> None:
    prefill, decode = CheckedWorker(NO_EOS, max_step_tokens=8), CheckedWorker(NO_EOS)
    asked = request("a", 20)
    decode.scheduler.expect(asked, 0.0)
    decode.scheduler.incoming.claim(asked.key)
    chunks = prefilled(prefill, asked)
    read(prefill, decode, asked.key, list(chunks[0].blocks))
    decode.scheduler.incoming.landed(asked.key, 2)
    assert decode.scheduler.incoming.allocate(asked.key, 2) is not None

    retry = asked.key.next_attempt()
    outlook = decode.scheduler.incoming.restart(asked.key, retry, 0.0)
    assert (outlook.held_blocks, outlook.remaining) == (2, 12)
    alone = retry.next_attempt()
    decode.scheduler.incoming.fall_back(retry, alone, 0.0)
    decode.run()
    assert decode.tokens(alone) == NO_EOS.answer(asked)[0]
    assert decode.outputs[alone, 0][0].usage == Usage(20, 1, 8)
    decode.check_empty()


def test_out_of_turn_calls_are_errors_not_silence() -> None:
    scheduler = CheckedWorker(NO_EOS).scheduler
    expected, local = request("expected", 8), request("local")
    scheduler.expect(expected, 0.0)
    scheduler.submit(local, 0.0)
    with pytest.raises(InternalError, match="no claim"):
        scheduler.incoming.allocate(expected.key, 1)
    with pytest.raises(InternalError, match="not expected"):
        scheduler.incoming.claim(local.key)
    scheduler.incoming.claim(expected.key)
    with pytest.raises(InternalError, match="has a claim already"):
        scheduler.incoming.claim(expected.key)
    with pytest.raises(InternalError, match="2 blocks to come"):
        scheduler.incoming.arrive(expected.key, [FirstToken(0, 1)], 0, 0.0)
    with pytest.raises(InternalError, match="3 asked for"):
        scheduler.incoming.allocate(expected.key, 3)
    scheduler.incoming.allocate(expected.key, 2)
    with pytest.raises(InternalError, match="a first token for each of 1"):
        scheduler.incoming.arrive(expected.key, [FirstToken(1, 1)], 0, 0.0)


def test_the_timeline_of_a_hand_off_is_what_was_noted() -> None:
    prefill, decode = CheckedWorker(NO_EOS), CheckedWorker(NO_EOS)
    asked = request("a", 6, max_tokens=2)
    decode.scheduler.expect(asked, 0.0)
    decode.scheduler.incoming.note_transfer(asked.key, "p0", blocks=1, num_bytes=100, asked_at=0.25)
    decode.scheduler.incoming.note_transfer(
        asked.key, "p0", blocks=1, num_bytes=50, queue_seconds=1.0, prefill_seconds=2.0, landed_at=3.75
    )
    decode.scheduler.incoming.note_transfer(RequestKey("gone"), "p0")
    decode.scheduler.incoming.claim(asked.key)
    decode.scheduler.incoming.allocate(asked.key, 2)
    first = decode.scheduler.incoming.arrive(asked.key, [FirstToken(0, prefill_token(prefill, asked))], 0, 4.0)
    assert first[0].timeline == Timeline(1.0, 2.0, 0.5, 0.0, "p0", 2, 150, claim_seconds=0.25, join_seconds=0.25)
    decode.collect(first)
    decode.scheduler.cancel(asked.key, 4.0)
    again = request("b", 6, max_tokens=1)
    decode.scheduler.expect(again, 5.0)
    decode.scheduler.incoming.note_transfer(again.key, "p0", blocks=2, num_bytes=150, queue_seconds=1.0, asked_at=7.5)
    decode.scheduler.incoming.claim(again.key)
    outputs = decode.scheduler.incoming.finish_early(again.key, [FirstToken(0, 3)], 0, 9.0)
    assert outputs is not None
    timeline = outputs[0].timeline
    assert timeline is not None
    assert (timeline.prefill_worker, timeline.blocks_moved, timeline.bytes_moved) == ("p0", 2, 150)
    assert (timeline.queue_seconds, timeline.transfer_exposed_seconds, timeline.decode_seconds) == (1.0, 0.5, 0.0)


def prefill_token(prefill: CheckedWorker, asked: Request) -> int:
    return prefilled(prefill, asked)[-1].first_tokens[0].token_id
