"""One request and its samples: the stop rule, tokens by position, block ids as they grow, usage and timeline."""

import pytest

from headrace.blocks import BlockHasher
from headrace.values import FinishReason, Request, RequestKey, SamplingParams, Timeline, TokenLogprobs, Usage
from workers.scheduling.sequence import Kind, RequestState, Sequence, num_blocks_for

HASHER = BlockHasher(revision="r", kv_format="f", block_size=4)
EOS, STOP = 0, 7


def make(sampling: SamplingParams, num_prompt: int = 6, n: int = 1, max_context_tokens: int = 100) -> RequestState:
    request = Request(RequestKey("r"), tuple(range(1, num_prompt + 1)), sampling, n=n, seconds_left=9.0)
    return RequestState(
        request,
        Kind.LOCAL,
        order=1,
        now=10.0,
        hasher=HASHER,
        eos_token_ids=frozenset({EOS}),
        max_context_tokens=max_context_tokens,
    )


@pytest.mark.parametrize(
    ("sampling", "token", "num_generated", "finish"),
    [
        (SamplingParams(max_tokens=5), 3, 1, None),
        (SamplingParams(max_tokens=5), 3, 5, FinishReason.LENGTH),
        (SamplingParams(max_tokens=1), 3, 1, FinishReason.LENGTH),
        (SamplingParams(max_tokens=5), EOS, 1, FinishReason.STOP),
        (SamplingParams(max_tokens=5), EOS, 5, FinishReason.STOP),
        (SamplingParams(max_tokens=5, ignore_eos=True), EOS, 1, None),
        (SamplingParams(max_tokens=5, ignore_eos=True), EOS, 5, FinishReason.LENGTH),
        (SamplingParams(max_tokens=5, stop_token_ids=(STOP,)), STOP, 2, FinishReason.STOP),
        (SamplingParams(max_tokens=5, stop_token_ids=(STOP,), ignore_eos=True), STOP, 2, FinishReason.STOP),
        (SamplingParams(max_tokens=5, min_tokens=3), EOS, 2, None),
        (SamplingParams(max_tokens=5, min_tokens=3, stop_token_ids=(STOP,)), STOP, 2, None),
        (SamplingParams(max_tokens=5, min_tokens=3), EOS, 3, FinishReason.STOP),
    ],
)
def test_the_one_stop_rule(
    sampling: SamplingParams, token: int, num_generated: int, finish: FinishReason | None
) -> None:
    assert make(sampling).finish_of(token, num_generated) is finish


def test_the_context_ends_a_sample_too() -> None:
    state = make(SamplingParams(max_tokens=50), num_prompt=6, max_context_tokens=8)
    assert state.finish_of(3, 1) is None
    assert state.finish_of(3, 2) is FinishReason.LENGTH


def test_tokens_by_position_run_from_the_prompt_into_the_output() -> None:
    seq = make(SamplingParams(max_tokens=50)).trunk
    for token in (21, 22, 23):
        seq.accept(token, None, 0.0)
    assert seq.tokens(0, 6) == (1, 2, 3, 4, 5, 6)
    assert seq.tokens(4, 8) == (5, 6, 21, 22)
    assert seq.tokens(7, 9) == (22, 23)
    assert seq.num_tokens == 9


def test_block_ids_grow_as_if_all_tokens_had_been_hashed_at_once() -> None:
    state = make(SamplingParams(max_tokens=50))
    trunk, other = state.trunk, Sequence(state, 1, state.prompt_chain)
    for token in range(20, 31):
        trunk.accept(token, None, 0.0)
        other.accept(token + 1, None, 0.0)
        full = trunk.num_tokens // 4
        assert trunk.extend_chain(full) == list(HASHER.chain(trunk.tokens(0, full * 4)))
    assert state.prompt_chain == list(HASHER.chain(range(1, 7))), "samples that differ do not share what follows"
    assert other.extend_chain(2) == list(HASHER.chain(other.tokens(0, 8)))


def test_usage_comes_with_the_first_token_of_sample_0_and_with_the_last_of_all() -> None:
    state = make(SamplingParams(max_tokens=2), n=2)
    state.cached_tokens = 4
    first, second = state.trunk, Sequence(state, 1, state.prompt_chain)
    state.samples.append(second)

    begun = first.accept(5, None, 12.0)
    assert begun.usage == Usage(6, 1, 4)
    assert begun.timeline is not None, "where the time to it went"
    assert second.accept(5, None, 12.0).usage is None
    ended = first.accept(5, TokenLogprobs(5, -0.5), 13.0)
    assert (ended.finish, ended.usage, ended.timeline) == (FinishReason.LENGTH, None, None)
    assert ended.logprobs == (TokenLogprobs(5, -0.5),)
    last = second.accept(EOS, None, 14.0)
    assert (last.finish, last.num_generated) == (FinishReason.STOP, 2)
    assert last.usage == Usage(prompt_tokens=6, completion_tokens=4, cached_tokens=4)
    assert last.timeline is not None


def test_the_timeline_says_where_the_time_went() -> None:
    state = make(SamplingParams(max_tokens=2))
    state.started_at = 11.0
    state.num_preemptions = 3
    state.trunk.accept(5, None, 13.0)
    last = state.trunk.accept(5, None, 17.0)
    assert last.timeline == Timeline(queue_seconds=1.0, prefill_seconds=2.0, decode_seconds=4.0, num_preemptions=3)


def test_the_timeline_of_a_hand_off_takes_queue_and_prefill_from_the_peer() -> None:
    state = make(SamplingParams(max_tokens=1))
    transfer = state.transfer
    transfer.prefill_worker, transfer.num_blocks, transfer.num_bytes = "p0", 2, 64
    transfer.queue_seconds, transfer.prefill_seconds = 0.25, 0.5
    state.began_at, transfer.asked_at, transfer.landed_at = 11.0, 12.0, 12.875
    last = state.trunk.accept(5, None, 13.0)
    assert last.timeline == Timeline(
        0.25, 0.5, 0.125, 0.0, "p0", 2, 64, claim_seconds=1.0, join_seconds=0.125, retry_seconds=1.0
    )
    assert last.timeline.ttft_seconds == 13.0 - state.arrived_at


def test_deadlines_count_from_arrival() -> None:
    assert make(SamplingParams(max_tokens=1)).deadline == 19.0


def test_repr_tells_who_and_how_far() -> None:
    assert repr(make(SamplingParams(max_tokens=1)).trunk) == "Sequence(r/1#0, waiting, 0 of 6 computed)"


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2)])
def test_blocks_for_tokens(tokens: int, blocks: int) -> None:
    assert num_blocks_for(tokens, 4) == blocks


def test_it_prefills_until_its_first_token_and_not_again_when_it_is_preempted() -> None:
    state = make(SamplingParams(max_tokens=50))
    seq = state.trunk
    assert seq.is_prefilling
    seq.num_computed = 5
    assert seq.is_prefilling
    seq.num_computed = 6
    assert not seq.is_prefilling
    seq.accept(21, None, 0.0)
    seq.rewind()
    assert not seq.is_prefilling
