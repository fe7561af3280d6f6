"""Tokens to text as they come: whole characters only, and nothing that may still become a stop string.

The text of a stream is the text of decoding all its tokens at once, however they were cut into pushes.
"""

import codecs
from collections.abc import Callable, Sequence
from typing import NamedTuple


class TextDelta(NamedTuple):
    """New text, safe to send. `num_consumed` tokens of the push were used: fewer than pushed only when `stopped`, and
    then the last of them completed a stop string, which is not in the text."""

    text: str
    num_consumed: int
    stopped: bool = False


class Pieces(dict[int, tuple[bytes, str | None]]):
    """What each token adds to the text: its bytes, and the same as text where they are whole characters.

    `to_bytes` gives nothing for special tokens and for ids that name no token. Filled as tokens are met; shared by all
    streams of a model and owned by its Text.
    """

    def __init__(self, to_bytes: Callable[[int], bytes]) -> None:
        super().__init__()
        self._to_bytes = to_bytes

    def __missing__(self, token_id: int) -> tuple[bytes, str | None]:
        raw = self._to_bytes(token_id)
        try:
            piece: tuple[bytes, str | None] = (raw, raw.decode())
        except UnicodeDecodeError:
            piece = (raw, None)
        self[token_id] = piece
        return piece


def _each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "\N{REPLACEMENT CHARACTER}" * (error.end - error.start), error.end


codecs.register_error("headrace.each_byte", _each_byte)


class Characters:
    """Pieces to characters; the first bytes of a character wait for its last. Mutable, owned by one stream.

    `errors`: how bytes that are no UTF-8 are shown. `strip_start`: the text's first space is the tokenizer's own.
    """

    __slots__ = ("_decoder", "_partial", "_pieces", "_strip_start")

    def __init__(self, pieces: Pieces, errors: str = "replace", strip_start: bool = False) -> None:
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors)
        self._partial = False
        self._strip_start = strip_start

    def feed(self, token_id: int) -> str:
        raw, text = self._pieces[token_id]
        if text is None or self._partial:
            text = self._decoder.decode(raw)
            self._partial = bool(self._decoder.getstate()[0])
        if self._strip_start and text:
            self._strip_start = False
            text = text.removeprefix(" ")
        return text

    def end(self) -> str:
        """What of a cut character remains, as replacement characters."""
        return self._decoder.decode(b"", final=True) if self._partial else ""


class Stops:
    """Finds the stop string that is complete first in a text that comes in parts. Mutable, owned by one stream.

    Holds back the longest end of the text that begins a stop string, and no more. Of those that end at the same
    character the longest wins, so the result does not depend on how the text was cut.
    """

    __slots__ = ("_held", "_longest", "_starts", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._starts = frozenset(stop[0] for stop in self._stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""

    def feed(self, text: str, may_stop: bool = True) -> tuple[str, bool]:
        """(text that can be sent, whether it was stopped there)."""
        if not text:
            return "", False
        text = self._held + text
        if may_stop:
            found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
            if found:
                self._held = ""
                return text[: min(found)[1]], True
        sent = len(text) - self._num_held(text)
        self._held = text[sent:]
        return text[:sent], False

    def end(self) -> str:
        """What was held back: nothing can complete it any more."""
        held, self._held = self._held, ""
        return held

    def _num_held(self, text: str) -> int:
        starts = self._starts
        for at in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[at] in starts:
                tail = text[at:]
                if any(stop.startswith(tail) and stop != tail for stop in self._stops):
                    return len(text) - at
        return 0


class TextStream:
    """The text of one sample. Mutable, owned by the request it belongs to.

    A stop string counts only where at least `min_tokens` tokens have been made. A token that ends the sample by its id
    (end of sequence, stop_token_ids) is not text: its owner leaves it out of the last push.
    """

    __slots__ = ("_characters", "_min_tokens", "_num_tokens", "_stops")

    def __init__(self, characters: Characters, stops: Sequence[str] = (), min_tokens: int = 0) -> None:
        self._characters = characters
        self._stops = Stops(stops) if stops else None
        self._min_tokens = min_tokens
        self._num_tokens = 0

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        feed = self._characters.feed
        if self._stops is None:
            if len(token_ids) == 1:
                return TextDelta(feed(token_ids[0]), 1)
            return TextDelta("".join(map(feed, token_ids)), len(token_ids))
        parts = []
        for position, token_id in enumerate(token_ids):
            self._num_tokens += 1
            part, stopped = self._stops.feed(feed(token_id), self._num_tokens >= self._min_tokens)
            parts.append(part)
            if stopped:
                return TextDelta("".join(parts), position + 1, stopped=True)
        return TextDelta("".join(parts), len(token_ids))

    def flush(self) -> TextDelta:
        """What was held back, once no token will follow. (The end of a cut character may itself complete a stop.)"""
        rest = self._characters.end()
        if self._stops is None:
            return TextDelta(rest, 0)
        text, stopped = self._stops.feed(rest, self._num_tokens >= self._min_tokens)
        return TextDelta(text, 0, stopped=True) if stopped else TextDelta(text + self._stops.end(), 0)
