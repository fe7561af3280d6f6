"""A real engine over a device that takes its time, all of it virtual: when what becomes runnable begins to compute."""

import asyncio
import random
from bisect import bisect_left
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest

from headrace.blocks import BlockHasher
from headrace.costmodel import CostModel
from headrace.values import SequenceOutput
from tests.unit.workers.rig import a_request
from workers.engine import Engine
from workers.scheduling.blocks import BlockLedger
from workers.scheduling.pacing import MARGIN_SECONDS, MIN_SAMPLES, WINDOW, Pacing
from workers.scheduling.plan import StepPlan, StepResult
from workers.scheduling.scheduler import Scheduler, SchedulerLimits
from workers.scheduling.work import StepKind, StepWork

STEP, RESULT = 0.012, 0.0003
NUM_SEQUENCES, NUM_STEPS = 8, 1500
LIMITS = SchedulerLimits(NUM_SEQUENCES, 64, 4096, 64, pin_seconds=10.0)
COST = CostModel(decode_base_seconds=0.01, decode_sequence_seconds=0.0, decode_context_token_seconds=0.0)
DECODE = StepWork(StepKind.DECODE, 1, 0, 0, 0.0, 1)
PROMPT = StepWork(StepKind.PREFILL, 1, 1, 8, 4.0, 0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time passes when there is nothing to do but to wait, and when somebody says so. Also the engine's clock."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0
        selector: Any = self._selector  # type: ignore[attr-defined]
        look = selector.select

        def select(timeout: float | None) -> object:
            self.seconds += timeout or 0.0
            return look(0)

        selector.select = select

    def time(self) -> float:
        return self.seconds

    now = time


@dataclass
class Device:
    """An Executor as far as an engine asks. `host_seconds`: from a plan to its launch, which the engine's thread spends;
    `step_seconds`: what the device then takes. Every draw is a token."""

    loop: VirtualLoop
    host_seconds: Callable[[], float]
    step_seconds: Callable[[], float]
    failed: Future[Exception] = field(default_factory=Future)
    planned: list[float] = field(default_factory=list)
    busy: list[tuple[float, float]] = field(default_factory=list)

    def step(self, plan: StepPlan) -> Future[StepResult]:
        self.planned.append(self.loop.seconds)
        self.loop.seconds += self.host_seconds()
        before = self.busy[-1][1] if self.busy else 0.0
        begin = max(before, self.loop.seconds)
        end = begin + self.step_seconds()
        self.busy.append((begin, end))
        tokens = (7,) * sum(work.num_samples for work in plan.work)
        result = StepResult(plan.number, tokens, seconds=end - begin, ahead_seconds=before - self.loop.seconds)
        future: Future[StepResult] = Future()
        future.set_running_or_notify_cancel()
        self.loop.call_at(end + RESULT, future.set_result, result)
        return future

    @property
    def idle_fraction(self) -> float:
        steps = self.busy[4 * WINDOW :]
        return sum(after[0] - before[1] for before, after in pairwise(steps)) / (steps[-1][1] - steps[0][0])

    def waits(self, draw: random.Random) -> list[float]:
        """From moments at which a sequence could have become runnable until the step that it would join began; sorted."""
        moments = (draw.uniform(self.planned[4 * WINDOW], self.planned[-2]) for _ in range(4000))
        return sorted(self.busy[bisect_left(self.planned, moment)][0] - moment for moment in moments)


class Silent:
    """Hears steps and outputs, and nothing else happens."""

    def __init__(self) -> None:
        self.over = asyncio.Event()

    def on_step(self, work: StepWork, seconds: float) -> None: ...

    def on_outputs(self, outputs: list[SequenceOutput]) -> None:
        if any(output.finish is not None for output in outputs):
            self.over.set()

    on_chunk = on_deadline = on_pin_ended = lambda self, what: None


@contextmanager
def virtual_loop() -> Iterator[VirtualLoop]:
    loop = VirtualLoop()
    try:
        yield loop
    finally:
        loop.close()


def run(late: bool, host: Callable[[], float], step: Callable[[], float]) -> Device:
    """NUM_SEQUENCES sequences, decoded side by side to their end."""
    with virtual_loop() as loop:
        device = Device(loop, host, step)
        ledger = BlockLedger(4096, 16)
        hasher = BlockHasher(revision="r", kv_format="f", block_size=16)
        scheduler = Scheduler(LIMITS, ledger, lambda adapter, salt: hasher)
        engine = Engine(scheduler, device, loop, late_launch=late)  # type: ignore[arg-type]

        async def until_over() -> None:
            listener = Silent()
            for number in range(NUM_SEQUENCES):
                scheduler.submit(a_request(f"q{number}", length=5, seed=number, max_tokens=NUM_STEPS), loop.seconds)
            running = asyncio.create_task(engine.run(listener))
            engine.changed()
            await listener.over.wait()
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running

        loop.run_until_complete(until_over())
    return device


def test_one_step_ahead_a_sequence_waits_for_up_to_two_steps_and_launched_late_for_little_more_than_one() -> None:
    draw = random.Random(3)

    def host() -> float:
        return draw.uniform(0.001, 0.002)

    def step() -> float:
        return draw.gauss(STEP, STEP / 100)

    ahead, late = run(False, host, step), run(True, host, step)
    p99 = [device.waits(draw)[3960] / STEP for device in (ahead, late)]
    assert p99[0] > 1.85
    assert p99[1] < 1.4
    assert ahead.idle_fraction == 0
    assert late.idle_fraction < 0.001


@pytest.mark.parametrize("trouble", ["shorter steps", "a slower host", "a host that now and then stands still"])
def test_launching_late_leaves_the_device_idle_for_no_time_to_speak_of_whatever_changes(trouble: str) -> None:
    draw, num_steps = random.Random(5), 0

    def host() -> float:
        if num_steps > NUM_STEPS / 2 and trouble == "a slower host":
            return draw.uniform(0.003, 0.005)
        stands_still = trouble == "a host that now and then stands still" and draw.random() < 0.01
        return 0.008 if stands_still else draw.uniform(0.001, 0.002)

    def step() -> float:
        nonlocal num_steps
        num_steps += 1
        shorter = trouble == "shorter steps" and num_steps > NUM_STEPS / 2
        return draw.gauss(STEP / 2 if shorter else STEP, STEP / 50)

    assert run(True, host, step).idle_fraction < 0.01


def after(needed: list[float]) -> Pacing:
    """Launched behind steps of 10 ms as they began, so that 10 ms were given, of which `needed` was used up each time; a
    step of decodes computes now, since 1 s."""
    pacing = Pacing()
    pacing.launched(DECODE, COST, 0.0, 0.0)
    for number, each in enumerate(needed):
        now = number * 0.01
        pacing.launched(DECODE, COST, now, now)
        pacing.landed(0.01 - needed[number - 1] if number else 0.0, now + 0.01)
        assert each >= 0
    pacing.landed(0.01 - needed[-1], 1.0)
    pacing.launched(DECODE, COST, 1.0, 1.0)
    return pacing


def test_nothing_is_held_before_enough_is_known_nor_behind_a_prompt() -> None:
    assert after([0.002] * (MIN_SAMPLES - 1)).release_at(COST) is None
    assert after([0.002] * MIN_SAMPLES).release_at(COST) == pytest.approx(1.01 - 0.002 - MARGIN_SECONDS)
    pacing = after([0.002] * MIN_SAMPLES)
    pacing.landed(0.0, 1.01)
    pacing.launched(PROMPT, COST, 1.01, 1.01)
    assert pacing.release_at(COST) is None


def test_the_most_but_one_that_was_lately_needed_is_kept_in_hand() -> None:
    ordinary = [0.002] * WINDOW
    assert after([*ordinary, 0.5]).lead_seconds == pytest.approx(0.002 + MARGIN_SECONDS)
    assert after([*ordinary, 0.5, 0.006]).lead_seconds == pytest.approx(0.006 + MARGIN_SECONDS)
    assert after([0.5, 0.006, *ordinary]).lead_seconds == pytest.approx(0.002 + MARGIN_SECONDS)


def test_an_alarm_that_rings_late_is_part_of_what_was_needed() -> None:
    pacing = after([0.002] * MIN_SAMPLES)
    release = pacing.release_at(COST)
    assert release is not None
    pacing.launched(DECODE, COST, release + 0.001, release + 0.002)
    pacing.landed(0.0, 1.01)
    pacing.landed(0.0, 1.02)
    assert pacing._needed[-1] == pytest.approx(0.003), "all that was given: nothing was left"
