"""A runner driven by hand: plans for one sequence or a batch, and the logits that each step drew from."""

import pathlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from headrace.config import EngineConfig
from headrace.values import ParallelLayout, SamplingParams
from workers.models.checkpoint import Checkpoint
from workers.models.parallel import RankContext, form
from workers.ranks.runner import Runner
from workers.scheduling.plan import RowStart, RowWork, StepPlan, StepResult

ENGINE = EngineConfig(num_blocks=64, block_size=8, max_num_seqs=8, max_step_tokens=128)
DECODES = 6  # steps of decodes()
GREEDY = SamplingParams(max_tokens=1000, temperature=0.0)


def alone() -> RankContext:
    """The only rank of a worker."""
    return form(ParallelLayout(), 0, None)


@dataclass
class Steps:
    """Numbers the plans, and keeps what the steps drew from: one [rows that drew, vocabulary] for each plan."""

    runner: Runner
    size: int
    logits: list[Tensor] = field(default_factory=list)
    number: int = 0

    @classmethod
    def of(cls, folder: pathlib.Path, context: RankContext, engine: EngineConfig = ENGINE, **options: Any) -> "Steps":
        kept: list[Tensor] = []
        runner = Runner(
            Checkpoint.open(folder),
            context.layout,
            context.rank,
            engine,
            context,
            observe=lambda plan, logits: kept.append(logits.clone()),
            **options,
        )
        return cls(runner, engine.block_size, kept)

    def plan(self, *work: RowWork, num_decodes: int = 0, **changes: Any) -> StepResult | None:
        self.number += 1
        return self.runner.run(StepPlan(self.number, work, num_decodes, **changes))

    def prompt(
        self,
        row: int,
        ids: Sequence[int],
        blocks: Sequence[int],
        *,
        chunks: Sequence[int] = (),
        cached: int = 0,
        sampling: SamplingParams = GREEDY,
        output: Sequence[int] = (),
    ) -> StepResult | None:
        """Computes ids from `cached` on in chunks of these lengths (the last takes the rest); every chunk draws."""
        start, result, held = cached, None, 0
        starts: tuple[RowStart, ...] = (RowStart(row, tuple(ids), tuple(output), sampling),)
        for length in [*chunks, len(ids)]:
            end = min(start + length, len(ids))
            needed = -(-end // self.size)
            work = RowWork(row, start, end - start, tuple(ids[start:end]), tuple(blocks[held:needed]))
            result = self.plan(work, starts=starts)
            start, held, starts = end, needed, ()
            if end == len(ids):
                break
        return result

    def decode(self, rows: Sequence[int], position: int, blocks: Sequence[Sequence[int]]) -> StepResult | None:
        """One token of each row, which is the one it drew last."""
        new = position % self.size == 0
        work = [
            RowWork(row, position, 1, None, (mine[position // self.size],) if new else ())
            for row, mine in zip(rows, blocks, strict=True)
        ]
        return self.plan(*work, num_decodes=len(work))


def prompts(steps: Steps) -> None:
    """Two prompts, one whole and one in chunks, and a third behind the first one's blocks."""
    first, second = random_ids(70, 1), random_ids(45, 2)
    third = [*first[:64], *random_ids(9, 3)]
    steps.prompt(0, first, range(5))
    steps.prompt(1, second, range(8, 11), chunks=(17, 16))
    steps.prompt(2, third, [*range(4), 20], cached=64)


def decodes(steps: Steps, named: Sequence[tuple[int, ...]] | None = None) -> list[tuple[int, ...]]:
    """Steps of all three rows, of the tokens named or of those drawn last; what was drawn, nothing where that is another
    stage's. Row 1 meets a new block."""
    drawn = []
    for number in range(DECODES):
        work = [
            RowWork(
                row,
                length + number,
                1,
                None if named is None else named[number][row : row + 1],
                (11,) if (row, length + number) == (1, 48) else (),
            )
            for row, length in enumerate((70, 45, 73))
        ]
        result = steps.plan(*work, num_decodes=3)
        drawn.append(result.token_ids if result is not None else ())
    return drawn


def random_ids(count: int, seed: int, vocab_size: int = 259) -> list[int]:
    return torch.randint(3, vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
