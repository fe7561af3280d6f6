"""What the engine costs beside the model: the scheduler, the ledger and the outputs of a step, with no model at all.

    python -m loadtests.bench_engine [--trace FILE] [--gate] [--out docs/benchmarks/engine-cpu.json]

decode_bookkeeping_256_ms   schedule, bookkeeping and outputs of a step of 256 decoding sequences, one step ahead
admit_8x2048_ms             a step that admits 8 prompts of 2,048 tokens, half of each cached: intake, look-up, plan, result
growth_bytes                tracemalloc's net growth over a million tokens of requests that come and go
kv_waste_fraction           slots held and not filled ÷ slots held, time-weighted over a trace in virtual time, 1P1D
"""

import argparse
import gc
import itertools
import pathlib
import statistics
import time
import tracemalloc
from collections.abc import Iterator

from headrace import traces
from headrace.blocks import BlockHasher
from headrace.costmodel import CostModel
from headrace.values import Request, RequestKey, SamplingParams
from loadtests.report import Report, Row, add_arguments
from loadtests.virtual_pair import VirtualPair
from workers.scheduling.blocks import BlockLedger
from workers.scheduling.plan import StepPlan, StepResult
from workers.scheduling.scheduler import Scheduler, SchedulerLimits
from workers.virtual.engine import Machine

BLOCK_SIZE = 32
VOCAB_SIZE = 32_000
MAX_CONTEXT_TOKENS = 16_384
SAMPLE_TRACE = pathlib.Path(__file__).resolve().parent.parent / "examples" / "azure_sample.csv"

# An 8B model in bfloat16 on one 80 GB GPU, from public measurements: what makes the trace a live load, not an overload.
EIGHT_B_COST = CostModel(
    prefill_base_seconds=4e-3,
    prefill_token_seconds=2.25e-5,
    prefill_token_context_seconds=8e-10,
    decode_base_seconds=6.5e-3,
    decode_sequence_seconds=5e-6,
    decode_context_token_seconds=5.7e-8,
    transfer_base_seconds=5e-4,
    transfer_bytes_per_second=2e11,
)
EIGHT_B_BLOCK_BYTES = 4 * 2**20
EIGHT_B_BLOCKS = 13_000


class NullEngine:
    """A scheduler whose plans are answered at once, one step ahead: every token drawn is 7."""

    def __init__(self, *, num_blocks: int, max_num_seqs: int, max_step_tokens: int) -> None:
        self.ledger = BlockLedger(num_blocks, BLOCK_SIZE)
        self.scheduler = Scheduler(
            SchedulerLimits(max_num_seqs, max_step_tokens, MAX_CONTEXT_TOKENS, 100_000, 10.0),
            self.ledger,
            lambda adapter, salt: BlockHasher(
                revision="r", kv_format="f", block_size=BLOCK_SIZE, adapter=adapter, cache_salt=salt
            ),
            eos_token_ids=(2,),
            vocab_size=VOCAB_SIZE,
        )
        self._waiting: StepResult | None = None

    def step(self) -> int | None:
        """Makes a plan and takes the result of the one before; how many tokens came, None when all is done."""
        plan = self.scheduler.schedule(0.0)
        before, self._waiting = self._waiting, None if plan is None else answer(plan)
        if before is None:
            return None if plan is None else 0
        return len(self.scheduler.apply(before, 0.0).outputs)

    def drain(self) -> int:
        num_tokens = 0
        while (num_new := self.step()) is not None:
            num_tokens += num_new
        self.ledger.drain_events()
        return num_tokens


def answer(plan: StepPlan) -> StepResult:
    return StepResult(plan.number, (7,) * sum(work.num_samples for work in plan.work))


def prompt(number: int, num_tokens: int, shared: int = 0) -> tuple[int, ...]:
    """Tokens that share their first `shared` with all others, and nothing else."""
    return tuple(
        3 + (at if at < shared else number * 7919 + at * (1 + number % 13)) % (VOCAB_SIZE - 3)
        for at in range(num_tokens)
    )


def decode_seconds(num_sequences: int = 256, num_steps: int = 300) -> list[float]:
    """Seconds of each step in which `num_sequences` sequences decode, plan and result of the step before together."""
    engine = NullEngine(num_blocks=4096, max_num_seqs=num_sequences, max_step_tokens=8192)
    for number in range(num_sequences):
        engine.scheduler.submit(
            Request(RequestKey(f"r{number}"), prompt(number, 64), SamplingParams(max_tokens=num_steps + 50)), 0.0
        )
    scheduler = engine.scheduler
    seconds: list[float] = []
    waiting: StepResult | None = None
    while len(seconds) < num_steps:
        started = time.perf_counter()
        plan = scheduler.schedule(0.0)
        planned = time.perf_counter()
        assert plan is not None
        result = answer(plan)
        applying = time.perf_counter()
        num_outputs = len(scheduler.apply(waiting, 0.0).outputs) if waiting else 0
        done = time.perf_counter()
        waiting = result
        if plan.num_decodes == num_outputs == num_sequences:
            seconds.append(done - applying + planned - started)
    return seconds


