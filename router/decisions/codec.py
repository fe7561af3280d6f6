"""Values ↔ JSON, by the types of their fields: dataclasses, enums, tuples, sets and mappings of plain values. Pure.

`decode(kind, encode(value)) == value` for every value that `kind` allows. What a field's init does not take follows from
the others and is left out. A field that is missing takes its default; an unknown one, or a value of another type, is a
ValueError that says where: what was written by another version is not guessed at.
"""

import math
import types
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import lru_cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
Decoder = Callable[[Any], Any]


def encode(value: Any) -> Any:
    """What json.dumps takes, and any JSON reader reads: floats that are no numbers there become text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if value is None or isinstance(value, int | str):
        return value.value if isinstance(value, Enum) else value
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Mapping):
        return {key: encode(one) for key, one in value.items()}
    if isinstance(value, frozenset):
        return [encode(one) for one in sorted(value)]
    if isinstance(value, tuple):
        return [encode(one) for one in value]
    return {name: encode(getattr(value, name)) for name in _names(type(value))}  # type: ignore[arg-type]


def decode(kind: type[T], data: Any) -> T:
    value: T = _decoder(kind)(data)  # type: ignore[arg-type]
    return value


@lru_cache(maxsize=256)
def _names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind) if field.init)


@lru_cache(maxsize=256)
def _decoder(kind: Any) -> Decoder:
    if is_dataclass(kind):
        return _dataclass(kind)
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _optional(kind, inner)
    if origin is Literal:
        return _checked(kind, lambda data: data in inner)
    if origin in (tuple, frozenset):
        return _row(origin, _decoder(inner[0]))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping(_decoder(inner[1]))
    if kind is bytes:
        return _bytes
    if kind is float:
        return _float
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind
    if kind in (bool, int, str):
        return _checked(kind, lambda data: type(data) is kind)
    raise TypeError(f"values of {kind} are not written as JSON here")


def _dataclass(kind: Any) -> Decoder:
    hints, names = get_type_hints(kind), _names(kind)
    decoders = {name: _decoder(hints[name]) for name in names}

    def decoder(data: Any) -> Any:
        if not isinstance(data, dict) or data.keys() - decoders.keys():
            unknown = sorted(data.keys() - decoders.keys()) if isinstance(data, dict) else type(data).__name__
            raise ValueError(f"{kind.__name__} has no {unknown}")
        values = {}
        for name, value in data.items():
            try:
                values[name] = decoders[name](value)
            except ValueError as error:
                raise ValueError(f"{kind.__name__}.{name}: {error}") from error
        try:
            return kind(**values)
        except TypeError as error:
            raise ValueError(str(error)) from error

    return decoder


def _optional(kind: Any, inner: tuple[Any, ...]) -> Decoder:
    known = [one for one in inner if one is not type(None)]
    if len(known) != 1:
        raise TypeError(f"which of {kind} a value is does not show in JSON")
    decoder = _decoder(known[0])
    return lambda data: None if data is None else decoder(data)


def _row(origin: Callable[[Any], Any], decoder: Decoder) -> Decoder:
    def row(data: Any) -> Any:
        if not isinstance(data, list):
            raise ValueError(f"a list was expected, got {data!r}")
        return origin(map(decoder, data))

    return row


def _mapping(decoder: Decoder) -> Decoder:
    def mapping(data: Any) -> Any:
        if not isinstance(data, dict):
            raise ValueError(f"an object was expected, got {data!r}")
        return {key: decoder(value) for key, value in data.items()}

    return mapping


def _bytes(data: Any) -> bytes:
    if not isinstance(data, str):
        raise ValueError(f"hexadecimal text was expected, got {data!r}")
    return bytes.fromhex(data)


def _float(data: Any) -> Any:
    """A whole number where a float is allowed stays one, as it was in the value."""
    if type(data) in (int, float):
        return data
    if data in ("inf", "-inf", "nan"):
        return float(data)
    raise ValueError(f"a number was expected, got {data!r}")


def _checked(kind: Any, allowed: Callable[[Any], bool]) -> Decoder:
    def checked(data: Any) -> Any:
        if not allowed(data):
            raise ValueError(f"{getattr(kind, '__name__', kind)} was expected, got {data!r}")
        return data

    return checked
