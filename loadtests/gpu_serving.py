"""What serving makes of a GPU, beside raw speed: rows of loadtests.bench_gpu.

idle_fraction          of the time of decode steps, Qwen3-0.6B shape, batch 64 (prompts of 200 to 312 tokens), through
                       Engine and RankExecutor: the part that the device does not need. What it needs: the same plans,
                       launched behind a sleeping device and so without a gap
continuous_vs_static   output tok/s of 8 rows that are refilled at once, over those of 8 rows that wait for the last of
                       them: of every eight jobs seven of 50 tokens and one of 500
prefix_cache_speedup   total time of ten questions of 32 tokens on one document of 8,128, one after the other, one token
                       each: prefix cache off over on
"""

import asyncio
import random
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from headrace.clock import SystemClock
from headrace.config import EngineConfig
from headrace.values import ParallelLayout, Request, RequestKey, Role, SamplingParams, SequenceOutput
from loadtests.one_rank import QWEN3_0_6B, OneRank, awaited, random_weights, scheduler_of, shape_folder
from loadtests.report import Row
from workers.engine import Engine
from workers.models.checkpoint import Checkpoint
from workers.models.parallel import Store, form
from workers.ranks.build import build_executor
from workers.ranks.group import RankExecutor
from workers.ranks.rank import keep_for_good
from workers.ranks.rank_runner import Launched
from workers.ranks.runner import Runner
from workers.scheduling.plan import StepPlan
from workers.scheduling.scheduler import ChunkDone, StepEvents
from workers.scheduling.work import StepWork
from workers.spec import WorkerSpec

SLOTS, SHORT, LONG, ROUNDS = 8, 50, 500, 8
DOCUMENT, QUESTION, NUM_QUESTIONS = 8128, 32, 10
IDLE_ROWS, IDLE_PROMPTS, IDLE_STEPS = 64, (200, 312), 100
SLEEP_CYCLES = 600_000_000  # 0.3 s of a device's clock: longer than the launches behind it take


def prompts(count: int, length: int, draw: random.Random) -> list[list[int]]:
    return [[draw.randrange(1000, 120_000) for _ in range(length)] for _ in range(count)]


def continuous_vs_static(engine: OneRank, draw: random.Random) -> Row:
    jobs = [LONG, *[SHORT] * (SLOTS - 1)]
    inputs = prompts(SLOTS * ROUNDS, 32, draw)
    engine.begin(SLOTS)
    engine.serve(inputs[:SLOTS], [4] * SLOTS)
    static = [sum(jobs) / engine.seconds(inputs[:SLOTS], jobs) for _ in range(2)]
    marks: list[tuple[float, int, bool]] = []  # when, output tokens of the step, whether all slots worked

    def mark(plan: StepPlan, events: StepEvents) -> None:
        marks.append((time.perf_counter(), len(events.outputs), len(plan.work) == SLOTS))

    engine.serve(inputs, jobs * ROUNDS, on_step=mark)
    last = max(at for at, (_, _, full) in enumerate(marks) if full)
    rate = sum(tokens for _, tokens, _ in marks[1 : last + 1]) / (marks[last][0] - marks[0][0])
    note = f"{rate:.0f} over {max(static):.0f} tok/s, while no slot is empty"
    engine.begin()
    return Row("continuous_vs_static", rate / max(static), "ratio", "higher", 4, 4.6, samples=static, note=note)


def prefix_cache_speedup(engine: OneRank, draw: random.Random) -> Row:
    (document,) = prompts(1, DOCUMENT, draw)

    def total(salt: str | None) -> tuple[float, list[float]]:
        asked = [[*document, *question] for question in prompts(NUM_QUESTIONS, QUESTION, draw)]
        engine.begin()
        began = time.perf_counter()
        each = [engine.seconds([prompt], [1], salt=salt) for prompt in asked]
        return time.perf_counter() - began, each

    total("first")
    off, _ = total(None)
    on, each = total("shared")
    engine.begin()
    note = f"{off:.3f} s over {on:.3f} s; a question on the cached document {min(each) * 1e3:.1f} ms"
    return Row("prefix_cache_speedup", off / on, "ratio", "higher", 6, 7, samples=each, note=note)


class _Recording(Runner):
    """Keeps the plans that it carries out."""

    plans: list[StepPlan]

    def launch(self, plan: StepPlan) -> Launched:
        self.plans.append(plan)
        return super().launch(plan)


