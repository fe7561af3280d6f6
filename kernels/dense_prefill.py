"""Prefill attention of whole prompts: their K and V gathered from the pool once, then the library's dense kernel.

Gathering costs a few microseconds per thousand tokens; cuDNN's kernel is half as fast again as the paged one. Only where
a row's tokens are its whole context: the library aligns its causal mask to the first position. For each shape that it
meets the library first makes a plan, which takes 50 ms: so lengths are rounded up to one of a few, whose plans
`prepare` makes at the start. What is added computes nothing that a token of the prompt sees.
"""

# The kernel language has no types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

BACK_ENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]


def rounded(num_tokens: int) -> int:
    """The length that a prompt is computed as: of the steps to the next, twelve or more lie below it."""
    step = 128
    while num_tokens > 16 * step:
        step *= 2
    return -(-num_tokens // step) * step


def prepare(
    num_heads: int, num_kv_heads: int, dim: int, dtype: torch.dtype, lengths: range, device: torch.device
) -> None:
    """Makes the library's plans for prompts of these lengths. They are the calling thread's."""
    for length in sorted({rounded(length) for length in lengths}):
        q_QHE = torch.zeros(length, num_heads, dim, dtype=dtype, device=device)
        kv_KQE = torch.zeros(num_kv_heads, length, dim, dtype=dtype, device=device)
        _attend(q_QHE, kv_KQE, kv_KQE, 1.0)


def dense_prefill(q_QHE: Tensor, pool: Tensor, layer: int, table_B: Tensor, context_1: Tensor, scale: float) -> Tensor:
    """The attention of one row's tokens over themselves, [Q, H, E]. Tokens beyond `context_1` are padding."""
    num_tokens = q_QHE.shape[0]
    length = rounded(num_tokens)
    keys_KQE, values_KQE = gather_row(pool, layer, table_B, context_1, length)
    if length > num_tokens:
        padded = torch.empty(length, *q_QHE.shape[1:], dtype=q_QHE.dtype, device=q_QHE.device)
        padded[:num_tokens] = q_QHE
        q_QHE = padded
    return _attend(q_QHE, keys_KQE, values_KQE, scale)[:num_tokens]


def _attend(q_QHE: Tensor, keys_KQE: Tensor, values_KQE: Tensor, scale: float) -> Tensor:
    with sdpa_kernel(BACK_ENDS, set_priority=True):
        result = scaled_dot_product_attention(
            q_QHE.view(1, *q_QHE.shape).transpose(1, 2),
            keys_KQE.unsqueeze(0),
            values_KQE.unsqueeze(0),
            is_causal=True,
            scale=scale,
            enable_gqa=True,
        )
    return result.transpose(1, 2)[0]


def gather_row(pool: Tensor, layer: int, table_B: Tensor, context_1: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """K and V of a row's context, [K, length, E] each, zero beyond it."""
    _, heads, _, _, size, dim = pool.shape
    gathered = torch.empty(2, heads, length, dim, dtype=pool.dtype, device=pool.device)
    _gather[(triton.cdiv(length, size), heads)](
        pool,
        table_B,
        gathered,
        context_1,
        layer,
        length,
        pool.stride(0),
        pool.stride(1),
        pool.stride(2),
        S=size,
        SIZE=triton.next_power_of_2(size),
        E=dim,
        K=heads,
    )
    return gathered[0], gathered[1]


@triton.jit(do_not_specialize=["layer", "length"])
def _gather(
    POOL,
    TABLE,
    OUT,
    CONTEXT,
    layer,
    length,
    block_stride,
    head_stride,
    layer_stride,
    S: tl.constexpr,
    SIZE: tl.constexpr,
    E: tl.constexpr,
    K: tl.constexpr,
):
    num_tokens = tl.load(CONTEXT)
    column = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    s = tl.arange(0, SIZE)
    e = tl.arange(0, E)
    position_S = column * S + s
    held_S1 = ((s < S) & (position_S < num_tokens))[:, None]
    written_S1 = ((s < S) & (position_S < length))[:, None]
    block = tl.load(TABLE + column, mask=column * S < num_tokens, other=0).to(tl.int64)
    source = POOL + block * block_stride + head * head_stride + layer.to(tl.int64) * layer_stride
    where_SE = s[:, None] * E + e[None, :]
    target_SE = OUT + (head * length + position_S)[:, None] * E + e[None, :]
    tl.store(target_SE, tl.load(source + where_SE, mask=held_S1, other=0.0), mask=written_S1)
    values = tl.cast(length, tl.int64) * K * E
    tl.store(target_SE + values, tl.load(source + S * E + where_SE, mask=held_S1, other=0.0), mask=written_S1)
