"""Steps are timed on a CPU as on a GPU: that it runs, and what it says of the steps; not how fast."""

import random
from collections.abc import Iterator

import pytest

from headrace.config import EngineConfig
from headrace.costmodel import CostModel
from workers.scheduling.work import StepKind, StepWork

pytest.importorskip("torch")

from loadtests.bench_pair import TINY
from loadtests.gpu_steps import Sizes, Timed, rows_of, step_rows

SIZES = Sizes(chunks=(16,), streams=(0, 4), stream_prompt=16, contexts=(64, 128))
ENGINE = EngineConfig(
    device="cpu",
    dtype="float32",
    block_size=8,
    num_blocks=200,
    max_num_seqs=8,
    max_step_tokens=32,
    max_context_tokens=256,
)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tiny products on a busy machine wait for each other's threads."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.torch
@pytest.mark.usefixtures("one_thread")
def test_every_chunk_is_timed_with_streams_beside_it_and_without() -> None:
    found = {row.name: row for row in step_rows(TINY.shape, None, random.Random(0), SIZES, ENGINE)}
    assert list(found) == [
        f"step_{chunk}_{streams}_at_{at}" for streams in (0, 4) for chunk in (16,) for at in (64, 128)
    ]
    beside = found["step_16_4_at_128"]
    assert beside.value > 0
    assert beside.detail["prefill_tokens"] == 12
    assert beside.detail["num_decodes"] == 4
    assert beside.detail["decode_context_tokens"] >= 4 * 17
    assert beside.detail["mean_context"] == pytest.approx(128, abs=3 * 12)


def test_a_row_is_the_median_of_the_nearest_full_steps_beside_what_the_model_says_of_them() -> None:
    def step(tokens: int, context: float, seconds: float) -> Timed:
        return Timed(StepWork(StepKind.MIXED, 3, 1, tokens, context, 300), seconds)

    steps = [step(30, context, context / 1e3) for context in range(80, 150, 10)]
    cost = CostModel(0.0, 1e-3, 0.0, 0.0, 1e-3, 0.0)
    (row,) = rows_of([*steps, step(7, 110, 9.0)], cost, 32, 2, (110,))
    assert row.value == pytest.approx(110), "the last chunk of a prompt is shorter, and is not looked at"
    assert sorted(row.samples) == [90, 100, 110, 120, 130]
    assert row.peer == pytest.approx(32)
    assert row.ratio == pytest.approx(32 / 110)
    assert row.peer_name == "the card's cost model"
    assert list(rows_of([], cost, 32, 2, (110,))) == []
