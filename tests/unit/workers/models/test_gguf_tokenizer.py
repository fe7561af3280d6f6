"""workers.models.gguf_tokenizer: each splitting rule, special tokens, and the first token where a model wants one."""

import pathlib
from typing import Any

import pytest
from tokenizers import Tokenizer, pre_tokenizers

from workers.models.gguf_tokenizer import TokenType, build

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
PAIRS = ("1 2", "12 3", "Ġ a", "Ġa b", "a b", "ab c", "Ġ Ġ")
TOKENS = ("<s>", "</s>", "<tool>", *BYTES, *(pair.replace(" ", "") for pair in PAIRS), "whole")


class Metadata:
    """The keys of a GGUF file."""

    path = pathlib.Path("model.gguf")

    def __init__(self, **keys: Any) -> None:
        types = [TokenType.CONTROL, TokenType.CONTROL, TokenType.USER_DEFINED]
        self._keys: dict[str, Any] = {
            "model": "gpt2",
            "tokens": list(TOKENS),
            "token_type": [*types, *[TokenType.NORMAL] * (len(TOKENS) - 3)],
            "merges": list(PAIRS),
            "bos_token_id": 0,
            **keys,
        }

    def get(self, key: str, default: Any = None) -> Any:
        return self._keys.get(key.removeprefix("tokenizer.ggml."), default)

    def need(self, key: str) -> Any:
        return self._keys[key.removeprefix("tokenizer.ggml.")]

    def need_own(self, key: str) -> Any:
        return {"context_length": 100}[key]


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return list(tokenizer.encode(text, add_special_tokens=False).tokens)


@pytest.mark.parametrize(
    ("pre", "number"),
    [
        ("default", ["123"]),
        ("gpt-2", ["123"]),
        ("smollm", ["1", "2", "3"]),
        ("qwen2", ["1", "2", "3"]),
        ("tekken", ["1", "2", "3"]),
        ("llama-bpe", ["123"]),
    ],
)
def test_numbers_are_split_as_the_model_learned(pre: str, number: list[str]) -> None:
    assert pieces(build(Metadata(pre=pre)), "123") == number


def test_llama_splits_long_numbers_by_three() -> None:
    assert pieces(build(Metadata(pre="llama-bpe")), "1231231") == ["123", "123", "1"]


@pytest.mark.parametrize("pre", ["default", "smollm", "qwen2", "tekken", "llama-bpe"])
def test_words_take_their_space_and_text_comes_back(pre: str) -> None:
    tokenizer = build(Metadata(pre=pre, add_bos_token=False))
    assert pieces(tokenizer, "abc ab") == ["abc", "Ġab"]
    for text in ("abc  ab\n\n\tcafé 12.5€ don't 🙂", " ", ""):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_qwen_composes_letters() -> None:
    assert build(Metadata(pre="qwen2")).encode("e\u0301").ids == build(Metadata(pre="qwen2")).encode("é").ids
    assert build(Metadata(pre="smollm")).encode("e\u0301").ids != build(Metadata(pre="smollm")).encode("é").ids


def test_whole_words_of_the_vocabulary_need_no_merges_where_the_model_says_so() -> None:
    assert pieces(build(Metadata(pre="llama-bpe")), "whole") == ["whole"]
    assert pieces(build(Metadata(pre="qwen2")), "whole") == list("whole")


def test_control_tokens_are_special_and_the_users_are_not() -> None:
    tokenizer = build(Metadata(pre="smollm"))
    ids = tokenizer.encode("a<tool>b</s>", add_special_tokens=False).ids
    assert [ids[1], ids[3]] == [2, 1]
    assert tokenizer.decode(ids) == "a<tool>b"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<tool>b</s>"


@pytest.mark.parametrize(
    ("keys", "first"),
    [
        ({"pre": "llama-bpe"}, 0),
        ({"pre": "llama-bpe", "add_bos_token": False}, None),
        ({"pre": "smollm"}, None),
        ({"pre": "smollm", "add_bos_token": True}, 0),
    ],
)
def test_the_first_token_is_added_where_the_model_wants_it(keys: dict[str, Any], first: int | None) -> None:
    ids = build(Metadata(**keys)).encode("ab").ids
    assert (ids[0] == 0) == (first == 0)
    assert len(ids) == (2 if first == 0 else 1)
