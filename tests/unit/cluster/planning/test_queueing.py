"""Waits against what textbooks have exactly."""

import heapq
import math
from random import Random

import pytest

from cluster.planning.queueing import (
    EXACT_SERVERS,
    busy_when_arriving,
    erlang_c,
    normal_cdf,
    normal_quantile,
    quantile,
    wait,
)


def test_one_server_waits_as_often_as_it_is_busy() -> None:
    assert erlang_c(1, 0.5) == pytest.approx(0.5)


def test_erlangs_own_table() -> None:
    """Two servers at 1 erlang: 1/3; ten at 8: 0.409."""
    assert erlang_c(2, 1.0) == pytest.approx(1 / 3)
    assert erlang_c(10, 8.0) == pytest.approx(0.409, abs=1e-3)


def test_nothing_waits_without_work_and_everything_from_saturation_on() -> None:
    assert erlang_c(4, 0.0) == 0.0
    assert erlang_c(4, 4.0) == 1.0
    assert wait(4, 4.0, 1.0) is None


@pytest.mark.parametrize("busy", [0.5, 0.8, 0.9, 0.97])
def test_many_servers_go_over_into_few_without_a_step(busy: float) -> None:
    few, many = EXACT_SERVERS, EXACT_SERVERS + 1
    assert erlang_c(many, busy * many) == pytest.approx(erlang_c(few, busy * few), abs=0.05)


@pytest.mark.parametrize(("scv", "mean"), [(1.0, 4.0), (0.0, 2.0)])
def test_one_server_waits_as_pollaczek_and_khinchine_say(scv: float, mean: float) -> None:
    found = wait(1, 0.8, 1.0, scv)
    assert found is not None
    assert found.mean == pytest.approx(mean)
    assert found.within(0.0) == pytest.approx(0.2)
    assert found.within(-1.0) == 0.0


def test_a_quantile_is_where_the_share_is_reached() -> None:
    found = wait(1, 0.8, 1.0)
    assert found is not None
    at = quantile(found.within, 0.99)
    assert found.within(at) == pytest.approx(0.99, abs=1e-4)
    assert quantile(found.within, 0.1) <= 1e-4


def test_the_normal_quantile_turns_the_distribution_round() -> None:
    assert normal_quantile(0.975) == pytest.approx(1.959964, abs=1e-5)
    assert normal_cdf(normal_quantile(0.3)) == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("num_servers", "busy", "service_scv", "gap_scv"),
    [(1, 0.6, 1.0, 4.0), (3, 0.6, 0.0, 2.0), (3, 0.7, 0.5, 2.0), (2, 0.7, 1.0, 1.0)],
)
def test_waits_are_those_of_a_queue_that_was_run(
    num_servers: int, busy: float, service_scv: float, gap_scv: float
) -> None:
    """One queue, log-normal service, Gamma gaps: mean and 90th percentile within 15 %."""
    random, per_second = Random(7), busy * num_servers
    sigma = math.sqrt(math.log1p(service_scv))
    free, now, waits = [0.0] * num_servers, 0.0, []
    for _ in range(30_000):
        now += random.gammavariate(1 / gap_scv, gap_scv) / per_second
        begins = max(heapq.heappop(free), now)
        waits.append(begins - now)
        heapq.heappush(free, begins + math.exp(sigma * random.gauss(0, 1) - sigma * sigma / 2))
    found = wait(num_servers, per_second, 1.0, service_scv, gap_scv)
    assert found is not None
    assert found.mean == pytest.approx(sum(waits) / len(waits), rel=0.15)
    assert quantile(found.within, 0.9) == pytest.approx(sorted(waits)[27_000], rel=0.15)


def test_an_arrival_of_a_burst_finds_the_server_busy_more_often() -> None:
    assert busy_when_arriving(0.6, 1.0) == 0.6
    assert busy_when_arriving(0.6, 4.0) > 0.8
    assert busy_when_arriving(0.6, 0.0) < 0.4
