"""The contract of workers.executor.Executor, on plain rank processes."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from headrace.config import EngineConfig, HandoffConfig
from headrace.errors import CheckpointError, IncompatiblePeer, LinkClosed, StaleBlocks, WorkerLost
from headrace.values import ParallelLayout, Role, SamplingParams
from tests.contract.toy_runner import NUM_BLOCKS, SHAPE, Toy
from workers.executor import PeerRanks
from workers.layout import ModelShape
from workers.links.base import BlockPull
from workers.plan import RowStart, RowWork, StepPlan
from workers.ranks import RankExecutor, RankLimits, build_executor, listen

pytestmark = pytest.mark.torch

BLOCK_SIZE = 8
LAYOUTS = [ParallelLayout(1, 1), ParallelLayout(2, 1), ParallelLayout(1, 2), ParallelLayout(2, 2)]
QUICK = RankLimits(start_seconds=60, step_seconds=60, silent_seconds=30, close_seconds=5)


def spec_of(layout: ParallelLayout) -> "WorkerSpec":
    from workers.spec import WorkerSpec

    engine = EngineConfig(block_size=BLOCK_SIZE)
    return WorkerSpec("w", 1, Role.UNIFIED, "toy", layout, engine, HandoffConfig(transfer_seconds=10.0))


def peer_of(executor: RankExecutor, generation: int = 1) -> PeerRanks:
    return PeerRanks(f"peer-{executor.layout}", generation, executor.layout, executor.endpoints)


def plan_of(number: int, row: int, tokens: range, blocks: tuple[int, ...], epoch: int = 1) -> StepPlan:
    """A new row that computes its whole prompt into `blocks`."""
    sampling = SamplingParams(max_tokens=1)
    return StepPlan(
        number,
        (RowWork(row, 0, len(tokens), tuple(tokens), blocks),),
        0,
        starts=(RowStart(row, tuple(tokens), (), sampling),),
        fresh=tuple((block, epoch) for block in blocks),
    )


@pytest.fixture(scope="module")
def executors() -> Iterator[dict[ParallelLayout, list[RankExecutor]]]:
    """Two of each layout, kept for the whole module."""
    with contextlib.ExitStack() as stack:
        made: dict[ParallelLayout, list[RankExecutor]] = {}
        for layout in LAYOUTS:
            made[layout] = [build_executor(spec_of(layout), make_runner=Toy(), limits=QUICK) for _ in range(2)]
            for executor in made[layout]:
                stack.callback(executor.close)
        yield made


@pytest.fixture
def numbers() -> Iterator[int]:
    return iter(range(1000))


def wait_gone(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 0)
            raise AssertionError(f"process {pid} is still there")


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_says_what_it_is(executors: dict[ParallelLayout, list[RankExecutor]], layout: ParallelLayout) -> None:
    executor = executors[layout][0]
    assert executor.layout == layout
    assert executor.shape == SHAPE
    assert executor.num_blocks == NUM_BLOCKS
    assert executor.block_bytes == SHAPE.num_layers * SHAPE.num_kv_heads * 2 * BLOCK_SIZE * SHAPE.head_dim * 4
    assert len(executor.endpoints) == layout.world_size
    assert not executor.failed.done()
