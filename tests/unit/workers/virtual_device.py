"""A real engine over a device that takes its time, all of it virtual: when what becomes runnable begins to compute."""

import asyncio
import random
from bisect import bisect_left
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

from headrace.blocks import BlockHasher
from headrace.values import PrefillTarget, SequenceOutput
from tests.unit.workers.rig import a_request
from workers.engine import Engine
from workers.scheduling.blocks import BlockLedger
from workers.scheduling.outcomes import FirstToken
from workers.scheduling.plan import StepPlan, StepResult
from workers.scheduling.scheduler import Scheduler, SchedulerLimits

NUM_SEQUENCES, NUM_STEPS = 8, 1000
SETTLED_STEPS = 300  # from then on it counts
LIMITS = SchedulerLimits(NUM_SEQUENCES + 4, 64, 4096, 64, pin_seconds=10.0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time passes when there is nothing to do but to wait. Also the engine's clock."""

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
class Machine:
    """How long things take: `host` from a plan to its launch, on the rank's thread; `step` on the device; `heard` from a
    step's end until it is heard of; `awaits`: a launch that is over only when what runs on the device is; `arrival`: from
    one sequence that a peer hands over to the next."""

    step: Callable[[StepPlan], float]
    host: Callable[[StepPlan], float]
    heard: Callable[[], float] = lambda: 0.0003
    awaits: Callable[[StepPlan], bool] = lambda plan: False
    arrival: Callable[[], float] | None = None


@dataclass
class Device:
    """An Executor as far as an engine asks. Every draw is a token."""

    loop: VirtualLoop
    machine: Machine
    failed: Future[Exception] = field(default_factory=Future)
    planned: list[float] = field(default_factory=list)
    busy: list[tuple[float, float]] = field(default_factory=list)
    begun: list[float] = field(default_factory=list)
    arrived: list[float] = field(default_factory=list)
    _launched: float = 0.0
    _heard: float = 0.0

    def step(self, plan: StepPlan) -> Future[StepResult]:
        now, machine = self.loop.seconds, self.machine
        self.planned.append(now)
        before = self.busy[-1][1] if self.busy else 0.0
        began = max(now, self._launched)
        launched = self._launched = began + machine.host(plan)
        if machine.awaits(plan) and launched < before:
            launched = self._launched = before + machine.host(plan) / 4
        begin = max(before, launched)
        end = begin + machine.step(plan)
        self.busy.append((begin, end))
        self.begun += [begin for start in plan.starts if start.output_ids]
        heard = end + machine.heard()
        seconds, ahead = heard - max(now, self._heard), self._heard - launched
        self._heard = heard
        tokens = (7,) * sum(work.num_samples for work in plan.work)
        result = StepResult(plan.number, tokens, seconds=seconds, ahead_seconds=ahead, launch_seconds=launched - began)
        future: Future[StepResult] = Future()
        future.set_running_or_notify_cancel()
        self.loop.call_at(heard, future.set_result, result)
        return future

    @property
    def idle_fraction(self) -> float:
        steps = self.busy[SETTLED_STEPS:]
        return sum(after[0] - before[1] for before, after in pairwise(steps)) / (steps[-1][1] - steps[0][0])

    @property
    def step_seconds(self) -> float:
        steps = self.busy[SETTLED_STEPS:]
        return sum(end - begin for begin, end in steps) / len(steps)

    def waits(self, draw: random.Random) -> list[float]:
        """In steps, sorted: from moments at which a sequence could have become runnable until the step that it would join
        began."""
        moments = (draw.uniform(self.planned[SETTLED_STEPS], self.planned[-2]) for _ in range(4000))
        return sorted(
            (self.busy[bisect_left(self.planned, moment)][0] - moment) / self.step_seconds for moment in moments
        )

    def waits_of_arrivals(self) -> list[float]:
        """In steps, sorted: of those that did."""
        settled = self.busy[SETTLED_STEPS][0]
        pairs = zip(self.arrived, self.begun, strict=False)
        return sorted((begun - arrived) / self.step_seconds for arrived, begun in pairs if arrived > settled)


class Silent:
    """Hears steps and outputs, and nothing else happens."""

    def __init__(self) -> None:
        self.over = asyncio.Event()

    def on_step(self, work: object, seconds: float) -> None: ...

    def on_outputs(self, outputs: list[SequenceOutput]) -> None:
        if any(output.finish is not None and output.key.request_id == "q0" for output in outputs):
            self.over.set()

    on_chunk = on_deadline = on_pin_ended = lambda self, what: None


@contextmanager
def virtual_loop() -> Iterator[VirtualLoop]:
    loop = VirtualLoop()
    try:
        yield loop
    finally:
        loop.close()


def engine_of(device: Device) -> Engine:
    hasher = BlockHasher(revision="r", kv_format="f", block_size=16)
    scheduler = Scheduler(LIMITS, BlockLedger(4096, 16), lambda adapter, salt: hasher)
    return Engine(scheduler, device, device.loop)  # type: ignore[arg-type]


def run(late: bool, machine: Machine, late_from: float = 0.0) -> Device:
    """NUM_SEQUENCES sequences, decoded side by side to their end, and those that are handed over meanwhile, of one more
    token each."""
    with virtual_loop() as loop:
        device = Device(loop, machine)
        engine = engine_of(device)
        scheduler = engine.scheduler
        if late:
            loop.call_at(late_from, partial(engine.launch_late, on=True))

        async def hand_over(arrival: Callable[[], float]) -> None:
            number = 0
            while True:
                await asyncio.sleep(arrival())
                number += 1
                prefill = PrefillTarget("p", 1, "")
                request = a_request(f"h{number}", length=40, seed=1000 + number, max_tokens=2, prefill=prefill)
                expected = scheduler.expect(request, loop.seconds)
                expected = scheduler.incoming.claim(request.key)
                scheduler.incoming.allocate(request.key, expected.num_prompt_blocks - expected.held_blocks)
                scheduler.incoming.arrive(request.key, [FirstToken(0, 7, None)], 0, loop.seconds)
                device.arrived.append(loop.seconds)
                engine.changed()

        async def until_over() -> None:
            listener = Silent()
            for number in range(NUM_SEQUENCES):
                scheduler.submit(a_request(f"q{number}", length=5, seed=number, max_tokens=NUM_STEPS), loop.seconds)
            tasks = [asyncio.create_task(engine.run(listener))]
            if machine.arrival is not None:
                tasks.append(asyncio.create_task(hand_over(machine.arrival)))
            engine.changed()
            await listener.over.wait()
            for task in tasks:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

        loop.run_until_complete(until_over())
    return device
