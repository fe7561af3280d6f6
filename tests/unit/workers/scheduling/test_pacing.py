"""When what becomes runnable begins to compute, and what it costs; on the device that was measured, among others."""

import random
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import pytest

from headrace.costmodel import CostModel
from headrace.errors import WorkerLost
from tests.unit.workers.rig import a_request
from tests.unit.workers.virtual_device import (
    NUM_SEQUENCES,
    NUM_STEPS,
    Device,
    Machine,
    Silent,
    engine_of,
    run,
    virtual_loop,
)
from workers.scheduling.pacing import (
    IDLE_FRACTION,
    LAUNCH_SECONDS,
    MARGIN_SECONDS,
    MIN_SAMPLES,
    RECENT,
    WINDOW,
    Pacing,
    least_lead,
)
from workers.scheduling.plan import StepPlan, StepResult
from workers.scheduling.work import StepKind, StepWork

STEP = 0.012
NOTHING, ARRIVALS, ALL = "nothing waits", "arrivals wait", "all wait"
COST = CostModel(decode_base_seconds=0.01, decode_sequence_seconds=0.0, decode_context_token_seconds=0.0)
DECODE = StepWork(StepKind.DECODE, 1, 0, 0, 0.0, 1)
PROMPT = StepWork(StepKind.PREFILL, 1, 1, 8, 4.0, 0)


def p99(waits: list[float]) -> float:
    return waits[int(0.99 * len(waits))]


def steady(draw: random.Random) -> Machine:
    return Machine(step=lambda plan: draw.gauss(STEP, STEP / 100), host=lambda plan: draw.uniform(0.001, 0.002))


def measured(draw: random.Random, awaits: str) -> Machine:
    """As two H200 were seen: steps that grow longer, half a millisecond more with one more row, which takes another graph,
    or beside a pull; every 75 ms a sequence that a peer hands over. What
    `awaits` the device is launched when that has done the rest."""
    num_steps = 0

    def step(plan: StepPlan) -> float:
        nonlocal num_steps
        num_steps += 1
        more = 0.0005 * (len(plan.work) > NUM_SEQUENCES) + 0.0006 * (draw.random() < 0.15)
        return draw.gauss(0.0103 + num_steps * 2.6e-6 + more, 7e-5)

    return Machine(
        step,
        host=lambda plan: draw.uniform(0.001, 0.002) + 0.0005 * bool(plan.starts),
        heard=lambda: draw.uniform(0.0001, 0.0004) + (draw.expovariate(1000) if draw.random() < 0.1 else 0.0),
        awaits=lambda plan: awaits == ALL or (awaits == ARRIVALS and bool(plan.starts)),
        arrival=lambda: draw.uniform(0.065, 0.085),
    )


def test_one_step_ahead_a_sequence_waits_for_up_to_two_steps_and_launched_late_for_little_more_than_one() -> None:
    draw = random.Random(3)
    ahead, late = run(False, steady(draw)), run(True, steady(draw))
    assert p99(ahead.waits(draw)) > 1.85
    assert p99(late.waits(draw)) < 1.3
    assert ahead.idle_fraction == 0
    assert late.idle_fraction < IDLE_FRACTION


@pytest.mark.parametrize("awaits", [NOTHING, ARRIVALS, ALL])
def test_launches_that_wait_for_the_device_let_no_step_go_early(awaits: str) -> None:
    """Where one in six waits, the most that was needed is always a step: kept in hand, it would let nothing be held."""
    draw = random.Random(3)
    ahead, late = run(False, measured(draw, awaits)), run(True, measured(draw, awaits))
    assert p99(ahead.waits_of_arrivals()) > 1.9
    assert p99(late.waits_of_arrivals()) < (1.75 if awaits == ALL else 1.4)
    assert late.idle_fraction < ahead.idle_fraction + IDLE_FRACTION


def test_it_begins_in_the_middle_of_a_run() -> None:
    """As a worker's role changes, with steps in flight."""
    draw = random.Random(3)
    late = run(True, measured(draw, NOTHING), late_from=2.4567)
    assert p99(late.waits_of_arrivals()) < 1.4
    assert late.idle_fraction < IDLE_FRACTION


@dataclass
class Failing(Device):
    """One of its steps raises, in its middle."""

    failed_at: float | None = None

    def step(self, plan: StepPlan) -> Future[StepResult]:
        landing = super().step(plan)
        if len(self.planned) != NUM_STEPS // 2:
            return landing
        failing: Future[StepResult] = Future()
        failing.set_running_or_notify_cancel()
        self.failed_at = self.busy[-1][0] + STEP / 2
        self.loop.call_at(self.failed_at, failing.set_exception, ValueError("wrong"))
        return failing


def test_what_is_held_behind_a_step_that_fails_is_held_no_longer() -> None:
    with virtual_loop() as loop:
        device = Failing(loop, Machine(step=lambda plan: STEP, host=lambda plan: 0.001))
        engine = engine_of(device)
        engine.launch_late(on=True)
        engine.scheduler.submit(a_request("q", max_tokens=NUM_STEPS), loop.seconds)
        with pytest.raises(ExceptionGroup) as caught:
            loop.run_until_complete(engine.run(Silent()))  # type: ignore[arg-type]
        assert caught.group_contains(WorkerLost, match="wrong")
        assert loop.seconds == device.failed_at


