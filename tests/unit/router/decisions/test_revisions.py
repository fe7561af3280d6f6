"""Who is a canary's, and where he goes when it cannot take him."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.revisions import Split, decode_split, encode_split
from headrace.values import Load, Role
from router.decisions.costs import Costs
from router.decisions.health import Health
from router.decisions.ledger import Ledger
from router.decisions.revisions import SILENT_SECONDS, Diverted, Revisions
from router.decisions.view import View, WorkerView
from router.decisions.views import worker_view
from tests.null_worker import worker_info

HALF = Split(number=1, canary="v2", percent=50.0, beat=1)
NAMES = [f"conversation {number}" for number in range(2000)]


def worker(name: str, revision: str, role: Role = Role.UNIFIED, *, draining: bool = False) -> WorkerView:
    info = replace(worker_info(name, role), revision=revision)
    seen = worker_view(info, None, Ledger(), Health(), Costs())
    return WorkerView(info, role, Load(), seen.cost, 10, draining)


BOTH = View((worker("s", "stable"), worker("c", "v2")))


def told(split: Split, now: float = 0.0) -> Revisions:
    revisions = Revisions()
    revisions.told(split, now)
    return revisions


def one_of(split: Split) -> str:
    return next(name for name in NAMES if split.takes(name))


@given(st.text(), st.floats(0.0, 100.0), st.floats(0.0, 100.0))
def test_a_conversation_that_is_the_canarys_stays_so_as_its_share_grows(name: str, less: float, more: float) -> None:
    less, more = sorted((less, more))
    few, many = replace(HALF, percent=less), replace(HALF, percent=more)
    assert few.takes(name) == replace(few, beat=99).takes(name)
    assert not few.takes(name) or many.takes(name)
    assert replace(HALF, percent=100.0).takes(name)
    assert not replace(HALF, percent=0.0).takes(name)


@pytest.mark.parametrize("percent", [1.0, 5.0, 50.0])
def test_the_share_is_that_of_conversations_and_another_canary_meets_others(percent: float) -> None:
    split = replace(HALF, percent=percent)
    first = {name for name in NAMES if split.takes(name)}
    assert abs(100 * len(first) / len(NAMES) - percent) < 3.0
    second = {name for name in NAMES if replace(split, number=2).takes(name)}
    assert first != second


@pytest.mark.parametrize(
    "raw",
    ["", "[]", "{}x", '{"percent": 101}', '{"percent": 1e400}', '{"percent": true}', '{"base": ""}', '{"beat": -1}'],
)
def test_what_is_no_split_is_none(raw: str) -> None:
    assert decode_split(raw) is None
    assert decode_split(f'{{"canary": "{"x" * 64}"}}') is None
    assert decode_split("[" * 100_000) is None
    assert decode_split(encode_split(HALF)) == HALF


def test_without_a_canary_all_go_where_all_are() -> None:
    revisions = Revisions()
    assert not revisions.known
    assert revisions.percent(0.0) == 0.0


def test_who_is_the_canarys_goes_there_and_nobody_else_does() -> None:
    revisions = told(HALF)
    chosen = {name: revisions.choose(name, 10, BOTH, 1.0) for name in NAMES}
    assert set(chosen.values()) == {("stable", None), ("v2", None)}
    assert all((revision == "v2") == HALF.takes(name) for name, (revision, _) in chosen.items())
    assert [w.worker_id for w in revisions.only(BOTH, "v2").workers] == ["c"]
    assert [w.worker_id for w in revisions.serving(BOTH).workers] == ["s"]


@pytest.mark.parametrize(
    ("view", "num_tokens", "why"),
    [
        (View((worker("s", "stable"),)), 10, Diverted.NO_WORKER),
        (View((worker("s", "stable"), worker("c", "v2", Role.PREFILL))), 10, Diverted.NO_WORKER),
        (View((worker("s", "stable"), worker("c", "v2", draining=True))), 10, Diverted.NO_WORKER),
        (BOTH, 10**6, Diverted.CONTEXT),
    ],
)
def test_where_the_canary_cannot_take_him_what_serves_does(view: View, num_tokens: int, why: Diverted) -> None:
    assert told(HALF).choose(one_of(HALF), num_tokens, view, 1.0) == ("stable", why)


def test_who_hears_nothing_or_of_no_turn_of_the_controller_goes_back_to_what_serves_in_bounded_time() -> None:
    revisions, name = told(HALF), one_of(HALF)
    late = SILENT_SECONDS + 0.1
    assert revisions.choose(name, 10, BOTH, SILENT_SECONDS) == ("v2", None)
    assert revisions.choose(name, 10, BOTH, late) == ("stable", Diverted.UNJUDGED)
    revisions.told(HALF, late)  # Redis answers, and nobody turns
    assert revisions.choose(name, 10, BOTH, late) == ("stable", Diverted.UNJUDGED)
    assert revisions.percent(late) == 0.0
    revisions.told(replace(HALF, beat=2), late)
    assert revisions.choose(name, 10, BOTH, late) == ("v2", None)


def test_a_canary_with_a_share_takes_all_where_nothing_else_is_left_and_one_without_does_not() -> None:
    view = View((worker("c", "v2"), worker("s", "stable", draining=True)))
    for name in NAMES[:20]:
        assert told(HALF).choose(name, 10, view, 99.0) == ("v2", Diverted.BASE_GONE)
        assert told(replace(HALF, percent=0.0)).choose(name, 10, view, 0.0) == ("stable", None)
    assert told(HALF).serving(view).workers[0].worker_id == "c"
    assert told(HALF).elsewhere("stable") == ("v2", Diverted.BASE_GONE)
    assert told(replace(HALF, percent=0.0)).elsewhere("stable") is None
    assert told(replace(HALF, percent=0.0)).elsewhere("v2") == ("stable", Diverted.NO_WORKER)
    assert told(Split(number=2)).elsewhere("v2") == ("stable", Diverted.NO_WORKER), "in flight as it was forgotten"


def test_case_workers_of_the_canary_before_serve_until_they_are_replaced() -> None:
    """Whoever began a canary right after a promoted one was aborted had no worker left, and answered nobody."""
    left = View((worker("old", "v1"), worker("c", "v2")))
    for split in (HALF, replace(HALF, percent=0.0)):
        revisions = told(split)
        assert not revisions.base_is_gone(left)
        assert [w.worker_id for w in revisions.serving(left).workers] == ["old"]
        assert [w.worker_id for w in revisions.only(left, "v2").workers] == ["c"]
