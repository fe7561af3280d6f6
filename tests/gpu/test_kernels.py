"""The kernels on a CUDA device, over sizes that meet every boundary of block, tile and split."""

import pytest
import torch

from kernels.cuda import CudaOps
from kernels.draws import CudaDraws
from kernels.sample_floor import MOST_CANDIDATES
from kernels.tuning import DecodeTile, LongDecode, PrefillTile, PullTile, RopeTile, RowTile, tuning_of
from tests.unit.kernels import checks
from tests.unit.kernels.batches import paged_batch

pytestmark = [pytest.mark.torch, pytest.mark.gpu]
CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "contexts",
    [[1], [63, 64, 65], [0, 129, 0, 1], [700], [7, 0, 64, 311, 2, 32, 33, 500] * 3],
    ids=["one", "edges", "padding", "long", "mixed"],
)
@pytest.mark.parametrize("num_programs", [1, 7, 132, 528])
def test_decode(contexts: list[int], num_programs: int, dtype: torch.dtype) -> None:
    for seed in range(2):
        for tile in (tuning_of(CUDA).decode, tuning_of(CUDA).decode_many):
            checks.check_decode(contexts, 4, 8, 128, 32, num_programs, tile, CUDA, dtype, seed)


@pytest.mark.parametrize("context", [1000, 16383, 16384, 29999])
def test_a_long_row_alone(context: int) -> None:
    """By the card's own tile for long contexts, and by the one for short ones; where the card has no such, by another."""
    long = tuning_of(CUDA).decode_long or LongDecode(8, 16384, DecodeTile(32, 2, 2, 32, 4, 6))
    checks.check_long_decode(context, long, CUDA, torch.bfloat16)
    checks.check_decode([context], 4, 8, 128, 32, 264, long.tile, CUDA, torch.bfloat16)


