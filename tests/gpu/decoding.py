"""Ranks on CUDA devices that decode for as long as they are told."""

import pathlib

from headrace.config import EngineConfig
from headrace.values import ParallelLayout, Role, SamplingParams
from tests.model_steps import random_ids
from workers.ranks.build import build_executor
from workers.ranks.group import RankExecutor, RankLimits
from workers.scheduling.plan import RowStart, RowWork, StepPlan
from workers.spec import WorkerSpec

ENGINE = {"num_blocks": 64, "block_size": 16, "max_num_seqs": 8, "max_step_tokens": 256}
ON_GPU = EngineConfig.model_validate({**ENGINE, "device": "cuda", "dtype": "bfloat16"})


def executor_of(layout: ParallelLayout, folder: pathlib.Path) -> RankExecutor:
    spec = WorkerSpec(f"worker-{layout}", 1, Role.UNIFIED, str(folder), layout, ON_GPU)
    return build_executor(spec, limits=RankLimits(start_seconds=120, close_seconds=8))


def begin(executor: RankExecutor, num_rows: int = 4) -> list[int]:
    """Rows with a prompt of 20 tokens each; their first tokens."""
    sampling = SamplingParams(max_tokens=1000, temperature=0.0, ignore_eos=True)
    ids = [tuple(random_ids(20, row)) for row in range(num_rows)]
    work = tuple(RowWork(row, 0, 20, ids[row], (2 * row, 2 * row + 1)) for row in range(num_rows))
    starts = tuple(RowStart(row, ids[row], (), sampling) for row in range(num_rows))
    return list(executor.step(StepPlan(1, work, 0, starts=starts)).result(60).token_ids)


def decode(number: int, num_rows: int = 4) -> StepPlan:
    """Every row again at its last but one position: it may go on for ever."""
    return StepPlan(number, tuple(RowWork(row, 20 + number % 11, 1, None) for row in range(num_rows)), num_rows)
