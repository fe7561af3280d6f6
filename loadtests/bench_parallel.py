"""Tensor and pipeline parallel ranks on GPUs of one host: the 70B shape cut to 20 layers, bf16, random weights, through the
executor as workers use it.

    python -m loadtests.bench_parallel [--out docs/benchmarks/parallel-CARD.json] [--parts tp,pp,sums]

tp2_speedup_b*   TPOT at tp 1 over TPOT at tp 2, at 1k of context; b64 likewise
tp2_nccl_*       the same with every sum through NCCL
pp2_speedup_b*   the same at pp 2, with two micro-batches; a token of every row is two steps then
pp2_one_*        with one micro-batch, which passes from stage to stage
*_prefill_tok_s  8 prompts of 1,024 tokens at once
sum_*_us         one all-reduce of so many bytes between two ranks, in a graph; peer: NCCL in a graph
sum_norm_*_us    the same with the residual added and the norm behind it; one launch of ours
half_speedup_b*  with one device alone: TPOT of the whole model over that of one rank of two, whose sums meet its own parts
rank_kill_s      from SIGKILL of rank 1 in mid-decode to the failure of all that waits, and to the end of close()
"""

import argparse
import dataclasses
import functools
import itertools
import pathlib
import random
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed import FileStore  # type: ignore[attr-defined]

from headrace.config import EngineConfig
from headrace.values import ParallelLayout, Request, RequestKey, Role, SamplingParams
from kernels.all_reduce import Meeting, buffer_bytes, make_empty
from kernels.choose import choose
from kernels.tuning import tuning_of
from loadtests.one_rank import LLAMA_8B, random_weights, scheduler_of, shape_folder
from loadtests.report import Report, Row, add_arguments
from workers.models.checkpoint import Checkpoint
from workers.models.meeting import ROOM_BYTES, DeviceMemory, SmallSums
from workers.models.parallel import RankContext, form
from workers.ranks.build import build_executor
from workers.ranks.group import RankExecutor
from workers.ranks.rank_runner import MakeRunner
from workers.ranks.runner import Runner, make_runner
from workers.scheduling.plan import StepPlan, StepResult
from workers.spec import WorkerSpec

SHAPE = {
    **LLAMA_8B,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 20,
    "num_attention_heads": 64,
}
BATCHES = (1, 64)
ENGINE = EngineConfig(
    device="cuda",
    dtype="bfloat16",
    block_size=32,
    num_blocks=3000,
    max_num_seqs=max(BATCHES),
    max_step_tokens=8192,
    max_context_tokens=2048,
)
CONTEXT, DECODES, WIDTH = 1024, 160, 8192
SETTLED = 16  # decode steps that count for nothing
SPEEDUP_MUST, SPEEDUP_AIM = 1.7, 1.85
PARTS = ("tp", "pp", "sums")
SUM_BYTES = (2**14, 2**18, 2**20, 2**22)


def nccl_runner(spec: WorkerSpec, rank: int, store: Any) -> Runner:
    """A rank whose every sum is NCCL's."""
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    context = dataclasses.replace(form(spec.layout, rank, store, device=device), small_sums=None)
    checkpoint = Checkpoint.open(spec.model_path)
    return Runner(checkpoint, spec.layout, rank, spec.engine, context, fill=random_weights)


def half_runner(spec: WorkerSpec, rank: int, store: Any) -> Runner:
    """One rank of two, whose sums meet its own parts: what a rank computes, without the trips between devices, the gathered
    logits, or a second device."""
    layout, device = ParallelLayout(2, 1), torch.device("cuda", 0)
    memory = DeviceMemory(device)
    buffer = memory.allocate(buffer_bytes(2, ROOM_BYTES))
    make_empty(buffer)
    # what goes to rank 1's buffer, into rank 0's places, comes to rank 1's places in our own
    addresses = torch.tensor([buffer.data_ptr(), buffer.data_ptr() + ROOM_BYTES], device=device)
    meeting = Meeting(0, addresses, torch.zeros(3, dtype=torch.int32, device=device), ROOM_BYTES)
    sums = SmallSums(meeting, memory, tuning_of(device).reduce)
    context = RankContext(layout, 0, device, small_sums=sums)
    return Runner(Checkpoint.open(spec.model_path), layout, 0, spec.engine, context, fill=random_weights)


RANDOM: MakeRunner = functools.partial(make_runner, fill=random_weights)


@contextmanager
def executor_of(
    layout: ParallelLayout, folder: pathlib.Path, runner: MakeRunner = RANDOM, micro_batches: int | None = None
) -> Iterator[RankExecutor]:
    engine = ENGINE.model_copy(update={"micro_batches": micro_batches})
    spec = WorkerSpec("bench", 1, Role.UNIFIED, str(folder), layout, engine)
    began = time.perf_counter()
    executor = build_executor(spec, make_runner=runner)
    print(f"  {layout} ready in {time.perf_counter() - began:.1f} s", flush=True)
    try:
        yield executor
    finally:
        began = time.perf_counter()
        executor.close()
        print(f"  closed in {time.perf_counter() - began:.2f} s", flush=True)


