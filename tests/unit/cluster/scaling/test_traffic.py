"""Counters of routers become rates that miss nothing, and a history that forecasts."""

import math
from collections import Counter
from dataclasses import replace

import pytest

from cluster.scaling.forecast import BUCKET_SECONDS, DAY, History
from cluster.scaling.traffic import QUIET_SECONDS, Meter
from headrace.reports import ClassCounts, RouterReport


def report(arrivals: int, name: str = "a", **fields: object) -> RouterReport:
    counted = {
        "prompt_tokens": arrivals * 100,
        "computed_tokens": arrivals * 75,
        "cached_tokens": arrivals * 25,
        "generated_tokens": arrivals * 40,
        "ended": arrivals,
        "classes": {"": ClassCounts(met=arrivals)},
    }
    return replace(RouterReport(name, "", 0.0, arrivals), **{**counted, **fields})


def look(meter: Meter, now: float, *reports: RouterReport) -> float:
    return meter.look({one.router_id: one for one in reports}, now)


def test_rates_and_lengths_are_differences_and_what_was_before_does_not_count() -> None:
    meter = Meter(60.0)
    assert look(meter, 0.0, report(1000)) == 0
    assert meter.traffic(0.0).routers == 0, "of one look nothing is known yet"
    assert look(meter, 10.0, report(1050)) == 50
    assert look(meter, 20.0, report(1100), report(7, "b")) == 50
    assert look(meter, 30.0, report(1150), report(57, "b")) == 100
    seen = meter.traffic(30.0)
    assert (seen.routers, seen.per_second) == (2, pytest.approx(200 / 30))
    assert (seen.input_tokens, seen.output_tokens, seen.hit_rate) == (100, 40, 0.25)
    assert (seen.judged, seen.attainment) == (200, 1.0)


def test_case_55_refused_requests_have_arrived_and_make_no_answer_shorter() -> None:
    meter = Meter(60.0)
    look(meter, 0.0, report(0))
    look(meter, 10.0, report(200, generated_tokens=4000, classes={"": ClassCounts(met=100, failed=100)}))
    seen = meter.traffic(10.0)
    assert seen.per_second == 20.0
    assert seen.output_tokens == 40
    assert seen.attainment == 0.5


def test_reports_that_were_away_for_a_while_lose_nothing_and_a_router_that_restarts_counts_nothing_twice() -> None:
    meter = Meter(60.0)
    look(meter, 0.0, report(100))
    assert look(meter, 10.0) == 0
    assert meter.traffic(10.0).routers == 0
    assert look(meter, 20.0, report(160)) == 60
    assert look(meter, 30.0, report(5)) == 0
    assert look(meter, 40.0, report(25)) == 20


def test_a_router_that_was_silent_for_long_brings_no_rush_with_it_when_it_is_heard_again() -> None:
    """One of two did not reach Redis for half an hour: what had come to it meanwhile was the rate of one look, 150 times
    what it was, and workers were started for it."""
    meter = Meter(60.0)
    for at in range(0, 200, 10):
        look(meter, at, report(10 * at, seconds=at), report(10 * at, "b", seconds=at))
    bursts = meter.traffic(190.0).gap_scv
    for at in range(200, 2000, 10):
        look(meter, at, report(10 * at, seconds=at))
    assert meter.traffic(1990.0).per_second == pytest.approx(10.0)
    for at in range(2000, 2200, 10):
        look(meter, at, report(10 * at, seconds=at), report(10 * at, "b", seconds=at))
        assert meter.traffic(at).per_second <= 20.0 + 1e-9
    seen = meter.traffic(2190.0)
    assert (seen.per_second, seen.gap_scv) == (pytest.approx(20.0), bursts)


