"""What micro-batches leave idle of a pipeline: the production scheduler over stages under virtual time.

    python -m loadtests.bench_bubble [--out FILE]

ppN_*_speedup   tokens a second over N stages ÷ those of one rank; peer: with one micro-batch, every row in every plan
ppN_*_idle      fraction of the stages' time in which they have nothing to compute

A stage takes its share of what a step costs one rank (the 70B shape cut to 20 layers on an H200, from bench_parallel). It
begins a plan when the stage before it is done with it, and the first one when the plan is given to it and what its rows
drew last is there. Handing on and planning take no time.
"""

import argparse
import itertools
from collections import deque
from dataclasses import dataclass

from headrace.blocks import BlockHasher
from headrace.costmodel import CostModel
from headrace.values import Request, RequestKey, SamplingParams
from loadtests.report import Report, Row, add_arguments
from workers.scheduling.blocks import BlockLedger
from workers.scheduling.plan import StepPlan, StepResult
from workers.scheduling.scheduler import Scheduler, SchedulerLimits
from workers.scheduling.work import StepWork

COST = CostModel(
    prefill_base_seconds=1e-2,
    prefill_token_seconds=5.3e-5,
    prefill_token_context_seconds=2e-10,
    decode_base_seconds=9.83e-3,
    decode_sequence_seconds=3e-6,
    decode_context_token_seconds=2.1e-8,
)
BLOCK_SIZE, STEP_TOKENS = 32, 8192


@dataclass(frozen=True, slots=True)
class Load:
    """So many requests at once, each of a prompt of so many tokens, answered by so many."""

    name: str
    num_requests: int
    num_tokens: int
    num_outputs: int


LOADS = (
    Load("decode_b1", 1, 1024, 400),
    Load("decode_b64", 64, 1024, 400),
    Load("decode_b256", 256, 1024, 400),
    Load("prefill_8x1k", 8, 1024, 1),
    Load("prefill_2k", 1, 2048, 1),
    Load("prefill_4k", 1, 4096, 1),
    Load("prefill_32k", 1, 32768, 1),
    Load("mixed", 256, 600, 200),
)


class Stages:
    """When each is free, and when what a row drew last is drawn."""

    def __init__(self, num_stages: int) -> None:
        self.busy_seconds = 0.0
        self._free_at = [0.0] * num_stages
        self._drawn_at: dict[int, float] = {}

    def launch(self, plan: StepPlan, now: float) -> float:
        """When its result is there."""
        seconds = StepWork.of(plan).seconds(COST) / len(self._free_at)
        at = max([now, *(self._drawn_at[item.row] for item in plan.work if item.token_ids is None)])
        for stage, free_at in enumerate(self._free_at):
            at = self._free_at[stage] = max(at, free_at) + seconds
            self.busy_seconds += seconds
        self._drawn_at.update((item.row, at) for item in plan.work if item.num_samples)
        return at


def run(load: Load, num_stages: int, num_micro_batches: int) -> tuple[float, float]:
    """(tokens a second, idle fraction): of outputs, or of prompts where they are all there is. Decodes count once all
    prompts are computed."""
    scheduler = Scheduler(
        SchedulerLimits(512, STEP_TOKENS, 40_000, 1000, 10.0, num_micro_batches=num_micro_batches),
        BlockLedger(load.num_requests * (load.num_tokens + load.num_outputs + BLOCK_SIZE) // BLOCK_SIZE, BLOCK_SIZE),
        lambda adapter, salt: BlockHasher(revision="r", kv_format="f", block_size=BLOCK_SIZE, cache_salt=salt),
    )
    sampling = SamplingParams(max_tokens=load.num_outputs, ignore_eos=True)
    for number in range(load.num_requests):
        key = RequestKey(f"r{number}")
        scheduler.submit(Request(key, (7,) * load.num_tokens, sampling, cache_salt=key.request_id), 0.0)
    stages, flights = Stages(num_stages), deque[tuple[StepPlan, float]]()
    counts_prompts = load.num_outputs == 1
    began, busy, now, num_tokens = 0.0, 0.0, 0.0, 0
    while True:
        while len(flights) < scheduler.limits.plans_in_flight and (plan := scheduler.schedule(now)) is not None:
            flights.append((plan, stages.launch(plan, now)))
        if not flights:
            break
        plan, now = flights.popleft()
        drawn = (7,) * sum(item.num_samples for item in plan.work)
        scheduler.apply(StepResult(plan.number, drawn), now)
        if load.name.startswith("decode") and plan.num_decodes < len(plan.work):
            began, busy, num_tokens = now, stages.busy_seconds, 0
        num_tokens += plan.num_tokens if counts_prompts else len(drawn)
    return num_tokens / (now - began), 1 - (stages.busy_seconds - busy) / num_stages / (now - began)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add_arguments(parser)
    arguments = parser.parse_args()
    report = Report("bubble")
    for load, num_stages in itertools.product(LOADS, (2, 4)):
        one, _ = run(load, 1, 1)
        (rate, idle), (peer, _) = run(load, num_stages, num_stages), run(load, num_stages, 1)
        name = f"pp{num_stages}_{load.name}"
        ratio = rate / peer
        report.add(
            Row(f"{name}_speedup", rate / one, "ratio", "higher", None, None, [], peer / one, "one micro-batch", ratio)
        )
        report.add(Row(f"{name}_idle", idle, "fraction", "lower"))
    return report.close(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