@pytest.mark.parametrize("contexts", [[700], [17000], [2049, 40, 33], [300] * 70], ids=["one", "long", "few", "many"])
def test_decode_under_the_end_of_the_rotary_store(contexts: list[int]) -> None:
    """Layers of both in a graph, where attention begins before q and the newest K and V are there: to the bit what they
    give with nothing beside them."""
    ops, generator = CudaOps(CUDA), torch.Generator().manual_seed(1)
    num_blocks = sum(-(-context // 32) for context in contexts)
    batch = checks.on(paged_batch([(1, context) for context in contexts], 32, num_blocks, generator), CUDA)
    pool = torch.randn(num_blocks, 8, 4, 2, 32, 128, device=CUDA).bfloat16()
    angles = torch.randn(max(contexts), 128, device=CUDA)
    projection = torch.randn(len(contexts), 48, 128, dtype=torch.bfloat16, device=CUDA)
    q, k, v = projection.split((32, 8, 8), 1)

    def layers(alone: bool) -> list[torch.Tensor]:
        outs = []
        for layer in range(4):
            rotated = ops.rope_store(q, k, v, angles, pool, layer, batch)
            if alone:
                torch.cuda.synchronize()
            outs.append(ops.attention(rotated, pool, layer, batch, 0.1))
            if alone:
                torch.cuda.synchronize()
        return outs

    layers(alone=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        together = layers(alone=False)
    for _ in range(5):
        projection.normal_()
        graph.replay()
        assert all(map(torch.equal, together, layers(alone=True)))


@pytest.mark.parametrize(
    ("group", "kv_heads", "head_dim", "block_size"), [(1, 4, 64, 16), (3, 3, 64, 32), (7, 2, 128, 32), (16, 1, 256, 64)]
)
@pytest.mark.parametrize(
    "tile", [DecodeTile(32, 2, 1, 16, 4, 4), DecodeTile(64, 2, 2, 16, 4, 4), DecodeTile(64, 1, 1, 16, 8, 2)]
)
def test_decode_shapes(group: int, kv_heads: int, head_dim: int, block_size: int, tile: DecodeTile) -> None:
    checks.check_decode([200, 45, 1, 257], group, kv_heads, head_dim, block_size, 37, tile, CUDA, torch.bfloat16)


@pytest.mark.parametrize(
    "rows",
    [[(5, 5)], [(128, 128), (129, 129)], [(33, 400), (64, 191)], [(1, 9), (1, 0), (4, 20), (1, 30), (200, 333)]],
    ids=["short", "whole", "offset", "mixed"],
)
@pytest.mark.parametrize(("group", "kv_heads", "head_dim"), [(1, 2, 64), (3, 3, 64), (4, 8, 128)])
def test_prefill(rows: list[tuple[int, int]], group: int, kv_heads: int, head_dim: int) -> None:
    for tile in (PrefillTile(64, 64, 4, 3), PrefillTile(128, 64, 8, 3), tuning_of(CUDA).prefill):
        checks.check_prefill(rows, group, kv_heads, head_dim, 32, tile, CUDA, torch.bfloat16)


@pytest.mark.parametrize("splits", [2, 5, 16])
@pytest.mark.parametrize("rows", [[(32, 8160)], [(1, 9), (1, 0), (4, 2000), (64, 1030), (200, 200), (3, 0)]])
def test_prefill_over_parts_of_the_context(rows: list[tuple[int, int]], splits: int) -> None:
    checks.check_prefill(rows, 4, 8, 128, 32, tuning_of(CUDA).prefill, CUDA, torch.bfloat16, splits=splits)


@pytest.mark.parametrize("shape", [(1, 4096), (37, 4096), (5, 576), (3, 32, 128), (300, 9, 64)])
def test_norms(shape: tuple[int, ...]) -> None:
    checks.check_norms(shape, tuning_of(CUDA).norm, CUDA, torch.bfloat16)
    checks.check_norms(shape, RowTile(1024, 4), CUDA, torch.float32)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(32, 8, 128), (9, 3, 64), (28, 4, 128)])
def test_rope_store(heads: int, kv_heads: int, head_dim: int) -> None:
    rows = [(1, 4), (1, 0), (90, 130), (3, 0), (2, 16)]
    for tile in (tuning_of(CUDA).rope, RopeTile(4, 4)):
        checks.check_rope_store(rows, heads, kv_heads, head_dim, 32, tile, CUDA, torch.bfloat16)


@pytest.mark.parametrize(("num_tokens", "width"), [(1, 14336), (37, 1536), (5, 100)])
def test_silu_mul(num_tokens: int, width: int) -> None:
    checks.check_silu_mul(num_tokens, width, tuning_of(CUDA).silu, CUDA, torch.bfloat16)


@pytest.mark.parametrize("num_programs", [1, 32, 500])
def test_pull(num_programs: int) -> None:
    for words in (4096, 100):
        tile = PullTile(num_programs, 8192, 16)
        checks.check_pull((70, 8, 4), (90, 8, 4), (0, 0, 8), (0, 0, 4), 60, words, tile, CUDA)
        checks.check_pull((70, 8, 4), (90, 4, 6), (3, 1, 3), (1, 4, 2), 60, words, tile, CUDA)


def test_stale_blocks_are_counted() -> None:
    checks.check_stale(5000, 3000, 1700, CUDA)


def test_a_mixed_step_takes_the_dense_path_row_by_row() -> None:
    checks.check_mixed_step(CUDA, torch.bfloat16, dense_from=9)


def test_gather_row() -> None:
    checks.check_gather_row(77, 128, 8, 128, 32, CUDA, torch.bfloat16)


def test_an_operation_stops_the_host_for_nothing() -> None:
    """Attention of a mixed batch and all the rest, with synchronisation an error, then captured and replayed."""
    from kernels.cuda import CudaOps
    from tests.unit.kernels.batches import filled_pool, paged_batch

    generator = torch.Generator().manual_seed(1)
    batch = paged_batch([(1, 70), (1, 0), (1, 33), (40, 90)], 32, 20, generator)
    pool = filled_pool((20, 2, 2, 2, 32, 64), 1, batch, generator).to(CUDA, torch.bfloat16)
    batch, ops = checks.on(batch, CUDA), CudaOps(CUDA)
    q, k, v = torch.randn(43, 12, 64, device=CUDA, dtype=torch.bfloat16).split((8, 2, 2), 1)
    cos_sin = torch.randn(100, 64, device=CUDA)
    weight = torch.randn(64, device=CUDA, dtype=torch.bfloat16)

    def step() -> torch.Tensor:
        turned = ops.rms_norm(ops.rope_store(q, k, v, cos_sin, pool, 1, batch), weight, 1e-5)
        flat = ops.attention(turned, pool, 1, batch, 0.2).view(43, -1)
        return ops.silu_mul(ops.add_rms_norm(flat, flat, weight.repeat(8), 1e-5)[0])

    torch.cuda.set_sync_debug_mode("error")
    try:
        eager = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    captured.fill_(torch.nan)
    graph.replay()
    real = torch.tensor([token for token in range(43) if token != 1], device=CUDA)
    assert torch.equal(captured[real], eager[real])


@pytest.mark.parametrize(("num_draws", "vocabulary"), [(1, 128256), (37, 49152), (5, 1000)])
def test_sample(num_draws: int, vocabulary: int) -> None:
    checks.check_sample(num_draws, vocabulary, tuning_of(CUDA).sample, CUDA)


@pytest.mark.parametrize(("num_draws", "vocabulary"), [(1, 128256), (37, 49152), (5, 1000)])
def test_largest(num_draws: int, vocabulary: int) -> None:
    checks.check_largest(num_draws, vocabulary, tuning_of(CUDA).sample, CUDA, torch.bfloat16)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(("num_draws", "vocabulary"), [(64, 128256), (40, 1000)])
@pytest.mark.parametrize("most_candidates", [16, MOST_CANDIDATES])
def test_sample_floor(num_draws: int, vocabulary: int, ties: bool, most_candidates: int) -> None:
    checks.check_sample_floor(num_draws, vocabulary, ties, tuning_of(CUDA).sample_floor, CUDA, most_candidates)


def test_the_sampler_draws_by_kernels_what_it_draws_by_torch() -> None:
    checks.check_draws(CudaDraws(CUDA), CUDA, 128256)


@pytest.mark.parametrize("num_tokens", [512, 700, 2049])
def test_a_lone_prompt_is_computed_as_a_rounded_length(num_tokens: int) -> None:
    checks.check_lone_prompt(num_tokens, CUDA, torch.bfloat16)
