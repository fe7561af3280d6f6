"""What commands, the controller and routers say in JSON is made of dataclasses, by `asdict`: each of their fields must be
something that JSON has. `headrace status --json` ended with a traceback for a set, and only where a cluster served."""

import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest

from cluster.console.view import Cluster
from cluster.launch import Step
from cluster.planning.plan import Plan
from cluster.session import Session
from cluster.snapshot import Snapshot
from cluster.state import ObservedState
from cluster.talk import Answer
from headrace.costmodel import CostModel
from headrace.reports import ClassCounts
from headrace.revisions import Split
from headrace.tls import ClientTls
from headrace.values import Capacity, Compatibility, ParallelLayout
from workers.ranks.profiles import ProfiledStep

PLAIN = (int, float, str, bool, type(None), object, Any)
OF_A_PLAN = ("model", "money", "break_even", "what_ifs", "rooflines")


def lacking(kind: Any, where: str) -> Iterator[str]:
    """The fields of which JSON has nothing."""
    origin, inner = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        for field in fields(kind):
            yield from lacking(hints[field.name], f"{where}.{field.name}")
    elif (
        kind in PLAIN
        or origin is Literal
        or (isinstance(kind, type) and issubclass(kind, (str, int)) and issubclass(kind, Enum))
    ):
        return
    elif origin in (Union, types.UnionType, tuple, list, Sequence):
        for one in inner:
            if one is not Ellipsis:
                yield from lacking(one, where)
    elif isinstance(origin, type) and issubclass(origin, Mapping) and inner[0] in (str, int):
        yield from lacking(inner[1], where)
    else:
        yield where


@pytest.mark.parametrize(
    "kind",
    [
        Answer,
        Capacity,
        ClassCounts,
        ClientTls,
        Cluster,
        Compatibility,
        CostModel,
        ObservedState,
        ParallelLayout,
        ProfiledStep,
        Session,
        Split,
        Step,
    ],
    ids=lambda kind: kind.__name__,
)
def test_all_that_is_said_as_it_is_has_a_place_in_json(kind: Any) -> None:
    assert list(lacking(kind, kind.__name__)) == []


def test_of_a_look_sets_alone_are_made_lists_of() -> None:
    assert list(lacking(Snapshot, "look")) == ["look.workers.report.routers"]


@pytest.mark.parametrize("name", OF_A_PLAN)
def test_what_a_plan_says_as_it_is_has_a_place_in_json(name: str) -> None:
    assert list(lacking(get_type_hints(Plan)[name], name)) == []
