import argparse
from functools import partial

import pytest

from headrace.deployments import Deployment
from headrace.traces import TraceRow
from loadtests.disagg_plan import CHUNKS, deployments_of, is_spent, named_deployment, rates_of
from loadtests.judged import Point


def test_a_deployment_is_refused_where_no_slo_has_its_name() -> None:
    assert named_deployment("1P1D+tight/256:1024").targets == "tight"
    with pytest.raises(argparse.ArgumentTypeError, match=r"\+soon: after a plus one of chat"):
        named_deployment("1P1D+soon")
    with pytest.raises(argparse.ArgumentTypeError, match="got 2U"):
        named_deployment("2U")


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
    spent = partial(is_spent, trace="t", deployment=Deployment.parse("2U:512"))
    assert not spent([at(1, 50), at(2, 40)])
    assert not spent([at(1, 50), at(2, 40), at(3, 45)])
    assert spent([at(3, 30), at(1, 50), at(2, 40)]), "by rate, in whatever order they were run"
    assert not is_spent([at(3, 30), at(1, 50), at(2, 40)], "t", Deployment.parse("2U:256"))