@dataclass
class _Watch:
    """A listener that notes when each step was applied, and when all requests are over."""

    num_requests: int
    stamps: list[float] = field(default_factory=list)
    over: asyncio.Event = field(default_factory=asyncio.Event)

    def on_step(self, work: StepWork, seconds: float) -> None:
        self.stamps.append(time.perf_counter())

    def on_outputs(self, outputs: list[SequenceOutput]) -> None:
        self.num_requests -= sum(output.finish is not None for output in outputs)
        if not self.num_requests:
            self.over.set()

    def on_chunk(self, chunk: ChunkDone) -> None:
        raise AssertionError("there are no tickets")

    def on_deadline(self, key: RequestKey) -> None:
        raise AssertionError("there are no deadlines")

    def on_pin_ended(self, key: RequestKey) -> None:
        raise AssertionError("there are no pins")


def idle_fraction(draw: random.Random) -> Row:
    engine = EngineConfig(
        device="cuda",
        dtype="bfloat16",
        num_blocks=2000,
        max_num_seqs=IDLE_ROWS,
        max_step_tokens=8192,
        max_context_tokens=4096,
    )
    made: list[_Recording] = []

    def make(spec: WorkerSpec, rank: int, store: Store) -> Runner:
        device = torch.device("cuda", 0)
        torch.cuda.set_device(device)
        context = form(ParallelLayout(), 0, None, device=device)
        checkpoint = Checkpoint.open(spec.model_path)
        runner = _Recording(checkpoint, ParallelLayout(), 0, engine, context, fill=random_weights)
        runner.plans = []
        made.append(runner)
        return runner

    spec = WorkerSpec("bench", 1, Role.UNIFIED, str(shape_folder(QWEN3_0_6B)), engine=engine)
    executor = build_executor(spec, make_runner=make)
    keep_for_good()
    try:
        stamps = asyncio.run(_serve(executor, engine, draw))
        (runner,) = made
        plans = [plan for plan in runner.plans if plan.number > 0]
        full = [at for at, plan in enumerate(plans) if plan.num_decodes == len(plan.work) == IDLE_ROWS]
        first, last = full[20], full[20] + IDLE_STEPS
        step = (stamps[last] - stamps[first]) / IDLE_STEPS
        busy = _busy_seconds(runner, plans[: first + 1], plans[first + 1 : last + 1])
    finally:
        executor.close()
    each = [(end - begin) * 1e3 for begin, end in pairwise(stamps[first : last + 1])]
    note = f"step {step * 1e3:.3f} ms, of which the device needs {busy * 1e3:.3f}"
    return Row("idle_fraction", max(0.0, 1 - busy / step), "fraction", "lower", 0.05, 0.02, samples=each, note=note)


async def _serve(executor: RankExecutor, config: EngineConfig, draw: random.Random) -> list[float]:
    """Many requests through an Engine; when each step was applied."""
    scheduler = scheduler_of(config, int(QWEN3_0_6B["vocab_size"]))
    engine, watch = Engine(scheduler, executor, SystemClock()), _Watch(IDLE_ROWS)
    sampling = SamplingParams(max_tokens=IDLE_STEPS + 100, temperature=0.0, ignore_eos=True)
    running: asyncio.Task[Any] = asyncio.create_task(engine.run(watch))
    for number in range(IDLE_ROWS):
        key, (prompt,) = RequestKey(f"i{number}"), prompts(1, draw.randint(*IDLE_PROMPTS), draw)
        scheduler.submit(Request(key, tuple(prompt), sampling, cache_salt=key.request_id), 0.0)
    engine.changed()
    over = asyncio.create_task(watch.over.wait())
    await asyncio.wait((over, running), return_when=asyncio.FIRST_COMPLETED)
    if running.done():
        running.result()
    running.cancel()
    await asyncio.wait((running,))
    return watch.stamps


def _busy_seconds(runner: Runner, before: list[StepPlan], timed: list[StepPlan]) -> float:
    """Of a step, on the device: all are launched while it sleeps."""
    with torch.cuda.device(0):
        for plan in before:
            awaited(runner.launch(plan))
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        torch.cuda._sleep(SLEEP_CYCLES)
        marks[0].record()
        launched = [runner.launch(plan) for plan in timed]
        marks[1].record()
        for each in launched:
            awaited(each)
        torch.cuda.synchronize()
    return float(marks[0].elapsed_time(marks[1])) / 1e3 / len(timed)
