import inspect
from dataclasses import replace

import grpc
import pytest

from headrace import errors
from headrace.errors import (
    MEANINGS,
    ConfigError,
    HeadraceError,
    InternalError,
    InvalidRequest,
    Overloaded,
    meaning,
    rebuild,
)

TREE = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, HeadraceError) and kind is not HeadraceError
]


def test_the_table_has_a_row_for_every_error_and_no_other() -> None:
    assert set(MEANINGS) == set(TREE)


@pytest.mark.parametrize("kind", TREE)
def test_every_error_is_drawn_in_the_tree(kind: type[HeadraceError]) -> None:
    lines = (errors.__doc__ or "").splitlines()
    line = next(line for line in lines if line.split()[-1:] and kind.__name__ in line.replace("─", " ").split())
    parent = kind.__mro__[1]
    if parent is HeadraceError:
        assert line.startswith(("├── ", "└── "))
    else:
        above = lines[: lines.index(line)]
        assert next(u for u in reversed(above) if not u.startswith("│")).split()[1] == parent.__name__


@pytest.mark.parametrize("kind", TREE)
def test_every_row_speaks_of_codes_that_exist_and_agree(kind: type[HeadraceError]) -> None:
    row = MEANINGS[kind]
    assert hasattr(grpc.StatusCode, row.grpc_code)
    assert 400 <= row.http_status <= 599
    assert (row.http_status < 500) == issubclass(
        kind, (InvalidRequest, errors.Unauthenticated, Overloaded, errors.RequestCancelled)
    )
    if row.retry_after_seconds is not None:
        assert row.retryable


@pytest.mark.parametrize("kind", TREE)
def test_an_error_comes_back_from_the_wire_as_itself(kind: type[HeadraceError]) -> None:
    error = kind("it is so", limit=3, actual=4)
    back = rebuild(error.type, error.message, error.numbers)
    assert type(back) is kind
    assert (back.message, back.numbers, str(back)) == ("it is so", {"limit": "3", "actual": "4"}, "it is so")
    assert meaning(back) == meaning(error)


def test_the_field_of_a_bad_request_survives_the_wire() -> None:
    error = InvalidRequest.out_of_range("top_p", 7.0, "above 0 and at most 1")
    assert error.message == "top_p must be above 0 and at most 1, got 7.0"
    back = rebuild(error.type, error.message, error.numbers)
    assert isinstance(back, InvalidRequest)
    assert back.field == "top_p"


def test_an_error_of_a_newer_build_is_an_internal_one() -> None:
    assert type(rebuild("FromTheFuture", "x", {})) is InternalError
    assert type(rebuild("KeyError", "x", {})) is InternalError


def test_an_errors_own_retry_time_wins() -> None:
    row = MEANINGS[Overloaded]
    assert meaning(Overloaded("x")) == row
    assert meaning(Overloaded("x", retry_after_seconds=7.5)) == replace(row, retry_after_seconds=7.5)


def test_long_values_are_shown_cut() -> None:
    error = InvalidRequest.out_of_range("stop", "x" * 10**6, "short")
    assert len(error.message) < 200
    assert len(ConfigError.out_of_range("engine.dtype", "x" * 10**6, "short").message) < 200


def test_a_kind_that_is_not_in_the_table_means_its_nearest_ancestor() -> None:
    class Special(Overloaded): ...

    assert meaning(Special("x")) == MEANINGS[Overloaded]
