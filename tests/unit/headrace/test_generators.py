"""Made traffic has the shape that it is named after; bending a trace loses no request."""

from collections import Counter

import pytest

from headrace import generators
from headrace.errors import ConfigError
from headrace.traces import Prompts, TraceRow

ROWS = [TraceRow(n, n * 0.1, 10, 5, (n % 4,)) for n in range(3000)]


@pytest.mark.parametrize("shape", generators.SHAPES)
def test_a_shape_has_as_many_requests_at_the_rate_asked_for_and_is_the_same_each_time(shape: str) -> None:
    rows = generators.generate(shape, 2000, 20.0, seed=3)
    assert len(rows) == 2000
    assert generators.rate(rows) == pytest.approx(20.0, rel=0.1)
    assert [row.seconds for row in rows] == sorted(row.seconds for row in rows)
    assert rows == generators.generate(shape, 2000, 20.0, seed=3)


def test_the_beginning_of_a_trace_comes_at_the_rate_asked_for_in_its_own_shape() -> None:
    rows = [TraceRow(n, seconds, 10, 5) for n, seconds in enumerate((0.0, 1.0, 4.0, 9.0))]
    assert [row.seconds for row in generators.at_rate(rows, 3, 0.5)] == [0.0, 1.0, 4.0]
    assert [row.seconds for row in generators.at_rate(rows, 0, 2.0)] == [0.0, 0.5], "one alone has no rate"
    assert len(generators.at_rate(rows, 9, 1.0)) == 4


def test_nine_of_ten_share_the_hot_prefix() -> None:
    rows = generators.generate("hot-prefix", 2000, 20.0)
    prefixes = Counter(row.prefix_ids for row in rows)
    (hot, count), (_, next_count) = prefixes.most_common(2)
    assert len(hot) * 512 == 4096
    assert count / 2000 == pytest.approx(0.9, abs=0.03)
    assert next_count == 1
    assert all(row.input_tokens > 4096 for row in rows)


def test_every_request_of_shared_block_begins_with_it() -> None:
    rows = generators.generate("shared-block", 100, 20.0)
    assert {row.prefix_ids for row in rows} == {(0,)}
    assert min(row.input_tokens for row in rows) > 512


def test_bursts_bring_26_seconds_within_one() -> None:
    rows = generators.bursts(ROWS, every_seconds=60.0)
    assert len(rows) == len(ROWS)
    assert [row.seconds for row in rows] == sorted(row.seconds for row in rows)
    per_second = Counter(int(row.seconds) for row in rows)
    assert per_second[60] == pytest.approx(260, abs=2)
    assert per_second[59] == pytest.approx(10, abs=1)
    with pytest.raises(ConfigError, match="burst interval: must be above 26 s"):
        generators.bursts(ROWS, every_seconds=20.0)


def test_a_day_swings_and_loses_nothing() -> None:
    rows = generators.day_curve(ROWS, day_seconds=100.0, swing=0.8)
    assert len(rows) == len(ROWS)
    assert [row.seconds for row in rows] == sorted(row.seconds for row in rows)
    per_tenth = Counter(int(row.seconds % 100 / 10) for row in rows)
    assert per_tenth[0] < 0.35 * 300
    assert per_tenth[5] > 1.6 * 300


def test_a_ramp_climbs_evenly_and_loses_nothing() -> None:
    rows = generators.ramp(ROWS, swing=0.9)
    assert len(rows) == len(ROWS)
    assert [row.seconds for row in rows] == sorted(row.seconds for row in rows)
    assert rows[-1].seconds == pytest.approx(ROWS[-1].seconds)
    per_tenth = Counter(int(row.seconds / ROWS[-1].seconds * 10) for row in rows)
    assert [per_tenth[at] for at in (0, 5, 9)] == pytest.approx([57, 327, 543], abs=6)
    assert generators.ramp([]) == []
    with pytest.raises(ConfigError, match="swing: must be above 0"):
        generators.ramp(ROWS, swing=0.0)


def test_a_rate_is_scaled_by_time_alone() -> None:
    rows = generators.scaled(ROWS, 4.0)
    assert generators.rate(rows) == pytest.approx(4 * generators.rate(ROWS))
    assert [row.prefix_ids for row in rows] == [row.prefix_ids for row in ROWS]


def test_a_window_begins_at_nought_and_another_seed_begins_elsewhere() -> None:
    first, second = generators.window(ROWS, 50, 1), generators.window(ROWS, 50, 2)
    assert len(first) == len(second) == 50
    assert first[0].seconds == second[0].seconds == 0.0
    assert first[0].number != second[0].number


def test_a_repeated_trace_shares_no_prefix_with_its_first_round() -> None:
    rows = generators.repeated(ROWS[:10], 25)
    assert len({row.number for row in rows}) == 25
    assert [row.seconds for row in rows] == sorted(row.seconds for row in rows)
    rounds = [{row.prefix_ids for row in rows[start : start + 10]} for start in (0, 10)]
    assert not rounds[0] & rounds[1]


def test_other_salts_share_no_block_and_equal_prefixes_stay_equal() -> None:
    rows = generators.generate("hot-prefix", 20, 5.0)
    prompts = Prompts(400)
    first, again, other = ([prompts.of(row) for row in generators.salted(rows, salt)] for salt in (7, 7, 8))
    assert first == again
    assert [len(prompt) for prompt in first] == [len(prompt) for prompt in other]
    assert not {prompt[:16] for prompt in first} & {prompt[:16] for prompt in other}
    hot = Counter(prompt[:4096] for prompt in first)
    assert hot.most_common(1)[0][1] == Counter(row.prefix_ids for row in rows).most_common(1)[0][1]
    with pytest.raises(ConfigError, match="salt: must be from 0"):
        generators.salted(rows, -1)


def test_what_cannot_be_made_is_refused() -> None:
    with pytest.raises(ConfigError, match="shape: must be one of smooth"):
        generators.generate("square", 1, 1.0)
    with pytest.raises(ConfigError, match="rate: must be above 0"):
        generators.generate("smooth", 1, 0.0)
