"""The reference against loops that nobody could get wrong."""

import dataclasses
import json
import math
import pathlib

import pytest
import torch

from kernels.choose import choose
from kernels.ops import AttentionBatch
from kernels.reference import ReferenceOps
from kernels.tuning import TUNED, Tuning
from tests.unit.kernels.batches import filled_pool, paged_batch

pytestmark = pytest.mark.torch
OPS = ReferenceOps()


def attention_one_by_one(
    q: torch.Tensor, pool: torch.Tensor, layer: int, batch: AttentionBatch, scale: float
) -> torch.Tensor:
    """One token and one head at a time, in float64."""
    out = torch.zeros_like(q)
    size, group = pool.shape[4], q.shape[1] // pool.shape[1]
    for row, context in enumerate(batch.contexts_R.tolist()):
        first, stop = int(batch.starts_R1[row]), int(batch.starts_R1[row + 1])
        for token in range(first, stop) if context else ():
            seen = context - (stop - first) + (token - first) + 1
            where = [(int(batch.block_tables_RB[row, p // size]), p % size) for p in range(seen)]
            for head in range(q.shape[1]):
                kv = torch.stack([pool[block, head // group, layer, :, offset] for block, offset in where]).double()
                weights = (kv[:, 0] @ q[token, head].double() * scale).softmax(0)
                out[token, head] = (weights @ kv[:, 1]).to(q.dtype)
    return out


@pytest.mark.parametrize(
    "rows",
    [
        [(1, 1), (1, 8), (1, 9), (1, 23)],
        [(1, 0), (1, 5), (1, 0)],
        [(7, 7)],
        [(5, 16), (1, 1), (8, 8)],
        [(1, 17), (1, 0), (3, 20), (16, 16), (2, 9)],
    ],
    ids=["decode", "padding", "whole prompt", "chunks", "mixed"],
)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
def test_attention_equals_one_token_at_a_time(rows: list[tuple[int, int]], heads: int, kv_heads: int) -> None:
    generator = torch.Generator().manual_seed(len(rows) * heads)
    batch = paged_batch(rows, block_size=8, num_blocks=16, generator=generator)
    pool = filled_pool((16, kv_heads, 3, 2, 8, 16), 1, batch, generator)
    q = torch.randn(int(batch.starts_R1[-1]), heads, 16, generator=generator)
    got = OPS.attention(q, pool, 1, batch, 0.3)
    torch.testing.assert_close(got, attention_one_by_one(q, pool, 1, batch, 0.3), rtol=1e-5, atol=1e-5)


def test_rope_store_rotates_pairs_and_writes_only_its_slots() -> None:
    generator = torch.Generator().manual_seed(3)
    batch = paged_batch([(1, 4), (1, 0), (5, 13)], block_size=4, num_blocks=9, generator=generator)
    pool = torch.full((9, 2, 3, 2, 4, 8), torch.nan)
    q, k, v = (torch.randn(7, heads, 8, generator=generator) for heads in (4, 2, 2))
    angles = torch.arange(20.0).unsqueeze(1) * torch.tensor([1.0, 0.5, 0.1, 0.02])
    rotated = OPS.rope_store(q, k, v, torch.cat((angles.cos(), angles.sin()), 1), pool, 2, batch)

    def turned(x: torch.Tensor, token: int, head: int) -> torch.Tensor:
        out = torch.empty(8)
        for i in range(4):
            angle = float(angles[batch.positions_T[token], i])
            low, high = float(x[token, head, i]), float(x[token, head, i + 4])
            out[i] = low * math.cos(angle) - high * math.sin(angle)
            out[i + 4] = high * math.cos(angle) + low * math.sin(angle)
        return out

    expected_pool = torch.full_like(pool, torch.nan)
    for token, slot in enumerate(batch.slots_T.tolist()):
        for head in range(4):
            torch.testing.assert_close(rotated[token, head], turned(q, token, head))
        for head in range(2) if slot >= 0 else ():
            expected_pool[slot // 4, head, 2, 0, slot % 4] = turned(k, token, head)
            expected_pool[slot // 4, head, 2, 1, slot % 4] = v[token, head]
    torch.testing.assert_close(pool, expected_pool, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_compute_in_float32_and_round_once(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    x, residual = (torch.randn(3, 5, 48, generator=generator).to(dtype) for _ in range(2))
    weight = torch.randn(48, generator=generator).to(dtype)
    total = (x.double() + residual.double()).to(dtype)
    for value, got in ((x, OPS.rms_norm(x, weight, 1e-5)), (total, OPS.add_rms_norm(x, residual, weight, 1e-5)[0])):
        wide = value.double()
        expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), expected, rtol=2**-8 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)
    torch.testing.assert_close(OPS.add_rms_norm(x, residual, weight, 1e-5)[1], total, rtol=0, atol=0)


def test_silu_mul_gates_the_first_half() -> None:
    x = torch.randn(4, 22, generator=torch.Generator().manual_seed(7))
    expected = x[:, :11].double() / (1 + (-x[:, :11].double()).exp()) * x[:, 11:].double()
    torch.testing.assert_close(OPS.silu_mul(x).double(), expected, rtol=1e-5, atol=1e-6)


def test_a_cpu_gets_the_reference() -> None:
    assert isinstance(choose(torch.device("cpu")), ReferenceOps)


@pytest.mark.parametrize("path", sorted(TUNED.glob("*.json")), ids=lambda path: path.stem)
def test_a_cards_file_has_every_tile_and_nothing_else(path: pathlib.Path) -> None:
    assert dataclasses.asdict(Tuning.read(path)) == json.loads(path.read_text())
