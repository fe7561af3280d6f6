"""What the kernels of `deterministic: true` must be: near the reference, on any device; and, on a device whose matrix unit
sums in one order, the same to the bit for a row wherever it stands."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kernels.fixed_linear import fixed_linear
from kernels.paged_prefill import paged_prefill
from kernels.reference import ReferenceOps
from kernels.tuning import LinearTile, PrefillTile
from tests.unit.kernels.batches import filled_pool, paged_batch
from tests.unit.kernels.checks import POISON, assert_near, on

REFERENCE = ReferenceOps()


def check_fixed_linear(
    counts: Sequence[int], num_inputs: int, num_outputs: int, tile: LinearTile, device: torch.device, dtype: torch.dtype
) -> None:
    """Of so many rows, the last so many of the most: with a bias, and x a slice of something wider."""
    generator = torch.Generator().manual_seed(num_inputs + num_outputs)
    most = max(counts)
    x = torch.randn(most, num_inputs + 8, generator=generator).to(device, dtype)[:, :num_inputs]
    weight = torch.randn(num_outputs, num_inputs, generator=generator).to(device, dtype)
    bias = torch.randn(num_outputs, generator=generator).to(device, dtype)
    expected = REFERENCE.linear(x, weight, bias)
    found: list[Tensor] = []
    for count in sorted(counts, reverse=True):
        for bias_O in (bias, None):
            out = torch.full((count, num_outputs), POISON, dtype=dtype, device=device)
            fixed_linear(x[most - count :], weight, bias_O, out, tile)
            if bias_O is not None:
                assert_near(out, expected[most - count :])
                found.append(out)
    if device.type == "cuda":
        for out in found[1:]:
            assert torch.equal(out, found[0][most - len(out) :]), f"{len(out)} rows beside {most}"


def check_fixed_attention(
    rows: Sequence[tuple[int, int]],
    group: int,
    kv_heads: int,
    head_dim: int,
    part: int,
    tile: PrefillTile,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """By a program for each part, by one for all, and each row's last token by itself, as a decode step has it."""
    generator = torch.Generator().manual_seed(len(rows) + rows[0][1])
    num_blocks = sum(-(-context // 8) for _, context in rows) + 3
    batch = paged_batch(rows, 8, num_blocks, generator)
    pool = filled_pool((num_blocks, kv_heads, 3, 2, 8, head_dim), 2, batch, generator).to(device, dtype)
    batch = on(batch, device)
    projection = torch.randn(sum(t for t, _ in rows), kv_heads * (group + 2), head_dim, generator=generator)
    q = projection.to(device, dtype)[:, : kv_heads * group]
    expected = REFERENCE.attention(q, pool, 2, batch, 0.17)
    starts, contexts = batch.starts_R1.tolist(), batch.contexts_R.tolist()
    every, parts = range(len(rows)), -(-batch.max_context // part)
    found = []
    for apart in (True, False):
        out = torch.full(q.shape, POISON, dtype=dtype, device=device)
        most = batch.max_query
        splits = parts if apart else 1
        paged_prefill(q, pool, 2, batch, 0.17, out, every, most, tile, splits=splits, part_tokens=part)
        for row, context in enumerate(contexts):
            tokens = slice(starts[row], starts[row + 1])
            if context:
                assert_near(out[tokens], expected[tokens])
            else:
                assert (out[tokens] == torch.tensor(POISON, dtype=dtype)).all()
        found.append(out)
    last = torch.tensor([end - 1 for end in starts[1:]], device=device)
    steps = torch.arange(len(rows) + 1, dtype=torch.int32, device=device)
    decodes = replace(batch, starts_R1=steps, num_decodes=len(rows), max_query=1)
    out = torch.full((len(rows), *q.shape[1:]), POISON, dtype=dtype, device=device)
    paged_prefill(q[last], pool, 2, decodes, 0.17, out, every, 1, tile, splits=parts, part_tokens=part)
    if device.type == "cuda":
        assert torch.equal(found[0], found[1])
        assert torch.equal(out, found[0][last])
    computed = batch.contexts_R > 0
    assert_near(out[computed], expected[last][computed])
