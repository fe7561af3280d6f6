"""Every kernel against its reference, in Triton's interpreter on the CPU. No skip: without Triton this fails."""

from dataclasses import replace

import pytest
import torch

from kernels.cuda import CudaOps, WholePrompt, whole_prompts
from kernels.cuda_fixed import FixedCudaOps
from kernels.dense_prefill import rounded
from kernels.draws import CudaDraws
from kernels.paged_decode import _num_programs
from kernels.tuning import DecodeTile, LongDecode, PrefillTile, PullTile, RopeTile, RowTile, tuning_of
from tests.unit.kernels import checks

pytestmark = [pytest.mark.torch, pytest.mark.interpreter]
CPU = torch.device("cpu")
F32 = torch.float32


@pytest.mark.parametrize("num_programs", [1, 2, 5, 16])
@pytest.mark.parametrize(
    "contexts",
    [[1], [15, 16, 17], [0, 33, 0, 1], [100], [7, 0, 64, 31, 2]],
    ids=["one", "edges", "padding", "long", "mixed"],
)
def test_decode_over_any_number_of_programs(contexts: list[int], num_programs: int) -> None:
    tile = DecodeTile(16, 1, 1, 16, 4, 2)
    checks.check_decode(contexts, 3, 2, 16, 8, num_programs, tile, CPU, F32)


@pytest.mark.parametrize(
    ("group", "kv_heads", "head_dim", "block_size", "tokens"),
    [(1, 1, 32, 16, 32), (4, 2, 16, 32, 16), (7, 1, 16, 16, 32), (16, 2, 16, 5, 16)],
)
@pytest.mark.parametrize("least_tiles", [1, 3])
def test_decode_shapes(
    group: int, kv_heads: int, head_dim: int, block_size: int, tokens: int, least_tiles: int
) -> None:
    tile = DecodeTile(tokens, 1, least_tiles, 16, 4, 2)
    checks.check_decode([tokens * 2, 45, 1, tokens * 3 + 1], group, kv_heads, head_dim, block_size, 7, tile, CPU, F32)


def test_decode_merges_more_parts_than_fit_one_pass() -> None:
    checks.check_decode([16 * 40 + 3], 2, 1, 16, 16, 41, DecodeTile(16, 1, 1, 16, 4, 2), CPU, F32)


def test_decode_of_one_part_more_than_whole_merges_takes_fewer_programs() -> None:
    tile = DecodeTile(16, 1, 1, 16, 4, 2)
    assert [_num_programs(programs, 8, 16) for programs in (128, 264, 272, 396)] == [128, 256, 256, 384]
    assert [_num_programs(programs, 8, 16) for programs in (7, 120, 240)] == [7, 120, 240]
    checks.check_decode([16 * 33 + 1], 2, 1, 16, 16, 33, tile, CPU, F32)


def test_decode_of_padding_alone_writes_nothing() -> None:
    checks.check_decode([0, 0, 0], 2, 2, 16, 8, 4, DecodeTile(16, 1, 1, 16, 4, 2), CPU, F32)


@pytest.mark.parametrize(
    "rows",
    [
        [(5, 5)],
        [(2, 2), (16, 16), (17, 17)],
        [(3, 40), (8, 33), (31, 32)],
        [(1, 9), (1, 0), (4, 20), (1, 30), (33, 64)],
        [(4, 0), (6, 12)],
    ],
    ids=["short", "whole", "offset", "mixed", "padding"],
)
@pytest.mark.parametrize(("group", "kv_heads"), [(1, 2), (3, 2), (4, 1)])
def test_prefill_rows(rows: list[tuple[int, int]], group: int, kv_heads: int) -> None:
    checks.check_prefill(rows, group, kv_heads, 16, 8, PrefillTile(32, 16, 4, 2), CPU, F32)


@pytest.mark.parametrize(("block_size", "tokens"), [(5, 32), (16, 16), (32, 16)])
def test_prefill_block_and_tile_sizes(block_size: int, tokens: int) -> None:
    checks.check_prefill([(50, 50), (19, 83)], 2, 2, 32, block_size, PrefillTile(16, tokens, 4, 2), CPU, F32)


@pytest.mark.parametrize("splits", [2, 3, 16])
@pytest.mark.parametrize(
    "rows",
    [[(5, 200)], [(1, 9), (1, 0), (4, 120), (1, 65), (33, 64)], [(20, 129), (4, 0), (40, 97), (3, 32)]],
    ids=["long", "mixed", "several"],
)
def test_prefill_over_parts_of_the_context(rows: list[tuple[int, int]], splits: int) -> None:
    checks.check_prefill(rows, 3, 2, 16, 8, PrefillTile(32, 16, 4, 2), CPU, F32, splits=splits)


def test_prefill_leaves_whole_prompts_to_the_dense_kernel() -> None:
    tile = PrefillTile(32, 16, 4, 2)
    checks.check_prefill([(5, 5), (9, 9), (9, 20)], 2, 2, 16, 8, tile, CPU, F32, whole_from=9)


@pytest.mark.parametrize(
    ("num_tokens", "length", "block_size"), [(1, 1, 8), (16, 16, 8), (23, 40, 5), (33, 128, 16), (31, 33, 16)]
)
def test_gather_row(num_tokens: int, length: int, block_size: int) -> None:
    checks.check_gather_row(num_tokens, length, 2, 16, block_size, CPU, F32)