class Loop:
    """Scheduler and executor, one step ahead, without a service."""

    def __init__(self, executor: RankExecutor, num_micro_batches: int) -> None:
        self._executor = executor
        self._draw = random.Random(0)
        self._number = 0
        self._flights: deque[tuple[StepPlan, Future[StepResult]]] = deque()
        self._scheduler = scheduler_of(ENGINE, SHAPE["vocab_size"], num_micro_batches=num_micro_batches)

    def submit(self, num_requests: int, num_tokens: int, num_outputs: int) -> None:
        for _ in range(num_requests):
            self._number += 1
            key = RequestKey(f"r{self._number}")
            prompt = tuple(self._draw.randrange(1000, SHAPE["vocab_size"] // 2) for _ in range(num_tokens))
            sampling = SamplingParams(max_tokens=num_outputs, temperature=0.0, ignore_eos=True)
            self._scheduler.submit(Request(key, prompt, sampling, cache_salt=key.request_id), 0.0)

    def steps(self) -> Iterator[tuple[StepPlan, float]]:
        """Until nothing is left: each step, and when its result came."""
        most = self._scheduler.limits.plans_in_flight
        while True:
            while len(self._flights) < most and (plan := self._scheduler.schedule(0.0)) is not None:
                self._flights.append((plan, self._executor.step(plan)))
            if not self._flights:
                break
            plan, future = self._flights.popleft()
            result = future.result(60)
            yield plan, time.perf_counter()
            self._scheduler.apply(result, 0.0)
        self._scheduler.reset_cache()
        self._scheduler.ledger.drain_events()

    def tpot(self, batch: int) -> list[float]:
        """Milliseconds between a step's result and that of the same rows' next one, where all of `batch` rows decode."""
        self.submit(batch, CONTEXT, DECODES)
        steps = [(plan.num_turns, at) for plan, at in self.steps() if plan.num_decodes == len(plan.work)]
        turns = statistics.mode(turns for turns, _ in steps)
        times = [at for _, at in steps[SETTLED * turns : (DECODES - SETTLED) * turns]]
        return [(after - before) * 1e3 for before, after in zip(times, times[turns:], strict=False)]

    def prefill_seconds(self, num_requests: int, num_tokens: int) -> float:
        self.submit(num_requests, num_tokens, 1)
        began = time.perf_counter()
        for _ in self.steps():
            pass
        return time.perf_counter() - began


def decode_all(executor: RankExecutor, report: Report, name: str, micro_batches: int = 1) -> dict[int, list[float]]:
    loop = Loop(executor, micro_batches)
    for batch in BATCHES:
        loop.submit(batch, 32, 4)
        for _ in loop.steps():
            pass
    found = {}
    for batch in BATCHES:
        found[batch] = loop.tpot(batch)
        print(f"  {executor.layout} batch {batch}: TPOT {statistics.median(found[batch]):.3f} ms", flush=True)
    seconds = min(loop.prefill_seconds(8, 1024) for _ in range(2))
    report.add(Row(f"{name}_prefill_tok_s", 8 * 1024 / seconds, "tok/s", "higher"))
    return found


def killed_seconds(executor: RankExecutor) -> tuple[float, float]:
    """From SIGKILL of rank 1 in mid-decode: to the failure of what waits, and from there to the end of close()."""
    loop = Loop(executor, 1)
    loop.submit(8, CONTEXT, 900)
    steps = loop.steps()
    for _ in range(20):
        next(steps)
    executor._children[0].kill()
    began = time.perf_counter()
    try:
        for _ in steps:
            pass
    except Exception as error:
        print(f"  {type(error).__name__}: {error}", flush=True)
    failed = time.perf_counter()
    executor.close()
    return failed - began, time.perf_counter() - failed


def sum_times(rank: int, folder: str, queue: Any) -> None:
    """Microseconds of one sum in a graph of 64, ours and NCCL's, by size, and of one with residual and norm behind it."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    store = FileStore(f"{folder}/sums", 2)
    context = form(ParallelLayout(2, 1), rank, store, device=device)
    ops, weight = choose(device), torch.ones(WIDTH, dtype=torch.bfloat16, device=device)
    found: dict[str, list[float]] = {}
    graphs = []
    for name, where in (("ours", context), ("nccl", dataclasses.replace(context, small_sums=None))):
        for num_bytes, normed in itertools.product(SUM_BYTES, (False, True)):
            x = torch.randn(num_bytes // 2 // WIDTH, WIDTH, device=device).to(torch.bfloat16)

            def once(where: RankContext = where, x: Tensor = x, normed: bool = normed) -> None:
                if normed:
                    where.add_rms_norm(ops, x, x, weight, 1e-5)
                else:
                    where.all_reduce(x)

            once()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                for _ in range(64):
                    once()
            graphs.append(graph)
            samples = []
            for _ in range(6):
                graph.replay()
                torch.cuda.synchronize()
                began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                began.record()
                for _ in range(5):
                    graph.replay()
                ended.record()
                torch.cuda.synchronize()
                samples.append(began.elapsed_time(ended) * 1e3 / 320)
            found[f"{name} {num_bytes} {normed}"] = samples[1:]
    for graph in graphs:
        graph.reset()
    context.close()
    queue.put((rank, found))


def sums() -> dict[str, list[float]]:
    spawn = torch.multiprocessing.get_context("spawn")
    queue = spawn.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [spawn.Process(target=sum_times, args=(rank, folder, queue)) for rank in range(2)]
        for rank in ranks:
            rank.start()
        found = dict(queue.get(timeout=120) for _ in ranks)
        for rank in ranks:
            rank.join()
    return dict(found[0])


def sum_rows(report: Report) -> None:
    times = sums()
    for num_bytes, normed in itertools.product(SUM_BYTES, (False, True)):
        samples, peers = (times[f"{name} {num_bytes} {normed}"] for name in ("ours", "nccl"))
        value, peer = statistics.median(samples), statistics.median(peers)
        name = f"sum{'_norm' if normed else ''}_{num_bytes // 1024}kib_us"
        report.add(Row(name, value, "us", "lower", None, None, samples, peer, "NCCL", peer / value))


def one_device(report: Report, folder: pathlib.Path, arguments: argparse.Namespace) -> int:
    """Without a second device: how much sooner one rank of two is done, which no two ranks can be ahead of."""
    with executor_of(ParallelLayout(), folder) as executor:
        alone = decode_all(executor, report, "tp1")
    with executor_of(ParallelLayout(), folder, half_runner) as executor:
        half = decode_all(executor, report, "half")
    for batch in BATCHES:
        one, other = statistics.median(alone[batch]), statistics.median(half[batch])
        note = f"TPOT {one:.3f} ms whole, {other:.3f} ms half, sums with itself included"
        report.add(Row(f"half_speedup_b{batch}", one / other, "ratio", "higher", samples=half[batch], note=note))
    return report.close(arguments)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--layers", type=int, default=20, help="fewer than 20 only to try the bench itself")
    parser.add_argument("--parts", default=",".join(PARTS), help="of " + ", ".join(PARTS))
    add_arguments(parser)
    arguments = parser.parse_args()
    parts = arguments.parts.split(",")
    from loadtests.bench_parallel import nccl_runner  # by a name that the other ranks know

    card = torch.cuda.get_device_properties(0)
    report = Report(
        "parallel",
        ("torch", "triton"),
        hardware=f"{torch.cuda.device_count()} × {card.name}, {card.total_memory / 2**30:.0f} GiB",
    )
    folder = shape_folder({**SHAPE, "num_hidden_layers": arguments.layers})

    if torch.cuda.device_count() == 1:
        return one_device(report, folder, arguments)
    alone: dict[int, list[float]] = {}

    def compare(name: str, found: dict[int, list[float]], must: float | None, aim: float | None) -> None:
        for batch, samples in found.items():
            one, other = statistics.median(alone[batch]), statistics.median(samples)
            note = f"TPOT {one:.3f} ms at one rank, {other:.3f} ms"
            row = Row(f"{name}_speedup_b{batch}", one / other, "ratio", "higher", must, aim, samples, note=note)
            report.add(row)

    with executor_of(ParallelLayout(), folder) as executor:
        alone = decode_all(executor, report, "tp1")
    for batch, samples in alone.items():
        report.add(Row(f"tp1_tpot_b{batch}_ms", statistics.median(samples), "ms", "lower", samples=samples))
    if "sums" in parts:
        sum_rows(report)
    if "tp" in parts:
        with executor_of(ParallelLayout(2, 1), folder) as executor:
            compare("tp2", decode_all(executor, report, "tp2"), SPEEDUP_MUST, SPEEDUP_AIM)
            failed, closed = killed_seconds(executor)
        report.add(Row("rank_kill_s", failed, "s", "lower", must=5.0, note=f"close() after it: {closed:.2f} s"))
        with executor_of(ParallelLayout(2, 1), folder, nccl_runner) as executor:
            compare("tp2_nccl", decode_all(executor, report, "tp2_nccl"), None, None)
    for name, micro_batches in (("pp2_one", 1), ("pp2", 2)) if "pp" in parts else ():
        with executor_of(ParallelLayout(1, 2), folder, micro_batches=micro_batches) as executor:
            compare(name, decode_all(executor, report, name, micro_batches), None, None)
    return report.close(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
