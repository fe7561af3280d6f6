import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import pytest

from headrace.blocks import BlockHasher
from headrace.clock import ManualClock
from headrace.costmodel import CostModel
from headrace.errors import WorkerLost
from headrace.values import RequestKey, SequenceOutput
from tests.unit.workers.memory import MemoryExecutor
from tests.unit.workers.rig import BLOCK_SIZE, a_request
from workers.engine import Engine
from workers.scheduling.blocks import BlockLedger
from workers.scheduling.plan import RowWork, StepPlan
from workers.scheduling.scheduler import ChunkDone, Scheduler, SchedulerLimits
from workers.scheduling.work import GRAPH_TOKENS, StepFit, StepKind, StepWork

LIMITS = SchedulerLimits(max_num_seqs=4, max_step_tokens=8, max_context_tokens=128, max_waiting=16, pin_seconds=1.0)


class Ear:
    """Keeps what the engine says."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.finished: set[str] = set()
        self.kinds: list[StepKind] = []
        self.late: list[RequestKey] = []
        self.unpinned: list[RequestKey] = []
        self.chunks: list[ChunkDone] = []
        self.order: list[str] = []
        self.heard = asyncio.Event()

    def on_step(self, work: StepWork, seconds: float) -> None:
        self.order.append("step")
        self.kinds.append(work.kind)
        self.heard.set()

    def on_outputs(self, outputs: list[SequenceOutput]) -> None:
        self.order.append("outputs")
        for output in outputs:
            self.tokens.setdefault(output.key.request_id, []).extend(output.token_ids)
            if output.finish is not None:
                self.finished.add(output.key.request_id)

    def on_chunk(self, chunk: ChunkDone) -> None:
        self.order.append("chunk")
        self.chunks.append(chunk)

    def on_deadline(self, key: RequestKey) -> None:
        self.late.append(key)

    def on_pin_ended(self, key: RequestKey) -> None:
        self.unpinned.append(key)

    async def until(self, num_finished: int) -> None:
        while len(self.finished) < num_finished:
            self.heard.clear()
            await self.heard.wait()


def an_engine(executor: MemoryExecutor, clock: ManualClock, *, overlap: bool = True, stages: int = 1) -> Engine:
    def hasher(adapter: str, salt: str) -> BlockHasher:
        return BlockHasher(revision="r", kv_format="f", block_size=BLOCK_SIZE)

    limits = replace(LIMITS, num_micro_batches=stages)
    scheduler = Scheduler(limits, BlockLedger(executor.num_blocks, BLOCK_SIZE), hasher)
    return Engine(scheduler, executor, clock, overlap=overlap)


@asynccontextmanager
async def running(engine: Engine) -> AsyncIterator[Ear]:
    ear = Ear()
    task = asyncio.create_task(engine.run(ear))
    try:
        yield ear
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        engine.executor.close()


@pytest.mark.parametrize("overlap", [True, False])
async def test_every_request_is_answered(overlap: bool, clock: ManualClock) -> None:
    engine = an_engine(MemoryExecutor(), clock, overlap=overlap)
    async with running(engine) as ear:
        for i in range(9):
            engine.scheduler.submit(a_request(f"q{i}", length=3 + 4 * i, seed=i, max_tokens=5), clock.now())
        engine.changed()
        await ear.until(9)
    assert {len(tokens) for tokens in ear.tokens.values()} == {5}


async def test_the_overlapped_loop_answers_as_the_plain_one(clock: ManualClock) -> None:
    answers = []
    for overlap, stages in ((True, 1), (True, 2), (False, 1)):
        engine = an_engine(MemoryExecutor(num_blocks=24), clock, overlap=overlap, stages=stages)
        async with running(engine) as ear:
            for i in range(6):
                request = a_request(f"q{i}", length=5 + 3 * i, seed=i % 3, max_tokens=12, temperature=float(i % 2))
                engine.scheduler.submit(request, clock.now())
            engine.changed()
            await ear.until(6)
        answers.append(ear.tokens)
    assert answers[0] == answers[1] == answers[2]


async def test_a_pulse_follows_the_preemption_that_leaves_nothing_to_plan(clock: ManualClock) -> None:
    """Of 8 blocks a hand-off holds 5 of its 6, and what runs the other 3: neither could go on without the preemption,
    and who waits in allocate() has to hear of it whenever it came to wait."""
    engine = an_engine(MemoryExecutor(num_blocks=8), clock)
    scheduler, promised = engine.scheduler, RequestKey("promised")
    schedule, versions = scheduler.schedule, []

    def watched(now: float) -> StepPlan | None:
        before = scheduler.num_preemptions
        plan = schedule(now)
        if scheduler.num_preemptions > before:
            assert plan is None
            versions.append(engine.version)
        return plan

    scheduler.schedule = watched  # type: ignore[method-assign]
    scheduler.submit(a_request("runs", length=4, max_tokens=20), clock.now())
    scheduler.expect(a_request("promised", length=6 * BLOCK_SIZE, seed=2), clock.now())
    async with running(engine), asyncio.timeout(10):
        engine.changed()
        await engine.next_change()
        scheduler.incoming.claim(promised)
        assert scheduler.incoming.allocate(promised, 5) is not None
        while not versions:
            await engine.next_change()
        assert engine.version > versions[0]
        assert scheduler.incoming.allocate(promised, 1) is not None


@pytest.mark.parametrize(("stages", "num_rows", "most"), [(1, 4, 2), (2, 4, 3), (2, 1, 2), (3, 4, 4)])
async def test_one_step_ahead_of_each_stage_and_no_further(
    clock: ManualClock, stages: int, num_rows: int, most: int
) -> None:
    """What a sequence alone draws is what its next step waits for, however many stages there are."""
    executor = MemoryExecutor()
    executor.go_steps.clear()
    launched: list[int] = []
    step = executor.step

    def counted(plan: StepPlan) -> object:
        launched.append(plan.number)
        return step(plan)

    executor.step = counted  # type: ignore[method-assign, assignment]
    engine = an_engine(executor, clock, stages=stages)
    async with running(engine) as ear:
        executor.go_steps.set()
        for row in range(num_rows):
            engine.scheduler.submit(a_request(f"r{row}", length=3 + row, max_tokens=100), clock.now())
        engine.changed()
        while len(ear.tokens) < num_rows:
            await engine.next_change()
        executor.go_steps.clear()
        before = -1
        while before != len(launched):
            before = len(launched)
            for _ in range(20):
                await asyncio.sleep(0)
        assert len(launched) - engine.num_steps == most
        executor.go_steps.set()
        await ear.until(num_rows)


async def test_an_idle_engine_plans_nothing_until_something_changes(clock: ManualClock) -> None:
    engine = an_engine(MemoryExecutor(), clock)
    schedule = engine.scheduler.schedule
    num_asked = 0

    def counted(now: float) -> StepPlan | None:
        nonlocal num_asked
        num_asked += 1
        return schedule(now)

    engine.scheduler.schedule = counted  # type: ignore[method-assign]
    async with running(engine) as ear:
        for _ in range(50):
            await asyncio.sleep(0)
        assert num_asked == 1
        engine.scheduler.submit(a_request(), clock.now())
        engine.changed()
        await ear.until(1)


async def test_case_59_a_step_that_raises_ends_the_engine(clock: ManualClock) -> None:
    executor = MemoryExecutor()
    executor.step_error = RuntimeError("CUDA error")
    engine = an_engine(executor, clock)
    engine.scheduler.submit(a_request(), clock.now())
    with pytest.raises(ExceptionGroup) as caught:
        await engine.run(Ear())
    assert caught.group_contains(WorkerLost, match="CUDA error")
    executor.close()


async def test_a_lost_rank_ends_an_idle_engine(clock: ManualClock) -> None:
    executor = MemoryExecutor()
    engine = an_engine(executor, clock)
    running = asyncio.create_task(engine.run(Ear()))
    await asyncio.sleep(0)
    executor.die("rank 3 is gone")
    with pytest.raises(ExceptionGroup) as caught:
        await running
    assert caught.group_contains(WorkerLost, match="rank 3")
    executor.close()


async def test_case_59_progress_is_measured_only_while_there_is_work(clock: ManualClock) -> None:
    executor = MemoryExecutor()
    executor.go_steps.clear()
    engine = an_engine(executor, clock)
    async with running(engine) as ear:
        clock.advance(100)
        assert engine.seconds_since_progress() == 0
        engine.scheduler.submit(a_request(max_tokens=3), clock.now())
        engine.changed()
        for _ in range(10):
            await asyncio.sleep(0)
        clock.advance(7)
        assert engine.seconds_since_progress() == 7
        executor.go_steps.set()
        await ear.until(1)
        while engine.scheduler.has_work:
            await engine.next_change()
        for _ in range(10):
            await asyncio.sleep(0)
        clock.advance(7)
        assert engine.seconds_since_progress() == 0


async def test_deadlines_pass_while_the_ranks_are_stuck(clock: ManualClock) -> None:
    executor = MemoryExecutor()
    executor.go_steps.clear()
    engine = an_engine(executor, clock)
    async with running(engine) as ear:
        engine.scheduler.submit(a_request("late", seconds_left=5.0), clock.now())
        engine.changed()
        clock.advance(6)
        engine.expire(ear)
        assert ear.late == [RequestKey("late")]
        executor.go_steps.set()


async def test_a_pin_that_nobody_renews_ends(clock: ManualClock) -> None:
    engine = an_engine(MemoryExecutor(), clock)
    async with running(engine) as ear:
        engine.scheduler.ticket(a_request("t", length=9), 0, clock.now())
        engine.changed()
        while not (ear.chunks and ear.chunks[-1].last):
            ear.heard.clear()
            await ear.heard.wait()
        assert engine.scheduler.counts().pinned == 3
        clock.advance(LIMITS.pin_seconds)
        engine.expire(ear)
        assert ear.unpinned == [RequestKey("t")]
        assert engine.scheduler.counts().pinned == 0


async def test_what_others_wait_for_is_said_before_the_steps_books_are_kept(clock: ManualClock) -> None:
    engine = an_engine(MemoryExecutor(32), clock, overlap=False)
    async with running(engine) as ear:
        engine.scheduler.ticket(a_request("p", length=5), 0, clock.now(), "d")
        engine.changed()
        await ear.heard.wait()
        assert ear.order == ["chunk", "step"]
        engine.scheduler.submit(a_request("r", length=5, max_tokens=1), clock.now())
        engine.changed()
        await ear.until(1)
        assert ear.order[2:] == ["outputs", "step"]


async def test_the_fit_learns_from_steps_of_one_kind_after_warm_up(clock: ManualClock) -> None:
    engine = an_engine(MemoryExecutor(), clock)
    before = engine.cost
    async with running(engine) as ear:
        engine.scheduler.submit(a_request(max_tokens=60), clock.now())
        engine.changed()
        await ear.until(1)
    after = engine.cost
    assert after.decode_step_seconds(1, 30) < before.decode_step_seconds(1, 30) / 10
    assert after.prefill_base_seconds == before.prefill_base_seconds, "two prefill steps are warm-up"


def test_a_plans_work_is_counted_as_the_cost_model_counts_it() -> None:
    decode = RowWork(0, 10, 1, None)
    chunk = RowWork(1, 8, 4, (1, 2, 3, 4), num_samples=0)
    assert StepWork.of(StepPlan(1, (decode,), 1)) == StepWork(StepKind.DECODE, 1, 0, 0, 0.0, 11)
    assert StepWork.of(StepPlan(1, (chunk,), 0)) == StepWork(StepKind.PREFILL, 1, 1, 4, 10.0, 0)
    assert StepWork.of(StepPlan(1, (decode, chunk), 1)) == StepWork(StepKind.MIXED, 2, 1, 4, 10.0, 11)


def test_padding_is_work_that_teaches_so_that_long_prompts_are_priced_right_by_short_ones() -> None:
    truth = CostModel(1e-3, 2e-5, 1e-9, decode_base_seconds=0.0)
    told, untold = StepFit(graph_tokens=GRAPH_TOKENS), StepFit()
    for number in range(200):
        tokens, start = 20 + number * 37 % 160, number * 101 % 4000
        work = StepWork(StepKind.PREFILL, 1, 1, tokens, start + tokens / 2, 0)
        for fit in (told, untold):
            fit.add(work, work.seconds(truth, GRAPH_TOKENS))
    exact = truth.prefill_seconds(4000)
    assert told.model.prefill_seconds(4000) == pytest.approx(exact, rel=0.01)
    assert untold.model.prefill_seconds(4000) / exact > 1.05
