"""Measures of runs whose answers are made up, and intervals against what is known of them."""

from array import array
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.goodput import Slo
from loadtests.open_loop.answers import Answer, Effort, Outcome, Run
from loadtests.open_loop.measures import Figure, summarise
from loadtests.open_loop.show import notes
from loadtests.open_loop.strain import strains
from loadtests.open_loop.sweep import Point

SLO = Slo(ttft_seconds=1.0, tpot_seconds=0.1)
EASY = Effort([0.0], [0.0], 0.1)


def answer(
    due: float, ttft: float, tpot: float = 0.05, num_tokens: int = 5, outcome: Outcome = Outcome.FINISHED
) -> Answer:
    times = array("d", [due + ttft + tpot * at for at in range(num_tokens)])
    ended = times[-1] if times else due + ttft
    return Answer(0, due, lambda: 0.0, due, times, num_tokens, 100, 40, ended, outcome)


def made(answers: list[Answer], effort: Effort = EASY) -> Run:
    return Run(answers, answers[-1].due if answers else 0.0, 3, effort)


def test_figures_of_a_run_that_is_even() -> None:
    found = summarise(made([answer(float(at), ttft=0.4) for at in range(100)]), SLO, warmup_seconds=10.0)
    assert (found.num_requests, found.num_warmup) == (90, 10)
    assert found.ttft_seconds["p50"].value == pytest.approx(0.4)
    assert found.tpot_seconds["p99"].value == pytest.approx(0.05)
    assert found.itl_seconds["mean"].value == pytest.approx(0.05)
    assert found.e2e_seconds["p90"].value == pytest.approx(0.6)
    assert found.attainment == Figure(1.0, 1 - 3 / 90, 1.0), "90 good ones do not promise the next"
    assert found.offered_per_second == pytest.approx(1.0)
    assert found.finished_per_second == pytest.approx(1.0, rel=0.02)
    assert found.goodput_per_second.value == pytest.approx(1.0)
    assert found.tokens_per_second == pytest.approx(5.0, rel=0.01)
    assert found.cached_fraction == pytest.approx(0.4)
    assert found.strains == []


def test_what_did_not_finish_stays_in_the_denominator() -> None:
    outcomes = (Outcome.FINISHED, Outcome.SHED, Outcome.TIMED_OUT, Outcome.FAILED)
    answers = [
        answer(float(at), 0.4, num_tokens=5 if at % 4 == 0 else 0, outcome=outcomes[at % 4]) for at in range(100)
    ]
    found = summarise(made(answers), SLO, 0.0)
    assert found.attainment.value == 0.25
    assert found.goodput_per_second.value == pytest.approx(0.25)
    assert found.outcomes == {"finished": 25, "shed": 25, "timed_out": 25, "failed": 25}


def test_answers_shorter_than_asked_are_told_of() -> None:
    short, whole, failed = answer(0.0, 0.4), answer(1.0, 0.4), answer(2.0, 0.4, outcome=Outcome.FAILED)
    short.asked_tokens, whole.asked_tokens, failed.asked_tokens = 6, 5, 6
    found = summarise(made([short, whole, failed]), SLO, 0.0)
    assert found.num_cut_short == 1
    (note,) = notes([Point(3.0, 0, 0.0, found, [])])
    assert note.startswith("at 3/s 1 of 3 answers were shorter than asked")


def test_a_request_that_had_tokens_and_failed_is_not_good() -> None:
    found = summarise(made([answer(float(at), 0.4, outcome=Outcome.FAILED) for at in range(20)]), SLO, 0.0)
    assert found.attainment.value == 0.0
    assert found.e2e_seconds == {}
    assert found.ttft_seconds["p50"].value == pytest.approx(0.4)


def test_the_warm_up_does_not_count() -> None:
    cold = [answer(float(at), 9.0) for at in range(10)]
    warm = [answer(float(at), 0.4) for at in range(10, 100)]
    assert summarise(made(cold + warm), SLO, 10.0).ttft_seconds["p99"].value == pytest.approx(0.4)
    assert summarise(made(cold + warm), SLO, 0.0).ttft_seconds["p99"].value == pytest.approx(9.0)


