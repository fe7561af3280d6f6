"""Executors over plain rank processes that compute a toy, and the numbers that a scheduler would give out."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from headrace.config import EngineConfig, HandoffConfig
from headrace.values import ParallelLayout, Role, SamplingParams
from tests.contract.toy_runner import Toy
from workers.kv.links.base import PeerRanks
from workers.ranks.build import build_executor
from workers.ranks.group import RankExecutor, RankLimits
from workers.scheduling.plan import RowStart, RowWork, StepPlan
from workers.spec import WorkerSpec

BLOCK_SIZE = 8
LIMITS = RankLimits(start_seconds=60, step_seconds=60, silent_seconds=60, close_seconds=5)


def spec_of(layout: ParallelLayout, token: str = "") -> WorkerSpec:
    return WorkerSpec(
        worker_id=f"worker-{layout}",
        generation=1,
        role=Role.UNIFIED,
        model_path="toy",
        layout=layout,
        engine=EngineConfig(block_size=BLOCK_SIZE),
        handoff=HandoffConfig(transfer_seconds=10.0),
        rendezvous_token=token,
    )


@dataclass
class Worker:
    """An executor, and the numbers that a scheduler would give out."""

    executor: RankExecutor
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    epochs: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    @classmethod
    def of(cls, layout: ParallelLayout, toy: Toy | None = None, limits: RankLimits = LIMITS) -> "Worker":
        return cls(build_executor(spec_of(layout), make_runner=toy or Toy(), limits=limits))

    @property
    def peer(self) -> PeerRanks:
        layout = self.executor.layout
        return PeerRanks(f"peer-{layout}", id(self), layout, self.executor.endpoints)

    def plan(self, tokens: range, blocks: tuple[int, ...], epoch: int = 0) -> StepPlan:
        """A row that computes a prompt into `blocks`, which it was given at `epoch`."""
        number = next(self.numbers)
        prompt = tuple(tokens)
        return StepPlan(
            number,
            work=(RowWork(number, 0, len(prompt), prompt, blocks),),
            num_decodes=0,
            starts=(RowStart(number, prompt, (), SamplingParams(max_tokens=1)),),
            fresh=tuple((block, epoch) for block in blocks),
        )

    def fill(self, tokens: range, blocks: tuple[int, ...]) -> int:
        """Computes a prompt into `blocks` and returns their epoch."""
        epoch = next(self.epochs)
        self.executor.step(self.plan(tokens, blocks, epoch)).result(20)
        return epoch

    def digests(self, blocks: tuple[int, ...], filled: int = BLOCK_SIZE) -> tuple[bytes, ...]:
        return self.executor.digests([(block, filled) for block in blocks]).result(20)


def children(executor: RankExecutor) -> list[Any]:
    """As subprocess.Popen is one, or as forked.Child."""
    return list(executor._children)
