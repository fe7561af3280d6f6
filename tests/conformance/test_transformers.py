"""Every family's logits against transformers', in every way in which a sequence can be computed."""

import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.values import ParallelLayout, SamplingParams
from tests.model_steps import ENGINE, Steps, alone, random_ids
from tests.rank_processes import RankProcesses, rank_processes
from tests.tiny import VARIANTS, make_variant
from workers.models.parallel import RankContext
from workers.scheduling.plan import RowStart, RowWork

pytestmark = pytest.mark.torch

TOLERANCE = 1e-4
LENGTHS = (1, ENGINE.block_size - 1, ENGINE.block_size, ENGINE.block_size + 1, 77)
BLOCKS = (5, 3, 9, 1, 20, 7, 40, 2, 30, 31, 33, 32)
Folders = Callable[[str], pathlib.Path]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    made: dict[str, pathlib.Path] = {}

    def folder(name: str) -> pathlib.Path:
        if name not in made:
            made[name] = make_variant(tmp_path_factory.mktemp("tiny") / name, name)
        return made[name]

    return folder


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankProcesses]:
    with rank_processes(4) as processes:
        yield processes


def theirs(folder: pathlib.Path, ids: list[int]) -> Tensor:
    """transformers' logits at every position, [positions, vocabulary]."""
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0]


def close(ours: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(ours, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_are_those_of_transformers(folders: Folders, name: str) -> None:
    """Whole prompts, chunks, decode steps, and a second sequence that begins in the blocks of the first."""
    folder = folders(name)
    ids = random_ids(LENGTHS[-1], seed=1)
    expected = theirs(folder, ids)
    steps = Steps.of(folder, alone())
    for length in LENGTHS:
        steps.prompt(0, ids[:length], BLOCKS)
        close(steps.logits.pop()[0], expected[length - 1])
    chunks = (7, 1, 16, 3, 29)
    steps.prompt(0, ids, BLOCKS, chunks=chunks)
    ends = [sum(chunks[: i + 1]) - 1 for i in range(len(chunks))] + [len(ids) - 1]
    close(torch.cat(steps.logits), expected[ends])
    steps.logits.clear()
    shared = 3 * ENGINE.block_size
    other = ids[:shared] + random_ids(9, seed=2)
    steps.prompt(1, other, (*BLOCKS[:3], 50, 51), cached=shared)
    close(steps.logits.pop()[0], theirs(folder, other)[-1])
    assert steps.runner.max_context_tokens == 256


def job_of_layout(context: RankContext, folder: pathlib.Path, ids: list[int]) -> dict[str, Any]:
    """One rank of a worker: a chunked prompt and decode steps whose tokens come back from the last stage."""
    steps = Steps.of(folder, context)
    first = steps.prompt(2, ids, BLOCKS, chunks=(7, 30))
    drawn = [] if first is None else [first.token_ids[-1]]
    for position in range(len(ids), len(ids) + 6):
        result = steps.decode((2,), position, (BLOCKS,))
        if result is not None:
            drawn += result.token_ids
    steps.runner.settle()
    return {"drawn": drawn, "logits": torch.cat(steps.logits) if steps.logits else None}


@pytest.mark.parametrize("layout", [ParallelLayout(2, 1), ParallelLayout(1, 2), ParallelLayout(2, 2)], ids=str)
@pytest.mark.parametrize("name", ["llama-mqa", "llama-biased", "qwen2-tied", "qwen3"])
def test_logits_are_those_of_transformers_in_every_layout(
    folders: Folders, ranks: RankProcesses, name: str, layout: ParallelLayout
) -> None:
    folder, ids = folders(name), random_ids(61, seed=3)
    answers = ranks.run(layout, job_of_layout, folder, ids)
    assert [rank for rank, answer in enumerate(answers) if answer["drawn"]] == [layout.world_size - layout.tp]
    answer = answers[layout.world_size - layout.tp]
    expected = theirs(folder, ids + answer["drawn"][:-1])
    close(answer["logits"], expected[[6, 36, *range(60, 67)]])
    assert answer["drawn"] == expected[60:].argmax(-1).tolist()


def job_of_pipelined_rows(context: RankContext, folder: pathlib.Path, ids: list[int]) -> list[tuple[int, ...]]:
    """Seeded rows that begin, end and take each other's places while tokens are still on their way to the first stage."""
    steps = Steps.of(folder, context)
    seeded = [SamplingParams(max_tokens=99, temperature=1.0, top_p=0.9, frequency_penalty=0.5, seed=s) for s in (1, 2)]
    results = [steps.prompt(0, ids[:9], (1, 2), sampling=seeded[0])]
    results += [steps.decode((0,), position, ((1, 2, 3),)) for position in range(9, 14)]
    start = RowStart(1, tuple(ids), (), seeded[1])
    results.append(
        steps.plan(
            RowWork(0, 14, 1, None), RowWork(1, 0, 20, tuple(ids[:20]), (5, 6, 7), 0), num_decodes=1, starts=(start,)
        )
    )
    results.append(steps.plan(RowWork(1, 20, len(ids) - 20, tuple(ids[20:]), (8, 9)), ends=(0,)))
    resumed = RowStart(0, tuple(ids[:9]), tuple(ids[9:12]), seeded[0])
    again = RowWork(0, 0, 11, tuple(ids[:11]), (20, 21), 0)
    results.append(steps.plan(RowWork(1, len(ids), 1, None, (10,)), again, num_decodes=1, starts=(resumed,)))
    results.append(steps.plan(RowWork(0, 11, 1, None), RowWork(1, len(ids) + 1, 1, None), num_decodes=2))
    steps.runner.settle()
    return [result.token_ids for result in results if result is not None]


@pytest.mark.parametrize("layout", [ParallelLayout(2, 1), ParallelLayout(1, 3), ParallelLayout(2, 2)], ids=str)
def test_seeded_draws_are_the_same_in_every_layout(
    folders: Folders, ranks: RankProcesses, layout: ParallelLayout
) -> None:
    folder, ids = folders("llama"), random_ids(32, seed=6)
    expected = job_of_pipelined_rows(alone(), folder, ids)
    assert len({tokens for tokens in expected if tokens}) > 5
    answers = ranks.run(layout, job_of_pipelined_rows, folder, ids)
    assert answers[layout.world_size - layout.tp] == expected


def test_neighbours_leave_a_row_bit_exact(folders: Folders) -> None:
    """Equal shapes, other content beside it: nothing of a neighbour reaches a row."""
    folder = folders("llama")
    ids = random_ids(20, seed=4)

    def beside(seed: int) -> Tensor:
        steps = Steps.of(folder, alone())
        tables = [(1, 2, 3, 4), (9, 8, 7, 6), (30, 31, 32, 33)]
        for row in range(3):
            mine = ids if row == 1 else random_ids(20 + row, seed=seed + row)
            steps.prompt(row, mine, tables[row])
        steps.logits.clear()
        for position in range(20, 25):
            at = (position, position, position + 2)
            steps.plan(*[_one(steps, row, at[row], tables[row]) for row in range(3)], num_decodes=3)
        return torch.stack([logits[1] for logits in steps.logits])

    assert torch.equal(beside(100), beside(200))


def _one(steps: Steps, row: int, position: int, table: tuple[int, ...]) -> RowWork:
    new = (table[position // steps.size],) if position % steps.size == 0 else ()
    return RowWork(row, position, 1, None, new)
