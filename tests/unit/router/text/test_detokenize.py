"""Stop strings: found however the text is cut, never sent, and nothing else held back."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.text.detokenize import Characters, Pieces, Stops, TextStream


def spell(words: list[str]) -> Pieces:
    """Token i is words[i]."""
    return Pieces(lambda token_id: words[token_id].encode())


def stream(words: list[str], stops: list[str], min_tokens: int = 0) -> TextStream:
    return TextStream(Characters(spell(words)), stops, min_tokens)


def feed_all(stops: list[str], parts: list[str]) -> tuple[str, bool]:
    matcher, sent = Stops(stops), []
    for part in parts:
        text, stopped = matcher.feed(part)
        sent.append(text)
        if stopped:
            return "".join(sent), True
    return "".join(sent) + matcher.end(), False


def first_complete(stops: list[str], text: str) -> tuple[str, bool]:
    """The specification: character by character, stop at the first that is complete."""
    for end in range(1, len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            return text[: end - max(map(len, done))], True
    return text, False


@given(
    text=st.text(alphabet="ab\n", max_size=24),
    stops=st.lists(st.text(alphabet="ab\n", min_size=1, max_size=5), min_size=1, max_size=4),
    cuts=st.lists(st.integers(0, 24), max_size=8),
)
def test_case_41_the_first_complete_stop_ends_the_text_however_it_is_cut(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    parts = [text[start:end] for start, end in itertools.pairwise(edges)]
    assert feed_all(stops, parts) == first_complete(stops, text)


@pytest.mark.parametrize("stop", ["own fox", "\nUser:", "quick"])
def test_case_41_a_stop_over_token_borders_is_not_sent(stop: str) -> None:
    words = ["The qu", "ick br", "own", " fo", "x\n", "Us", "er", ": hi"]
    text, tokens = stream(words, [stop]), []
    for token_id in range(len(words)):
        delta = text.push([token_id])
        tokens.append(delta.text)
        if delta.stopped:
            break
    assert "".join(tokens) == "The quick brown fox\nUser: hi".partition(stop)[0]
    assert stop in "".join(words[: token_id + 1])


def test_case_41_a_stop_that_never_completes_is_held_only_while_it_may() -> None:
    text = stream(["brown", " fo", "g", "!"], ["own fox"])
    assert [text.push([i]).text for i in range(4)] == ["br", "", "own fog", "!"]


def test_case_41_the_held_tail_is_flushed_at_max_tokens() -> None:
    text = stream(["br", "own fo"], ["own fox"])
    assert [text.push([0, 1]).text, text.flush().text] == ["br", "own fo"]


def test_case_23_a_stop_equal_to_the_first_tokens_text_leaves_no_text() -> None:
    assert stream(["Paris", " is"], ["Paris"]).push([0, 1]) == ("", 1, True)


def test_num_consumed_names_the_token_that_completed_the_stop() -> None:
    assert stream(["a", "b", "c", "d"], ["bc"]).push([0, 1, 2, 3]) == ("a", 3, True)


def test_case_23_min_tokens_lets_an_early_stop_pass() -> None:
    text = stream(["a", "b", "a", "b"], ["b"], min_tokens=3)
    assert [text.push([i]) for i in range(4)] == [("a", 1, False), ("b", 1, False), ("a", 1, False), ("", 1, True)]


def test_half_a_character_is_held_beside_a_stop() -> None:
    raw = ["€".encode()[:1], "€".encode()[1:], b"!"]
    text = TextStream(Characters(Pieces(lambda i: raw[i])), ["€!"])
    assert [text.push([i]) for i in range(3)] == [("", 1, False), ("", 1, False), ("", 1, True)]


def test_the_end_of_a_cut_character_may_complete_a_stop() -> None:
    text = TextStream(Characters(Pieces(lambda _: b"\xe2")), ["\N{REPLACEMENT CHARACTER}"])
    assert text.push([0]) == ("", 1, False)
    assert text.flush() == ("", 0, True)
