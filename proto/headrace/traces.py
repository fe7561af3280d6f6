"""Traces of real requests, in the two forms in which they are published, as rows of one form.

Azure (CSV): TIMESTAMP, ContextTokens, GeneratedTokens; every prompt is unique. Mooncake (JSON lines): timestamp in ms,
input_length, output_length, hash_ids: one id per 512 prompt tokens, equal ids are equal tokens.
"""

import csv
import json
import math
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from random import Random
from typing import Any

TOKENS_PER_ID = 512
NOISE_TOKENS = 1 << 16


class TraceError(ValueError):
    """Names the file, the line and what is wrong with it."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request: when it comes, in seconds from the first, and how long it is. `prefix_ids` empty: shares nothing."""

    number: int
    seconds: float
    input_tokens: int
    output_tokens: int
    prefix_ids: tuple[int, ...] = ()


def read(path: pathlib.Path) -> list[TraceRow]:
    """All rows in order of time, spread where many share one stamp. The name's suffix says which form: .csv or .jsonl."""
    forms = {".csv": _azure, ".jsonl": _mooncake}
    form = forms.get(path.suffix)
    if form is None:
        raise TraceError(f"{path}: a trace ends in {' or '.join(forms)}")
    try:
        rows = sorted(form(path), key=lambda row: row.seconds)
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TraceError(
            f"{path} is no text in UTF-8: byte {error.start} of a piece of it is {error.reason}"
        ) from error
    except csv.Error as error:
        raise TraceError(f"{path} is no CSV: {error}") from error
    if not rows:
        raise TraceError(f"{path}: holds no requests")
    start = rows[0].seconds
    return spread([replace(row, number=number, seconds=row.seconds - start) for number, row in enumerate(rows)])


def spread(rows: list[TraceRow]) -> list[TraceRow]:
    """Rows that share a stamp, evenly up to the next stamp (those of the last one stay)."""
    found: list[TraceRow] = []
    at = 0
    while at < len(rows):
        end = at
        while end < len(rows) and rows[end].seconds == rows[at].seconds:
            end += 1
        gap = rows[end].seconds - rows[at].seconds if end < len(rows) else 0.0
        found += [replace(row, seconds=row.seconds + gap * i / (end - at)) for i, row in enumerate(rows[at:end])]
        at = end
    return found


def within(rows: Iterable[TraceRow], max_context_tokens: int) -> tuple[list[TraceRow], int]:
    """(the rows whose prompt and output fit the context, how many did not)."""
    rows = list(rows)
    kept = [row for row in rows if row.input_tokens + row.output_tokens <= max_context_tokens]
    return kept, len(rows) - len(kept)


class Prompts:
    """Token ids for rows: equal prefix ids give equal tokens, rows without ids share nothing. Deterministic."""

    def __init__(self, vocab_size: int, tokens_per_id: int = TOKENS_PER_ID) -> None:
        self._vocab_size = vocab_size
        self._tokens_per_id = tokens_per_id
        random = Random(0)
        self._ring = [random.randrange(vocab_size) for _ in range(NOISE_TOKENS)]
        self._noise = self._ring * 2
        self._by_id: dict[int, tuple[int, ...]] = {}

    def of(self, row: TraceRow) -> tuple[int, ...]:
        if not row.prefix_ids:
            return self._unique(row.number, row.input_tokens)
        tokens: list[int] = []
        for prefix_id in row.prefix_ids:
            tokens += self._block(prefix_id)
        missing = row.input_tokens - len(tokens)
        if missing > 0:
            tokens += self._unique(row.number, missing)
        return tuple(tokens[: row.input_tokens])

    def _block(self, prefix_id: int) -> tuple[int, ...]:
        tokens = self._by_id.get(prefix_id)
        if tokens is None:
            tokens = self._by_id[prefix_id] = self._unique(~prefix_id, self._tokens_per_id)
        return tokens

    def _unique(self, number: int, num_tokens: int) -> tuple[int, ...]:
        """The number in the vocabulary's digits, then a stretch of one fixed noise."""
        digits, rest = [int(number < 0)], abs(number)
        for _ in range(8):
            rest, digit = divmod(rest, self._vocab_size)
            digits.append(digit)
        start = number * 7919 % NOISE_TOKENS
        noise = self._noise[start : start + min(num_tokens, NOISE_TOKENS)]
        while len(noise) < num_tokens:
            noise += self._ring
        return tuple((digits + noise)[:num_tokens])


def _azure(path: pathlib.Path) -> Iterator[TraceRow]:
    with path.open(encoding="utf-8-sig", newline="") as lines:
        for number, record in enumerate(csv.DictReader(lines), 2):
            try:
                seconds = datetime.fromisoformat(record["TIMESTAMP"]).timestamp()
                sizes = _whole(record, "ContextTokens"), _whole(record, "GeneratedTokens")
            except (KeyError, TypeError, ValueError) as error:
                raise _wrong(path, number, error, "TIMESTAMP, ContextTokens and GeneratedTokens") from error
            yield _row(path, number, seconds, *sizes)


def _mooncake(path: pathlib.Path) -> Iterator[TraceRow]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
                seconds = float(record["timestamp"]) / 1e3
                if not math.isfinite(seconds):
                    raise ValueError(f"a timestamp must be a finite number, got {record['timestamp']}")
                sizes = _whole(record, "input_length"), _whole(record, "output_length")
                prefix_ids = tuple(int(prefix_id) for prefix_id in record["hash_ids"])
            except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
                raise _wrong(path, number, error, "timestamp, input_length, output_length and hash_ids") from error
            yield replace(_row(path, number, seconds, *sizes), prefix_ids=prefix_ids)


def _whole(record: Mapping[str, Any], name: str) -> int:
    value = record[name]
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"{name} must be a whole number, got {value!r}") from None


def _wrong(path: pathlib.Path, number: int, error: Exception, needed: str) -> TraceError:
    """What a line is made of, and what it is not. (A column that a line of CSV is too short for is None.)"""
    match error:
        case KeyError():
            why = f"lacks {error.args[0]}"
        case json.JSONDecodeError():
            why = f"is not JSON ({error.msg}, column {error.colno})"
        case TypeError():
            why = "is no such record, or lacks a value"
        case _:
            why = str(error)
    return TraceError(f"{path}, line {number}: {why}; a request has {needed}")


def _row(path: pathlib.Path, number: int, seconds: float, input_tokens: int, output_tokens: int) -> TraceRow:
    if input_tokens < 1 or output_tokens < 1:
        raise TraceError(f"{path}, line {number}: lengths must be at least 1, got {input_tokens} and {output_tokens}")
    return TraceRow(number, seconds, input_tokens, output_tokens)
