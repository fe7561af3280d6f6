"""Streams say what a whole decode says, however they are cut; whole characters only; no tokenizer is guessed at."""

import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders

from headrace.errors import CheckpointError
from router.text.vocabulary import Text
from tests.unit.router.checkpoints import CORPUS, byte_level, sentencepiece, write

BYTE_LEVEL = byte_level()
SENTENCEPIECE = sentencepiece()


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    return Text.load(write(tmp_path_factory.mktemp("bytes"), BYTE_LEVEL))


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Text:
    return Text.load(write(tmp_path_factory.mktemp("pieces"), SENTENCEPIECE))


def parts(text: Text, token_ids: list[int]) -> list[str]:
    stream = text.stream()
    return [*(stream.push([token_id]).text for token_id in token_ids), stream.flush().text]


@given(token_ids=st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() + 3), max_size=40))
def test_a_byte_level_stream_says_what_the_tokenizer_says_of_any_tokens(text: Text, token_ids: list[int]) -> None:
    whole = BYTE_LEVEL.decode(token_ids, skip_special_tokens=True)
    assert "".join(parts(text, token_ids)) == whole
    assert text.decode(token_ids) == whole


@given(source=st.text(max_size=30))
def test_a_sentencepiece_stream_says_what_the_tokenizer_says_of_any_text(pieces: Text, source: str) -> None:
    token_ids = pieces.encode(source)
    assert "".join(parts(pieces, token_ids)) == SENTENCEPIECE.decode(token_ids, skip_special_tokens=True)


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_sentencepiece_stream_cut_within_a_character_shows_each_byte_as_the_tokenizer_does(
    pieces: Text, cut: int
) -> None:
    token_ids = pieces.encode("The🙂")[:-cut]
    assert (
        "".join(parts(pieces, token_ids))
        == SENTENCEPIECE.decode(token_ids)
        == "The" + "\N{REPLACEMENT CHARACTER}" * (4 - cut)
    )


@pytest.mark.parametrize("source", CORPUS)
def test_half_a_character_is_never_sent(text: Text, pieces: Text, source: str) -> None:
    for model in (text, pieces):
        sent = parts(model, model.encode(source))
        assert "".join(sent) == source
        assert not any("\N{REPLACEMENT CHARACTER}" in part for part in sent)


def test_a_character_that_is_cut_at_the_end_is_shown_as_replaced(text: Text) -> None:
    token_ids = text.encode("é€")
    stream = text.stream()
    sent = stream.push(token_ids[:-1]).text
    assert "\N{REPLACEMENT CHARACTER}" not in sent
    assert stream.flush().text == "\N{REPLACEMENT CHARACTER}"


def test_special_tokens_are_not_text_but_have_a_name(text: Text) -> None:
    token_ids = text.encode("<|im_start|>hi<|im_end|>")
    assert text.decode(token_ids) == "hi"
    assert text.token_bytes(token_ids[0]) == b"<|im_start|>"
    assert text.token_bytes(10**12) == b""


def test_a_continuation_keeps_the_space_that_a_fresh_text_drops(pieces: Text) -> None:
    token_ids = pieces.encode("The fox")
    fresh, continued = pieces.stream(), pieces.stream(continues=True)
    assert (fresh.push(token_ids).text, continued.push(token_ids).text) == ("The fox", " The fox")


def test_the_bos_of_the_post_processor_is_added_only_when_asked(tmp_path: pathlib.Path) -> None:
    from tokenizers import processors

    tokenizer = byte_level()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    text = Text.load(write(tmp_path, tokenizer))
    assert text.encode("a") == [0, *text.encode("a", add_special_tokens=False)]


def test_truncation_that_a_checkpoint_was_saved_with_is_off(tmp_path: pathlib.Path) -> None:
    tokenizer = byte_level()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=64)
    text = Text.load(write(tmp_path, tokenizer))
    assert text.decode(text.encode("The quick brown fox")) == "The quick brown fox"


def test_a_decoder_that_is_not_known_is_refused_by_name(tmp_path: pathlib.Path) -> None:
    tokenizer = byte_level()
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(CheckpointError, match="decoder WordPiece is not supported"):
        Text.load(write(tmp_path, tokenizer))


def test_a_folder_without_a_tokenizer_is_refused_by_its_file(tmp_path: pathlib.Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Text.load(tmp_path)
    write(tmp_path, byte_level())
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model": {', encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"cannot read .*tokenizer\.json"):
        Text.load(tmp_path)


@pytest.mark.model
def test_the_small_real_model_round_trips(smollm2: pathlib.Path) -> None:
    text = Text.load(smollm2)
    for source in CORPUS:
        token_ids = text.encode(source, add_special_tokens=False)
        assert "".join(parts(text, token_ids)) == source