def test_a_burst_of_seconds_is_no_load_to_start_workers_for_and_a_rise_is() -> None:
    burst, rise, few = Meter(60.0), Meter(60.0), Meter(60.0)
    arrived = Counter[str]()
    for at in range(0, 200, 10):
        arrived.update(burst=1000 + 1000 * (at == 160), rise=1000 + 1000 * (at >= 160), few=30 * (at == 160))
        for name, meter in (("burst", burst), ("rise", rise), ("few", few)):
            look(meter, at, report(arrived[name]))
    seen = burst.traffic(190.0)
    assert seen.per_second == pytest.approx(700 / 6)
    assert 100.0 <= seen.level <= 105.0
    assert rise.traffic(190.0).level > 130.0, "half of the window is like that"
    assert few.traffic(190.0).level == pytest.approx(0.5), "where hardly any come none of them is chance"


def test_bursts_that_come_again_and_again_are_load() -> None:
    """Cut off each time, three quarters of a load that came in every third look had no workers."""
    meter, arrived = Meter(120.0), 0
    for at in range(0, 1200, 30):
        arrived += 600 + 4800 * (at % 90 == 0)
        look(meter, at, report(arrived))
    seen = meter.traffic(1170.0)
    assert seen.per_second > 60.0
    assert 50.0 < seen.level <= seen.per_second
    for at in range(1200, 6000, 30):
        arrived += 600
        look(meter, at, report(arrived))
    assert meter.traffic(5970.0).level == pytest.approx(20.0, rel=0.05), "and over when they are"


def test_a_router_that_is_silent_with_requests_in_flight_is_missed_for_an_hour_and_one_that_ended_is_not() -> None:
    meter = Meter(60.0)
    look(meter, 0.0, report(0), report(0, "cut off"), report(0, "drained"))
    look(meter, 10.0, report(10), report(10, "cut off", in_flight=3), report(10, "drained"))
    for at in range(20, 3610, 10):
        look(meter, at, report(at))
    assert meter.traffic(3600.0).unheard == 1
    busy = Meter(60.0)
    look(busy, 0.0, report(5, "ended", in_flight=3), report(5, "killed", in_flight=3))
    busy.look({}, 15.0, {"ended"})
    assert busy.traffic(15.0).unheard == 1, "one had requests in flight at the last look, and drained since"
    busy.look({}, 30.0, {"ended", "killed"})
    assert busy.traffic(30.0).unheard == 0
    back = Meter(60.0)
    look(back, 0.0, report(0, "cut off", in_flight=3))
    look(back, 10.0)
    look(back, 20.0, report(5, "cut off"))
    assert back.traffic(20.0).unheard == 0
    look(meter, 3620.0, report(3620))
    assert meter.traffic(3620.0).unheard == 0


def test_case_a_router_that_was_killed_is_missed_for_no_hour_where_workers_have_nothing_of_it() -> None:
    """SIGKILL with requests in flight: nothing was taken away for an hour, though its requests ended within seconds."""
    meter = Meter(60.0)
    both = {name: report(5, name, in_flight=3) for name in ("killed", "cut off")}
    meter.look(both, 0.0)
    meter.look({}, 10.0, at_work={"killed", "cut off"})
    assert meter.traffic(10.0).unheard == 2
    for at in range(20, 3600, 10):
        # One that serves on, cut off from Redis, has nothing there at times either.
        meter.look({"new": report(at, "new")}, at, at_work={"new", "cut off"} if at % 100 < 50 else {"new"})
        assert meter.traffic(at).unheard == (2 if at < 10 + QUIET_SECONDS else 1)
    silent = Meter(60.0)
    silent.look(both, 0.0)
    for at in range(10, 1000, 10):
        silent.look({}, at, at_work=None)
        assert silent.traffic(at).unheard == 2, "a worker that does not answer may have some"


def test_who_is_beyond_a_quota_buys_no_workers() -> None:
    """A tenant that asks ten times what its quota allows was scaled for, though none of it is ever let in."""
    meter = Meter(60.0)
    look(meter, 0.0, report(0))
    denied = {"denied": 900, "denied_tokens": 900 * 5000, "prompt_tokens": 100 * 100 + 900 * 5000}
    counted = {"computed_tokens": 7500, "cached_tokens": 2500, "generated_tokens": 4000, "ended": 1000}
    assert look(meter, 10.0, report(1000, **denied, **counted, classes={"": ClassCounts(met=100)})) == 100
    seen = meter.traffic(10.0)
    assert (seen.per_second, seen.input_tokens, seen.output_tokens) == (10.0, 100.0, 40.0)
    assert seen.attainment == 1.0