@pytest.mark.parametrize("context", [63, 64, 200])
def test_a_long_row_among_few_has_a_tile_of_its_own(context: int) -> None:
    checks.check_long_decode(context, LongDecode(4, 64, DecodeTile(32, 2, 1, 4, 4, 2)), CPU, F32)


def test_only_few_units_have_a_tile_for_long_rows() -> None:
    tuning = replace(tuning_of(CPU), decode_long=LongDecode(4, 64, DecodeTile(32, 2, 1, 4, 4, 2)))
    ops = CudaOps(CPU, tuning, 4)
    assert [ops.decode_contexts(rows, 2) for rows in (1, 2, 3)] == [(64,), (64,), ()]
    assert ops._decode_tile(6, 10_000) == tuning.decode_few
    assert CudaOps(CPU, replace(tuning, decode_long=None), 4).decode_contexts(1, 2) == ()
    assert FixedCudaOps(CPU, tuning, 4).decode_contexts(1, 2) == ()


def test_prompts_are_computed_as_few_lengths() -> None:
    lengths = [rounded(tokens) for tokens in range(1, 8193)]
    assert all(length >= tokens for tokens, length in enumerate(lengths, 1))
    assert all(length < tokens * 1.15 for tokens, length in enumerate(lengths[1023:], 1024))
    assert len(set(lengths)) == 32


def test_a_mixed_step_takes_the_dense_path_row_by_row() -> None:
    checks.check_mixed_step(CPU, F32, dense_from=9)


def test_whole_prompts_are_those_that_are_their_whole_context() -> None:
    lengths = [(3, 3), (8, 8), (8, 8), (8, 20), (9, 9), (8, 8)]
    assert whole_prompts(lengths, 8) == [
        WholePrompt(1, 3, 8),
        WholePrompt(2, 11, 8),
        WholePrompt(4, 27, 9),
        WholePrompt(5, 36, 8),
    ]
    assert whole_prompts((), 8) == []


@pytest.mark.parametrize("shape", [(1, 64), (5, 48), (3, 3, 16), (7, 100), (2, 9, 32)])
@pytest.mark.parametrize("elements", [64, 512])
def test_norms(shape: tuple[int, ...], elements: int) -> None:
    checks.check_norms(shape, RowTile(elements, 4), CPU, F32)


@pytest.mark.parametrize(("heads", "kv_heads", "held"), [(3, 1, 2), (4, 4, 8), (9, 3, 4)])
def test_rope_store(heads: int, kv_heads: int, held: int) -> None:
    rows = [(1, 4), (1, 0), (9, 13), (3, 0), (2, 16)]
    checks.check_rope_store(rows, heads, kv_heads, 16, 4, RopeTile(held, 4), CPU, F32)


@pytest.mark.parametrize(("num_tokens", "width"), [(1, 1), (3, 64), (2, 100), (5, 129)])
def test_silu_mul(num_tokens: int, width: int) -> None:
    checks.check_silu_mul(num_tokens, width, RowTile(64, 4), CPU, F32)


@pytest.mark.parametrize(
    ("source", "target", "heads", "layers"),
    [
        ((7, 2, 3), (9, 2, 3), (0, 0, 2), (0, 0, 3)),
        ((7, 4, 3), (9, 2, 3), (2, 0, 2), (0, 0, 3)),
        ((7, 1, 2), (9, 3, 5), (0, 2, 1), (0, 3, 2)),
        ((7, 3, 5), (9, 2, 4), (1, 0, 2), (2, 1, 3)),
    ],
    ids=["whole", "head range", "layer range into", "both"],
)
@pytest.mark.parametrize(("num_programs", "words_of_layer"), [(1, 8), (3, 24), (64, 17)])
def test_pull(
    source: tuple[int, int, int],
    target: tuple[int, int, int],
    heads: tuple[int, int, int],
    layers: tuple[int, int, int],
    num_programs: int,
    words_of_layer: int,
) -> None:
    checks.check_pull(source, target, heads, layers, 5, words_of_layer, PullTile(num_programs, 16, 4), CPU)


@pytest.mark.parametrize(("num_pulled", "num_moved"), [(1, 0), (1, 1), (40, 7), (1100, 1030)])
def test_stale_blocks_are_counted(num_pulled: int, num_moved: int) -> None:
    checks.check_stale(1200, num_pulled, num_moved, CPU)


@pytest.mark.parametrize("dtype", [F32, torch.bfloat16])
@pytest.mark.parametrize(("num_draws", "vocabulary"), [(1, 64), (5, 1000), (3, 65)])
def test_largest(num_draws: int, vocabulary: int, dtype: torch.dtype) -> None:
    checks.check_largest(num_draws, vocabulary, RowTile(64, 4), CPU, dtype)


@pytest.mark.parametrize(("num_draws", "vocabulary"), [(1, 1), (4, 64), (9, 65), (6, 1000)])
def test_sample(num_draws: int, vocabulary: int) -> None:
    checks.check_sample(num_draws, vocabulary, RowTile(64, 4), CPU)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(("num_draws", "vocabulary"), [(3, 8), (12, 64), (12, 201)])
@pytest.mark.parametrize("most_candidates", [2, 16, 256])
def test_sample_floor(num_draws: int, vocabulary: int, ties: bool, most_candidates: int) -> None:
    checks.check_sample_floor(num_draws, vocabulary, ties, RowTile(64, 4), CPU, most_candidates)


def test_the_sampler_draws_by_kernels_what_it_draws_by_torch() -> None:
    checks.check_draws(CudaDraws(CPU, tuning_of(CPU)), CPU, 700)
