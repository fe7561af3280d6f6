import argparse

import pytest

from headrace.traces import TraceRow
from loadtests.disagg_plan import CHUNKS, Deployment, deployments_of, is_spent, rates_of
from loadtests.judged import Point


def test_a_deployment_is_read_as_it_is_written() -> None:
    assert Deployment.parse("2U:512") == Deployment("2U", 0, 2, 512, 512)
    assert Deployment.parse("3P1D") == Deployment("3P1D", 3, 1, 2048, 2048)
    assert Deployment.parse("1P1D:4096") == Deployment("1P1D", 1, 1, 4096, 4096)
    assert Deployment.parse("1P1D+") == Deployment("1P1D+", 1, 1, 2048, 2048, placed=True)
    assert Deployment.parse("1P1D+tight/256:1024") == Deployment("1P1D+tight/256", 1, 1, 1024, 256, True, "tight")
    assert Deployment.parse("2U+code:256") == Deployment("2U+code", 0, 2, 256, 256, True, "code")
    with pytest.raises(argparse.ArgumentTypeError, match="got 2U"):
        Deployment.parse("2U")
    for unknown in ("1P1D+soon", "2U+/64:256", "1P1D/256", "1P1D:"):
        with pytest.raises(argparse.ArgumentTypeError):
            Deployment.parse(unknown)


def test_four_gpus_are_split_in_every_way_and_one_pool_of_them_is_tuned() -> None:
    planned = deployments_of(4)
    assert [each.name for each in planned[:3]] == ["1P3D", "2P2D", "3P1D"]
    assert sorted(each.chunk for each in planned[3:]) == list(CHUNKS)
    assert {each.num_gpus for each in planned} == {4}


def test_rates_rise_around_what_the_prompts_of_a_trace_allow() -> None:
    short = rates_of([TraceRow(0, 0.0, 1000, 100)], 2)
    assert short == sorted(short)
    assert short[0] == 16.0
    assert rates_of([TraceRow(0, 0.0, 10_000, 100)], 4)[0] == 3.2


def at(rate: float, met: int) -> Point:
    """`met` requests of 100 within every SLO in a second, the others within none."""
    answers = ((0.1, 0.005, 0.01),) * met + ((9.0, 1.0, 1.0),) * (100 - met)
    return Point("t", "2U", 512, 2, rate, 1.0, 0, answers)


def test_rates_are_raised_until_every_slo_has_lost_goodput_twice() -> None:
    deployment = Deployment.parse("2U:512")
    assert not is_spent([at(1, 50), at(2, 40)], "t", deployment)
    assert not is_spent([at(1, 50), at(2, 40), at(3, 45)], "t", deployment)
    assert is_spent([at(3, 30), at(1, 50), at(2, 40)], "t", deployment), "by rate, in whatever order they were run"
    assert not is_spent([at(3, 30), at(1, 50), at(2, 40)], "t", Deployment.parse("2U:256"))