def test_a_clock_that_is_set_back_leaves_no_window_of_hours() -> None:
    meter = Meter(60.0)
    for at in range(0, 100, 10):
        look(meter, 7200.0 + at, report(10 * at))
    look(meter, 100.0, report(1000))
    assert meter.traffic(100.0).routers == 0, "nothing is known yet"
    look(meter, 110.0, report(2000))
    assert meter.traffic(110.0).per_second == 100.0


def test_silence_is_measured_from_the_last_that_came_or_was_under_way() -> None:
    meter = Meter(60.0)
    look(meter, 0.0, report(0))
    look(meter, 10.0, report(1, in_flight=1))
    look(meter, 50.0, report(1, in_flight=1))
    look(meter, 90.0, report(1))
    assert meter.traffic(100.0).idle_seconds == 50.0


def test_burstiness_is_told_from_what_changes_slowly() -> None:
    bursty, slow = Meter(60.0), Meter(60.0)
    total = ramp = 0
    for step in range(200):
        total += 300 if step % 10 == 0 else 80
        ramp += 100 + step
        look(bursty, 10.0 * step, report(total))
        look(slow, 10.0 * step, report(ramp))
    assert bursty.traffic(2000.0).gap_scv == 8.0
    assert slow.traffic(2000.0).gap_scv == 1.0


def week(days: int, *, surge_on: int | None = None) -> History:
    """Days that rise from 10/s to 30/s and fall again, up to 6 in the morning of the last."""
    history = History()
    for bucket in range(days * DAY - DAY * 3 // 4):
        rate = 20 - 10 * math.cos(2 * math.pi * bucket / DAY)
        if surge_on is not None and bucket // DAY == surge_on and bucket % DAY > DAY // 4:
            rate *= 3
        history.add(round(rate * BUCKET_SECONDS), BUCKET_SECONDS, bucket * BUCKET_SECONDS + 1.0)
    return history


def test_the_season_says_what_comes_before_it_does() -> None:
    ahead = week(3).forecast(20.0, 7200.0)
    assert ahead.days == 2
    assert 24 < ahead.peak < 27, "20 − 10·cos(2π·8/24) is 25"
    assert week(1).forecast(20.0, 300.0).days == 0


def test_what_happened_on_one_day_is_no_season() -> None:
    assert week(5, surge_on=2).forecast(20.0, 3600.0).peak < 25


def test_a_trend_is_followed_and_chance_is_none() -> None:
    rising, noisy = History(), History()
    for bucket in range(12):
        rising.add(3000 + 600 * bucket, BUCKET_SECONDS, bucket * BUCKET_SECONDS + 1.0)
        noisy.add(3000 + (40 if bucket % 2 else -40), BUCKET_SECONDS, bucket * BUCKET_SECONDS + 1.0)
    assert rising.forecast(32.0, 600.0).trend == pytest.approx(36.0)
    assert noisy.forecast(10.0, 600.0).peak == 10.0


def test_stretches_nobody_looked_at_are_unknown_and_no_zero() -> None:
    history = History()
    history.add(3000, BUCKET_SECONDS, 1.0)
    history.add(10, 10.0, BUCKET_SECONDS * 5 + 1.0)
    assert history.arrivals.counts == (3000.0, -1.0, -1.0, -1.0, -1.0, 10.0)
    again = History(history.arrivals)
    again.add(5, 5.0, BUCKET_SECONDS * 5 + 2.0)
    assert again.arrivals.counts[-1] == 15.0
    again.add(7, 5.0, BUCKET_SECONDS * 2.0)
    assert len(again.arrivals.counts) == 6, "a clock that is set back changes nothing"
