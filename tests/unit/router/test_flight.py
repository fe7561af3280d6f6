from dataclasses import replace

import pytest

from headrace.errors import DeadlineExceeded, InternalError
from headrace.values import FinishReason, RequestKey, SamplingParams, SequenceOutput, TokenLogprobs, Usage
from router.decisions.tenants import NO_TARGETS, Targets
from router.flight import Flight
from tests.unit.router.stage import job, open_text

KEY = RequestKey("r")


def flight(**fields: object) -> Flight:
    request = job(**fields)  # type: ignore[arg-type]
    return Flight(request, KEY, lambda: open_text(request), 0.0)


def said(text: str, num_generated: int, *, index: int = 0, finish: FinishReason | None = None) -> SequenceOutput:
    return SequenceOutput(KEY, index, tuple(map(ord, text)), num_generated, finish=finish)


def test_messages_that_waited_together_become_one_piece_a_sample() -> None:
    on = flight(n=2)
    pieces = on.relay([said("a", 1), said("x", 1, index=1), said("b", 2), said("c", 3)])
    assert [(piece.index, piece.text) for piece in pieces] == [(0, "abc"), (1, "x")]


def test_case_21_one_token_is_one_token() -> None:
    on = flight(max_tokens=1)
    (piece,) = on.relay([said("a", 1, finish=FinishReason.LENGTH)])
    assert (piece.text, piece.finish, piece.usage) == ("a", "length", Usage(10, 1, 0))
    assert on.done


def test_case_46_every_piece_knows_how_much_of_the_prompt_was_cached() -> None:
    on = flight(n=2)
    first = replace(said("a", 1), usage=Usage(10, cached_tokens=6))
    pieces = [*on.relay([first]), *on.relay([said("b", 2, finish=FinishReason.LENGTH)])]
    pieces += [*on.relay([said("x", 1, index=1)]), *on.relay([said("y", 2, index=1, finish=FinishReason.LENGTH)])]
    assert [piece.cached_tokens for piece in pieces] == [6, 6, 6, 6]
    assert pieces[-1].usage == Usage(10, 4, 6)


def test_a_stop_string_in_the_last_message_wins_over_the_workers_length() -> None:
    on = flight(stop=("c",))
    (piece,) = on.relay([said("abcd", 4, finish=FinishReason.LENGTH)])
    assert (piece.text, piece.finish, len(piece.token_ids)) == ("ab", "stop", 3)
    assert piece.usage == Usage(10, 3, 0)
    assert on.ended_by_worker


def test_case_25_tokens_that_waited_together_keep_their_logprobs_up_to_a_stop_string() -> None:
    on = flight(stop=("c",))
    known = [TokenLogprobs(token, -0.5 - token) for token in map(ord, "abcd")]
    outputs = [replace(said(text, at + 1), logprobs=(known[at],)) for at, text in enumerate("abcd")]
    first, last = on.relay(outputs[:2]) + on.relay(outputs[2:])
    assert (first.logprobs, last.logprobs) == (tuple(known[:2]), (known[2],))
    assert last.usage == Usage(10, 3, 0), "as many as are counted"


def test_case_23_a_stop_string_counts_only_after_min_tokens() -> None:
    on = flight(stop=("a",), sampling=SamplingParams(max_tokens=9, min_tokens=3))
    first = on.relay([said("ab", 2)])
    last = on.relay([said("a", 3)])
    assert "".join(piece.text for piece in first + last) == "ab"
    assert last[-1].finish == "stop"


def test_a_token_that_is_missing_or_comes_twice_is_an_error() -> None:
    on = flight()
    on.relay([said("a", 1)])
    with pytest.raises(InternalError) as caught:
        on.relay([said("a", 1)])
    assert caught.value.numbers == {"counted": "2", "reported": "1"}


def test_a_sample_that_was_not_asked_for_is_an_error() -> None:
    with pytest.raises(InternalError, match="sample 1 of 1"):
        flight().relay([said("a", 1, index=1)])


def test_what_is_submitted_carries_time_left_and_never_less_than_none() -> None:
    on = flight()
    on.deadline = 5.0
    assert on.request(3.0, 64).seconds_left == 2.0
    assert on.request(9.0, 64).seconds_left == 0.0
    assert on.request(3.0, 64).local_prefill_max_tokens == 64
    assert on.request(3.0, 64).prefill is None


@pytest.mark.parametrize(
    ("targets", "first", "now", "verdict"),
    [
        (Targets(1.0, 0.1), None, 0.5, None),
        (Targets(1.0, 0.1), None, 1.5, "failed"),
        (Targets(1.0, 0.1), 0.5, 0.7, None),
        (Targets(1.0, 0.1), 0.5, 0.9, "failed"),
        (NO_TARGETS, None, 9.0, None),
        (NO_TARGETS, None, 11.0, "failed"),
        (NO_TARGETS, 1.0, 20.0, "failed"),
    ],
)
def test_what_a_clients_own_deadline_ended_before_anything_was_late_says_nothing(
    targets: Targets, first: float | None, now: float, verdict: str | None
) -> None:
    on = flight(targets=targets, seconds_left=now)
    on.outcome = DeadlineExceeded.__name__
    if first is not None:
        on.marks.first_token = first
        on.relay([said("abc", 3)])
    assert on.verdict(now) == verdict
    of_ours = flight(targets=targets)
    of_ours.outcome = DeadlineExceeded.__name__
    assert of_ours.verdict(now) == "failed", "the configured limit is our own"