def admit_seconds(repeats: int, num_prompts: int = 8, num_tokens: int = 2048) -> list[float]:
    """Seconds to take in, look up, plan and apply `num_prompts` prompts whose first half is cached, in one step."""
    engine = NullEngine(num_blocks=4096, max_num_seqs=256, max_step_tokens=num_prompts * num_tokens)
    numbers = itertools.count()
    seconds = []
    for _ in range(repeats + 1):
        requests = [
            Request(RequestKey(f"r{number}"), prompt(number, num_tokens, num_tokens // 2), SamplingParams(max_tokens=1))
            for number in itertools.islice(numbers, num_prompts)
        ]
        started = time.perf_counter()
        for request in requests:
            engine.scheduler.submit(request, 0.0)
        plan = engine.scheduler.schedule(0.0)
        planned = time.perf_counter()
        assert plan is not None
        assert len(plan.work) == num_prompts
        result = answer(plan)
        applying = time.perf_counter()
        engine.scheduler.apply(result, 0.0)
        seconds.append(time.perf_counter() - applying + planned - started)
        engine.ledger.drain_events()
    return seconds[1:]


def growth_bytes(num_warm_up: int, num_tokens: int) -> int:
    """What is allocated more, with nothing running, after `num_tokens` tokens of requests that came and went."""
    engine = NullEngine(num_blocks=1024, max_num_seqs=64, max_step_tokens=2048)
    numbers = itertools.count()

    def serve(num_wanted: int) -> None:
        num_served = 0
        while num_served < num_wanted:
            for number in itertools.islice(numbers, 128):
                sampling = SamplingParams(max_tokens=20 + number % 60, seed=number)
                engine.scheduler.submit(
                    Request(
                        RequestKey(f"r{number}"), prompt(number, 30 + number % 200, 64), sampling, n=1 + number % 2
                    ),
                    0.0,
                )
                if number % 16 == 0:
                    engine.step()
                    engine.scheduler.cancel(RequestKey(f"r{number - number % 5}"), 0.0)
            num_served += engine.drain()
        gc.collect()

    tracemalloc.start()
    try:
        serve(num_warm_up)
        before, _ = tracemalloc.get_traced_memory()
        serve(num_tokens)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return after - before


def replay(path: pathlib.Path) -> tuple[VirtualPair, int, int]:
    """The trace on one prefill and one decode worker in virtual time: (the pair, requests served, requests too long)."""
    rows, num_removed = traces.within(traces.read(path), MAX_CONTEXT_TOKENS)
    limits = SchedulerLimits(256, 2048, MAX_CONTEXT_TOKENS, 100_000, 10.0)
    pair = VirtualPair(Machine(limits, EIGHT_B_BLOCKS, BLOCK_SIZE, EIGHT_B_BLOCK_BYTES, EIGHT_B_COST))
    pair.run(arrivals(rows))
    return pair, len(rows), num_removed


def arrivals(rows: list[traces.TraceRow]) -> Iterator[tuple[float, Request]]:
    prompts = traces.Prompts(VOCAB_SIZE)
    for row in rows:
        sampling = SamplingParams(max_tokens=MAX_CONTEXT_TOKENS - row.input_tokens, seed=row.output_tokens)
        yield row.seconds, Request(RequestKey(f"r{row.number}"), prompts.of(row), sampling)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--trace", type=pathlib.Path, default=SAMPLE_TRACE, help="Azure .csv or Mooncake .jsonl")
    parser.add_argument("--runs", type=int, default=7, help="runs of the timed rows, whose median counts")
    add_arguments(parser)
    arguments = parser.parse_args()
    report = Report("engine")

    steps = [statistics.median(decode_seconds()) * 1e3 for _ in range(arguments.runs)]
    report.add(
        Row("decode_bookkeeping_256_ms", statistics.median(steps), "ms", "lower", must=1.0, aim=0.5, samples=steps)
    )
    admits = [statistics.median(admit_seconds(5)) * 1e3 for _ in range(arguments.runs)]
    report.add(Row("admit_8x2048_ms", statistics.median(admits), "ms", "lower", must=10.0, samples=admits))
    grown = growth_bytes(100_000, 1_000_000)
    report.add(Row("growth_bytes", grown, "bytes", "lower", must=64 * 1024))

    started = time.perf_counter()
    pair, num_rows, num_removed = replay(arguments.trace)
    note = (
        f"{arguments.trace.name}: {num_rows} requests, {num_removed} too long, {pair.num_tokens} tokens, "
        f"{pair.prefill.engine.num_steps} + {pair.decode.engine.num_steps} steps in {time.perf_counter() - started:.0f} s, "
        f"at most {pair.usage.peak_held_fraction:.1%} of a pool held"
    )
    print(f"  {note}")
    usage = pair.usage
    report.add(Row("kv_waste_fraction", usage.waste_fraction, "fraction", "lower", must=0.025, aim=0.011, note=note))
    report.add(Row("kv_waste_floor_fraction", usage.floor_fraction, "fraction", "lower", note="whole blocks alone"))
    return report.close(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
