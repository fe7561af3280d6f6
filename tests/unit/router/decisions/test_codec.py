from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

import pytest

from router.decisions.codec import decode, encode


class Color(StrEnum):
    RED = "red"


@dataclass(frozen=True, slots=True)
class Inner:
    number: int


@dataclass(frozen=True, slots=True)
class Outer:
    name: str
    raw: bytes = b""
    at: float = 0.0
    flag: bool = False
    color: Color = Color.RED
    kind: Literal["a", "b"] = "a"
    inner: Inner | None = None
    row: tuple[Inner, ...] = ()
    some: frozenset[str] = frozenset()
    by_name: Mapping[str, float] | None = None
    double: str = field(init=False, default="", compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "double", self.name * 2)


WHOLE = Outer(
    "n", b"\x00\xff", float("-inf"), True, Color.RED, "b", Inner(3), (Inner(1), Inner(2)), frozenset("yx"), {"k": 0.1}
)


def test_a_value_of_every_kind_is_the_same_after_it() -> None:
    data = encode(WHOLE)
    assert data == {
        "name": "n",
        "raw": "00ff",
        "at": "-inf",
        "flag": True,
        "color": "red",
        "kind": "b",
        "inner": {"number": 3},
        "row": [{"number": 1}, {"number": 2}],
        "some": ["x", "y"],
        "by_name": {"k": 0.1},
    }
    assert type(data["color"]) is str
    assert decode(Outer, data) == WHOLE


def test_what_follows_from_the_rest_is_worked_out_again() -> None:
    assert decode(Outer, encode(WHOLE)).double == "nn"


def test_a_missing_field_takes_its_default() -> None:
    assert decode(Outer, {"name": "n"}) == Outer("n")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "name"),
        ({"name": "n", "size": 1}, r"Outer has no \['size'\]"),
        ([], "Outer has no list"),
        ({"name": 3}, "Outer.name: str was expected, got 3"),
        ({"name": "n", "flag": 1}, "Outer.flag: bool was expected, got 1"),
        ({"name": "n", "at": "soon"}, "Outer.at: a number was expected"),
        ({"name": "n", "at": True}, "Outer.at: a number was expected"),
        ({"name": "n", "raw": "xyz"}, "Outer.raw: "),
        ({"name": "n", "raw": 5}, "Outer.raw: "),
        ({"name": "n", "color": "blue"}, "Outer.color: 'blue' is not a valid Color"),
        ({"name": "n", "kind": "c"}, "Outer.kind: "),
        ({"name": "n", "row": {}}, "Outer.row: a list was expected"),
        ({"name": "n", "row": [{"number": True}]}, "Outer.row: Inner.number: int was expected, got True"),
        ({"name": "n", "by_name": []}, "Outer.by_name: an object was expected"),
    ],
)
def test_anything_else_is_refused_by_its_place(data: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode(Outer, data)


def test_a_type_that_json_cannot_tell_is_a_fault_of_the_code() -> None:
    @dataclass(frozen=True)
    class Either:
        value: int | str

    with pytest.raises(TypeError, match="does not show in JSON"):
        decode(Either, {"value": 1})
