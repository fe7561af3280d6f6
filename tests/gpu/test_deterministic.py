"""`deterministic: true` on CUDA devices: bits of kernels' rows, and answers alone and in any batch, one device or two."""

import pathlib

import pytest
import torch

from headrace.config import EngineConfig
from headrace.values import ParallelLayout, Role
from kernels.tuning import tuning_of
from tests.determinism import NUM_TOKENS, Answers, alone_and_together, at_once
from tests.tiny import make_variant
from tests.unit.kernels.fixed_checks import check_fixed_attention, check_fixed_linear
from workers.models.checkpoint import Checkpoint
from workers.models.parallel import form
from workers.ranks.build import build_executor
from workers.ranks.runner import Runner
from workers.spec import WorkerSpec

pytestmark = [pytest.mark.torch, pytest.mark.gpu]

CUDA = torch.device("cuda", 0)
ENGINE = EngineConfig(
    device="cuda",
    dtype="bfloat16",
    num_blocks=160,
    block_size=16,
    max_num_seqs=8,
    max_step_tokens=1024,
    max_context_tokens=1024,
    deterministic=True,
)
LENGTHS = (700, 9, 130, 301, 1)
COUNTS = (1, 3, 63, 64, 65, 130, 513, 1500)


@pytest.mark.parametrize("shape", [(4096, 6144), (4096, 28672), (14336, 4096), (576, 960), (90, 33)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_of_a_product(shape: tuple[int, int], dtype: torch.dtype) -> None:
    check_fixed_linear(COUNTS, *shape, tuning_of(CUDA).fixed_linear, CUDA, dtype)


@pytest.mark.parametrize(("group", "kv_heads", "head_dim"), [(4, 8, 128), (1, 2, 64), (7, 2, 128), (16, 1, 16)])
@pytest.mark.parametrize(
    "rows", [[(1, 700), (1, 0), (1, 2000)], [(600, 600), (17, 1041), (1, 512), (513, 513)], [(64, 8000)]]
)
def test_tokens_of_attention(rows: list[tuple[int, int]], group: int, kv_heads: int, head_dim: int) -> None:
    tile = tuning_of(CUDA).fixed_attention
    check_fixed_attention(rows, group, kv_heads, head_dim, 512, tile, CUDA, torch.bfloat16)


def same(found: tuple[Answers, list[Answers]]) -> None:
    by_itself, together = found
    assert all(len(tokens) == NUM_TOKENS for tokens in by_itself.values())
    for each in together:
        assert each == by_itself


@pytest.mark.parametrize("name", ["llama-biased", "mistral-wide-heads"])
def test_an_answer_does_not_depend_on_who_is_in_the_batch(tmp_path: pathlib.Path, name: str) -> None:
    folder = make_variant(tmp_path, name, max_position_embeddings=1024)
    context = form(ParallelLayout(), 0, None, device=CUDA)
    runner = Runner(Checkpoint.open(folder), context.layout, 0, ENGINE, context)
    same(alone_and_together(at_once(runner.run), ENGINE, LENGTHS))


@pytest.mark.gpu2
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("layout", [ParallelLayout(2, 1), ParallelLayout(1, 2)], ids=str)
def test_nor_on_two_ranks(tmp_path: pathlib.Path, layout: ParallelLayout) -> None:
    folder = make_variant(tmp_path, "llama", max_position_embeddings=1024)
    executor = build_executor(WorkerSpec("w", 1, Role.UNIFIED, str(folder), layout, ENGINE))
    try:
        same(alone_and_together(executor.step, ENGINE, LENGTHS, layout.pp))
    finally:
        executor.close()
