import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.reports import ClassCounts, RouterReport, decode_report, encode_report

COUNT = st.integers(min_value=0, max_value=2**53)
NAME = st.text(max_size=20)
REPORTS = st.builds(
    RouterReport,
    router_id=NAME,
    http_address=NAME,
    seconds=st.floats(min_value=0, max_value=1e9),
    arrivals=COUNT,
    queued_tokens=COUNT,
    ttft_seconds=st.floats(min_value=0, max_value=1e9),
    classes=st.dictionaries(NAME, st.builds(ClassCounts, met=COUNT, failed=COUNT), max_size=3),
    pairs=st.dictionaries(st.tuples(NAME, NAME), COUNT, max_size=3),
)


@given(REPORTS)
def test_a_report_is_read_as_it_was_written(report: RouterReport) -> None:
    assert decode_report(encode_report(report)) == report


@pytest.mark.parametrize(
    "change",
    [
        {"arrivals": "7"},
        {"seconds": None},
        {"queued": True},
        {"classes": {"chat": {"won": 1}}},
        {"classes": []},
        {"pairs": [["a", "b"]]},
        {"pairs": [["a", "b", float("inf")]]},
        {"pairs": [["a", ["b"], 1]]},
        {"classes": {"chat": {"met": "7"}}},
        {"classes": {"chat": {"met": float("nan")}}},
        {"oldest_queued_seconds": float("nan")},
        {"seconds": float("inf")},
        {"arrivals": -1},
        {"arrivals": 10**400},
        {"queued": 2**53 + 1},
        {"revisions": {"v2": [1, 0, 1, 1, 0, 1, [[385, 1]], []]}},
        {"revisions": {"v2": [10**400, 0, 1, 1, 0, 1, [], []]}},
    ],
)
def test_what_is_no_report_of_this_version_is_none(change: dict[str, object]) -> None:
    """A number too large for arithmetic ended each turn of the autoscaler and of the canary, and each look of a console."""
    whole = json.loads(encode_report(RouterReport("r", "127.0.0.1:8000", 1.0)))
    assert decode_report(json.dumps(whole)) is not None
    assert decode_report(json.dumps({**whole, **change})) is None


@pytest.mark.parametrize("raw", ["", "[]", "null", "{}", "{", b"\xff", "[" * 100_000])
def test_what_is_no_report_at_all_is_none(raw: str | bytes) -> None:
    assert decode_report(raw) is None
