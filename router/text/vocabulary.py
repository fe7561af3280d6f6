"""A model's words: its tokenizer and chat templates, read from the checkpoint folder without torch.

How tokens become text is derived from the decoder in tokenizer.json, token by token, so that streams need not decode
again what they have sent. Two kinds of decoder cover the models that are served; another one is refused at start.
"""

import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from tokenizers import Tokenizer

from headrace.errors import CheckpointError
from router.text.detokenize import Characters, Pieces, TextStream
from router.text.templates import ChatTemplates, Message, load_templates

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


class Text:
    """One model's tokenizer and templates. It fills caches but never changes: tasks and threads may share it."""

    def __init__(self, tokenizer: Tokenizer, templates: ChatTemplates) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._templates = templates
        self._special = {i: t.content for i, t in tokenizer.get_added_tokens_decoder().items() if t.special}
        state = tokenizer.decoder.__getstate__() if tokenizer.decoder is not None else b"null"
        self._to_bytes, self._errors, self._strip_start = _decoder(json.loads(state))
        self._pieces = Pieces(self._running_bytes)
        self._shown = Pieces(self._shown_bytes)

    @classmethod
    def load(cls, folder: pathlib.Path, now: Callable[[], datetime] = datetime.now) -> "Text":
        """CheckpointError naming the file when the folder holds no usable tokenizer."""
        file = folder / "tokenizer.json"
        try:
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing narrower
            raise CheckpointError(f"cannot read {file}: {error}", file=file) from error
        return cls(tokenizer, load_templates(folder, now))

    @property
    def num_tokens(self) -> int:
        """How many ids the tokenizer knows; a model's own vocabulary may be padded beyond."""
        return self._tokenizer.get_vocab_size()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """A rendered chat is encoded without adding special tokens: its template wrote them. Lets other threads run."""
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of all tokens, special ones left out: what a stream of them would have sent."""
        stream = self.stream()
        return stream.push(token_ids).text + stream.flush().text

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Messages through the model's chat template; see ChatTemplates.render."""
        return self._templates.render(messages, tools, kwargs)

    def render_briefly(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str | None:
        """As render(), but None when it would take longer than an event loop can wait."""
        return self._templates.render_briefly(messages, tools, kwargs)

    def stream(self, stops: Sequence[str] = (), *, min_tokens: int = 0, continues: bool = False) -> TextStream:
        """The text of one sample. `continues`: it goes on from a prompt's text, so a first space belongs to it."""
        strip_start = self._strip_start and not continues
        return TextStream(Characters(self._pieces, self._errors, strip_start), stops, min_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """What a token is shown as where tokens are listed (logprobs); special tokens have a name there."""
        return self._shown[token_id][0]

    def _running_bytes(self, token_id: int) -> bytes:
        return b"" if token_id in self._special else self._shown_bytes(token_id)

    def _shown_bytes(self, token_id: int) -> bytes:
        special = self._special.get(token_id)
        if special is not None:
            return special.encode()
        token = self._tokenizer.id_to_token(token_id) if token_id < 2**32 else None
        return b"" if token is None else self._to_bytes(token)


def _decoder(state: Any) -> tuple[Callable[[str], bytes], str, bool]:
    """(a token's bytes, how bytes that are no UTF-8 are shown, whether the text's first space is dropped).

    The library shows a SentencePiece run of bytes as replaced from its start when any of it is no UTF-8. A stream has
    sent the run's whole characters by then, and so has decode(): only what is no character is replaced.
    """
    match state:
        case None:
            return (lambda token: f" {token}".encode()), "replace", True
        case {"type": "ByteLevel"}:
            return _byte_level, "replace", False
        case {"type": "Sequence", "decoders": [*steps]} if all(map(_is_sentencepiece, steps)):
            strip_start = any(step["type"] == "Strip" for step in steps)
            return _sentencepiece, "headrace.each_byte", strip_start
        case {"type": kind}:
            raise CheckpointError(
                f"tokenizer.json: decoder {kind} is not supported, only ByteLevel and SentencePiece's sequence",
                file="tokenizer.json",
                field="decoder",
            )
        case _:
            raise CheckpointError("tokenizer.json: decoder has no type", file="tokenizer.json", field="decoder")


def _is_sentencepiece(step: Any) -> bool:
    match step:
        case {"type": "ByteFallback" | "Fuse"}:
            return True
        case {"type": "Replace", "pattern": {"String": pattern}, "content": " "}:
            return bool(pattern == _SPACE)
        case {"type": "Strip", "content": " ", "start": 1, "stop": 0}:
            return True
        case _:
            return False


def _byte_level(token: str) -> bytes:
    """GPT-2's spelling of bytes as printable characters; a token with any other character stands for itself."""
    try:
        return bytes(map(_BYTE_OF_CHARACTER.__getitem__, token))
    except KeyError:
        return token.encode()


def _sentencepiece(token: str) -> bytes:
    """A byte written <0x0A>, or text with a block for a space."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes((int(token[3:5], 16),))
        except ValueError:
            pass
    return token.replace(_SPACE, " ").encode()


def _printable_bytes() -> dict[str, int]:
    """Printable Latin-1 bytes stand for themselves, the others for the characters from U+0100 on, in order."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(0x100 + at): byte for at, byte in enumerate(hidden)}


_BYTE_OF_CHARACTER = _printable_bytes()
