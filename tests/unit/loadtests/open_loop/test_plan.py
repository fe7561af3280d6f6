"""What a bench is asked for: read once, refused with numbers, and the same traffic for the same seed."""

import pathlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import generators
from headrace.errors import ConfigError
from headrace.goodput import Slo
from loadtests.open_loop.plan import BENDS, Plan, Source, rates, salt_of, slo

TRACE = '{{"timestamp": {at}, "input_length": {length}, "output_length": 4, "hash_ids": [{prefix}]}}\n'


def plan(**changes: Any) -> Plan:
    return Plan.of({"edge": "http", "address": "", **changes})


@pytest.fixture
def trace(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "t.jsonl"
    path.write_text("".join(TRACE.format(at=at * 500, length=100 + at, prefix=at % 2) for at in range(20)))
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rates": "0"}, "rate: must be above 0, got 0.0"),
        ({"rates": "1,x"}, "rates: must be numbers with commas between them, such as 1,2,4, got '1,x'"),
        ({"rates": "1,1"}, "rates: must be different numbers"),
        ({"slo": "itl=1"}, "slo: must be KEY=SECONDS with KEY one of ttft, tpot, got 'itl=1'"),
        ({"slo": "ttft"}, "slo: must be KEY=SECONDS"),
        ({"slo": "ttft=-1"}, "slo ttft: must be seconds above 0, such as 0.5 or 500ms, got '-1'"),
        ({"bend": "square"}, "bend: must be one of none, bursts, ramp, day, got 'square'"),
        ({"seconds": float("nan")}, "seconds: must be above 0"),
        ({"requests": 0}, "requests: must be at least 1, got 0"),
        ({"warmup": -1.0}, "warmup: must be at least 0, got -1.0"),
        ({"colour": 1}, "colour: no such key"),
    ],
)
def test_what_cannot_be_is_refused_with_its_value_and_range(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        plan(**changes)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no requests"),
        ('{"timestamp": 1}\n', "line 1: lacks input_length; a request has timestamp"),
        (TRACE.format(at=0, length=0, prefix=0), "line 1: lengths must be at least 1, got 0 and 4"),
        ("\x00\xff", "line 1"),
    ],
)
def test_a_trace_that_is_none_is_refused_by_line(tmp_path: pathlib.Path, content: str, message: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError) as refused:
        Source(plan(trace=str(path)))
    assert message in str(refused.value)
    assert str(path) in str(refused.value)


def test_a_trace_that_is_not_there_is_named(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match=r"trace: .*none\.csv"):
        Source(plan(trace=str(tmp_path / "none.csv")))


def test_slos_are_seconds_or_milliseconds_and_the_unsaid_keeps_its_default() -> None:
    assert slo("ttft=500ms, tpot=0.02s") == Slo(0.5, 0.02)
    assert slo("tpot=20ms") == Slo(tpot_seconds=0.02)
    assert rates("1,2.5") == (1.0, 2.5)


def test_a_trace_keeps_its_own_rate_its_order_and_its_prefixes(trace: pathlib.Path) -> None:
    source = Source(plan(trace=str(trace), requests=20))
    (own,) = source.rates
    traffic = source.at(own)
    assert own == pytest.approx(20 / 9.5)
    assert [row.input_tokens for row in traffic.rows] == [100 + at for at in range(20)]
    assert traffic.seconds == pytest.approx(9.5)
    assert len({row.prefix_ids for row in traffic.rows}) == 2


def test_more_requests_than_a_trace_has_are_more_rounds_of_it(trace: pathlib.Path) -> None:
    rows = Source(plan(trace=str(trace), requests=50, rates="4")).at(4.0).rows
    assert len(rows) == 50
    assert generators.rate(rows) == pytest.approx(4.0, rel=0.1)
    assert len({row.prefix_ids for row in rows}) == 6


def test_requests_without_room_are_left_out_and_counted(trace: pathlib.Path) -> None:
    assert Source(plan(trace=str(trace)), max_context_tokens=113).at(1.0).num_removed == 10
    with pytest.raises(ConfigError, match="none of 20 requests fits the context of 50 tokens: the shortest has 104"):
        Source(plan(trace=str(trace)), max_context_tokens=50)
    assert Source(plan(trace=str(trace), input_tokens=40), max_context_tokens=50).at(1.0).num_removed == 0


def test_a_trace_at_one_moment_has_no_rate(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(TRACE.format(at=0, length=9, prefix=0) * 3)
    with pytest.raises(ConfigError, match="3 requests at one moment have no rate to scale"):
        Source(plan(trace=str(path)))


@pytest.mark.parametrize("bend", BENDS)
@given(rate=st.floats(0.05, 50), seed=st.integers(0, 3), number=st.integers(1, 60))
def test_any_plan_sends_all_in_order_and_the_same_again(bend: str, rate: float, seed: int, number: int) -> None:
    asked = plan(bend=bend, requests=number, seed=seed, salt=9)
    rows = Source(asked).at(rate).rows
    assert len(rows) == number
    assert rows[0].seconds >= 0
    assert [row.seconds for row in rows] == sorted(row.seconds for row in rows)
    assert rows == Source(asked).at(rate).rows


def test_no_rate_of_a_sweep_sends_another_ones_tokens() -> None:
    assert len({salt_of(salt, rate) for salt in range(20) for rate in (1.0, 2.0, 4.0)}) == 60


def test_the_warm_up_is_a_tenth_unless_given() -> None:
    assert plan().warmup_seconds(50.0) == 5.0
    assert plan(warmup=0.0).warmup_seconds(50.0) == 0.0