def test_what_comes_after_the_last_due_time_is_no_throughput() -> None:
    """While load drains, no more comes in: counting it would say that a slow server is fast."""
    found = summarise(made([answer(float(at), ttft=1000.0) for at in range(50)]), SLO, 0.0)
    assert (found.tokens_per_second, found.finished_per_second) == (0.0, 0.0)
    assert found.outcomes["finished"] == 50


def test_an_interval_holds_the_true_value_as_often_as_it_says() -> None:
    """Of 30 independent runs of exponential latencies, 95 % are to hold the true p50 and mean; 80 % would be a fault."""
    held = {"p50": 0, "mean": 0}
    for seed in range(30):
        random = Random(seed)
        answers = [answer(float(at), random.expovariate(2.0), num_tokens=1) for at in range(160)]
        ttft = summarise(made(answers), SLO, 0.0, seed=seed).ttft_seconds
        for name, true in (("p50", 0.34657), ("mean", 0.5)):
            figure = ttft[name]
            assert figure.low is not None
            assert figure.high is not None
            held[name] += figure.low <= true <= figure.high
    assert min(held.values()) >= 0.85 * 30, held


def test_stretches_of_neighbours_give_a_wider_interval_than_the_same_values_shuffled() -> None:
    """Requests that queue resemble their neighbours; an interval that did not know would promise too much."""
    slow = [0.2 if at // 50 % 2 else 0.8 for at in range(400)]
    shuffled = Random(1).sample(slow, len(slow))
    widths = []
    for ttfts in (slow, shuffled):
        mean = summarise(made([answer(float(at), ttft) for at, ttft in enumerate(ttfts)]), SLO, 0.0).ttft_seconds[
            "mean"
        ]
        assert mean.low is not None
        assert mean.high is not None
        widths.append(mean.high - mean.low)
    assert widths[0] > 2 * widths[1]


def test_a_handful_of_requests_gets_no_interval() -> None:
    assert summarise(made([answer(float(at), 0.4) for at in range(5)]), SLO, 0.0).attainment == Figure(1.0)


def test_nothing_is_a_summary_too() -> None:
    found = summarise(made([]), SLO, 0.0)
    assert (found.num_requests, found.attainment, found.ttft_seconds) == (0, Figure(0.0), {})


@settings(max_examples=30)
@given(
    st.lists(st.tuples(st.floats(1e-4, 50.0), st.sampled_from(list(Outcome))), min_size=1, max_size=120),
    st.integers(0, 9),
)
def test_whatever_came_values_lie_in_their_intervals_and_all_is_counted(
    drawn: list[tuple[float, Outcome]], seed: int
) -> None:
    answers = [answer(float(at), ttft, outcome=outcome) for at, (ttft, outcome) in enumerate(drawn)]
    found = summarise(made(answers), SLO, 0.0, seed)
    assert sum(found.outcomes.values()) == found.num_requests == len(answers)
    for figures in (found.ttft_seconds, found.tpot_seconds, found.e2e_seconds, {"": found.attainment}):
        for figure in figures.values():
            if figure.low is not None and figure.high is not None:
                assert figure.low <= figure.value <= figure.high
    assert found == summarise(made(answers), SLO, 0.0, seed)


def test_a_generator_that_is_the_bottleneck_says_by_what() -> None:
    assert strains(Effort([0.001] * 99, [0.002] * 99, 0.5)) == []
    said = strains(Effort([0.2] * 99, [0.1] * 99, 0.97))
    assert [line.split(":")[0] for line in said] == [
        "it sent late",
        "events waited for it",
        "it took 97% of a core, at most 90% is fair",
    ]
    assert "p99 200 ms" in said[0]
    (late,) = strains(Effort([0.2] * 99, [0.0], 0.2))
    assert "it took 20% of a core: something else keeps this machine busy" in late