TROUBLES = ["shorter steps", "a slower host", "a host that now and then stands still"]


@pytest.mark.parametrize("trouble", TROUBLES)
def test_launching_late_leaves_the_device_idle_for_no_time_to_speak_of_whatever_changes(trouble: str) -> None:
    draw, num_steps = random.Random(5), 0

    def host(plan: StepPlan) -> float:
        if num_steps > NUM_STEPS / 2 and trouble == TROUBLES[1]:
            return draw.uniform(0.003, 0.005)
        stands_still = trouble == TROUBLES[2] and draw.random() < 0.01
        return 0.008 if stands_still else draw.uniform(0.001, 0.002)

    def step(plan: StepPlan) -> float:
        nonlocal num_steps
        num_steps += 1
        shorter = trouble == TROUBLES[0] and num_steps > NUM_STEPS / 2
        return draw.gauss(STEP / 2 if shorter else STEP, STEP / 50)

    late = run(True, Machine(step, host))
    assert late.idle_fraction < 0.01
    assert p99(late.waits(draw)) < 1.85  # of steps whose mean is three quarters of the longer ones, where they shorten


@pytest.mark.parametrize(
    ("needed", "lead"),
    [
        ([0.002] * 100, 0.002 - IDLE_FRACTION * 0.01),
        ([0.002] * 99 + [0.006], 0.002 - 0.01 * 0.001),
        ([0.002] * 95 + [0.01] * 5, 0.01 - 0.001),
        ([0.0] * 100, 0.0),
    ],
)
def test_of_what_was_needed_a_tail_may_be_missing_that_costs_a_two_hundredth(needed: list[float], lead: float) -> None:
    assert least_lead(sorted(needed), 0.01 * len(needed)) == pytest.approx(lead)


def a_result(ahead: float, launch: float = 0.0) -> StepResult:
    return StepResult(1, (), seconds=0.01, ahead_seconds=ahead, launch_seconds=launch)


def after(needed: list[float], *, starts: Callable[[int], bool] = lambda number: False) -> Pacing:
    """Launched behind steps of 10 ms as they began, so that 10 ms were given, of which `needed` was used up each time; a
    step of decodes computes now, since 1 s."""
    pacing, before = Pacing(), 0.01
    pacing.launched(1, DECODE, COST, 0.0, 0.0, starts=True)
    for number, each in enumerate([0.002] * RECENT + needed):
        now = number * 0.01
        pacing.launched(1, DECODE, COST, now, now, starts=number >= RECENT and starts(number - RECENT))
        pacing.landed(a_result(0.01 - before), now + 0.01)
        before = each
    pacing.landed(a_result(0.01 - before), 1.0)
    pacing.launched(1, DECODE, COST, 1.0, 1.0, starts=False)
    return pacing


def release(pacing: Pacing, now: float, *, alike: bool = True) -> float | None:
    return pacing.release_at(now, alike=alike)


def test_nothing_is_held_before_enough_is_known_nor_behind_a_prompt() -> None:
    assert release(after([0.002] * (MIN_SAMPLES - 1)), 1.0) is None
    pacing = after([0.002] * MIN_SAMPLES)
    assert release(pacing, 1.0) == pytest.approx(1.01 - 0.002 - MARGIN_SECONDS, abs=1e-4)
    assert release(pacing, 1.009) == 1.009, "at once"
    pacing.landed(a_result(0.0), 1.01)
    pacing.launched(1, PROMPT, COST, 1.01, 1.01, starts=True)
    assert release(pacing, 1.01) is None


def test_steps_of_other_rows_have_a_lead_of_their_own() -> None:
    pacing = after([0.002, 0.02] * WINDOW, starts=lambda number: number % 2 == 1)
    assert release(pacing, 1.0) == pytest.approx(1.01 - 0.002 - MARGIN_SECONDS, abs=1e-4)
    assert release(pacing, 1.0, alike=False) == pytest.approx(1.0, abs=1e-4), "all that there is"


def test_an_alarm_that_rings_late_is_part_of_what_was_needed() -> None:
    pacing = after([0.002] * MIN_SAMPLES)
    at = release(pacing, 1.0)
    assert at is not None
    pacing.launched(1, DECODE, COST, at + 0.001, at + 0.002, starts=False)
    pacing.landed(a_result(0.0), 1.01)
    pacing.landed(a_result(0.0), 1.02)
    assert pacing.last is not None
    assert pacing.last.held == pytest.approx(at + 0.001 - 1.0)
    assert pacing.last.given - pacing.last.ahead == pytest.approx(1.01 - at), "all that was given: nothing was left"


def test_a_launch_that_waited_for_the_device_did_not_need_what_it_was_given() -> None:
    pacing = after([0.002] * MIN_SAMPLES)
    for _ in range(2 * WINDOW):
        pacing.launched(1, DECODE, COST, 1.001, 1.001, starts=False)
        pacing.landed(a_result(-0.0003, launch=0.0085), 1.0)
        pacing.landed(a_result(-0.0003, launch=0.0085), 1.0)
        pacing.launched(1, DECODE, COST, 1.0, 1.0, starts=False)
    lead = pacing.lead_seconds(alike=True)
    assert lead is not None
    assert lead < LAUNCH_SECONDS + 0.002
