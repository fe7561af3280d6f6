"""The vocabulary inside a GGUF file as tokenizer.json and tokenizer_config.json.

Byte-level BPE only: the splitting rule that belongs to the vocabulary is named by tokenizer.ggml.pre.
"""

import json
import pathlib
from collections.abc import Callable
from enum import IntEnum
from typing import Any, Protocol

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from headrace.errors import CheckpointError


class TokenType(IntEnum):
    """tokenizer.ggml.token_type"""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class Metadata(Protocol):
    """What is read here of a GGUF file."""

    path: pathlib.Path

    def get(self, key: str, default: Any = None) -> Any: ...

    def need(self, key: str) -> Any: ...

    def need_own(self, key: str) -> Any: ...


_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split(pattern: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _gpt2() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


_PRE: dict[str, Callable[[], Any]] = {
    "default": _gpt2,
    "gpt-2": _gpt2,
    "smollm": _smollm,
    "llama-bpe": lambda: _split(rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}"),
    "llama3": lambda: _split(rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}"),
    "llama-v3": lambda: _split(rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}"),
    "qwen2": lambda: _split(rf"{_WORDS}|\p{{N}}|{_REST}"),
    "tekken": lambda: _split(_TEKKEN),
}
_WHOLE_WORDS_FIRST = ("llama-bpe", "llama3", "llama-v3", "tekken")
_BOS_BY_DEFAULT = ("llama-bpe", "llama3", "llama-v3", "tekken")


def write_tokenizer(file: Metadata, folder: pathlib.Path) -> None:
    """tokenizer.json and tokenizer_config.json of the vocabulary; CheckpointError when its kind is not known."""
    tokenizer = build(file)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    tokens = file.need("tokenizer.ggml.tokens")
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    for key, name in names.items():
        if (token_id := file.get(f"tokenizer.ggml.{key}_token_id")) is not None:
            config[name] = tokens[token_id]
    config["model_max_length"] = int(file.need_own("context_length"))
    if template := file.get("tokenizer.chat_template"):
        config["chat_template"] = template
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def build(file: Metadata) -> Tokenizer:
    kind = file.need("tokenizer.ggml.model")
    if kind != "gpt2":
        raise CheckpointError(
            f"{file.path}: tokenizer.ggml.model must be gpt2 (byte-level BPE), got {kind!r}; "
            "fetch this model from its safetensors checkpoint instead"
        )
    pre = file.get("tokenizer.ggml.pre", "default")
    if pre not in _PRE:
        raise CheckpointError(f"{file.path}: tokenizer.ggml.pre must be one of {', '.join(_PRE)}, got {pre!r}")
    tokens: list[str] = file.need("tokenizer.ggml.tokens")
    types: list[int] = file.get("tokenizer.ggml.token_type", [TokenType.NORMAL] * len(tokens))
    ordinary = {i for i, kind in enumerate(types) if kind in (TokenType.NORMAL, TokenType.BYTE, TokenType.UNUSED)}
    merges: list[str] = []
    if any(len(tokens[i]) > 1 for i in ordinary):  # a vocabulary of bytes alone has none
        merges = file.need("tokenizer.ggml.merges")
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=[(left, right) for left, right in (merge.split(" ", 1) for merge in merges)],
            ignore_merges=pre in _WHOLE_WORDS_FIRST,
        )
    )
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _PRE[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(
        [
            AddedToken(token, special=types[i] != TokenType.USER_DEFINED, normalized=False)
            for i, token in enumerate(tokens)
            if i not in ordinary
        ]
    )
    bos = file.get("tokenizer.ggml.bos_token_id")
    if bos is not None and file.get("tokenizer.ggml.add_bos_token", pre in _BOS_BY_DEFAULT):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", pair=f"{tokens[bos]} $A {tokens[bos]} $B", special_tokens=[(tokens[bos], bos)]
        )
    else:
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer
