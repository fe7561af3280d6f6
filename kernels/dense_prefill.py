"""Prefill attention of whole prompts: their K and V gathered from the pool once, then the library's dense kernel.

Gathering costs a few microseconds per thousand tokens; cuDNN's kernel is half as fast again as the paged one. Only where
a row's tokens are its whole context: the library aligns its causal mask to the first position.
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


def dense_prefill(q_THE: Tensor, pool: Tensor, layer: int, tables_RB: Tensor, scale: float) -> Tensor:
    """The attention of each row's tokens over themselves, [T, H, E]. Rows are equally long."""
    num_rows, (num_tokens, num_heads, dim) = tables_RB.shape[0], q_THE.shape
    keys_RKQE, values_RKQE = gather_rows(pool, layer, tables_RB, num_tokens // num_rows)
    with sdpa_kernel(BACK_ENDS, set_priority=True):
        result_RHQE = scaled_dot_product_attention(
            q_THE.view(num_rows, -1, num_heads, dim).transpose(1, 2),
            keys_RKQE,
            values_RKQE,
            is_causal=True,
            scale=scale,
            enable_gqa=True,
        )
    return result_RHQE.transpose(1, 2).reshape(num_tokens, num_heads, dim)


def gather_rows(pool: Tensor, layer: int, tables_RB: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """K and V of each row's first tokens, [R, K, tokens, E] each."""
    _, heads, _, _, size, dim = pool.shape
    gathered = torch.empty(2, tables_RB.shape[0], heads, num_tokens, dim, dtype=pool.dtype, device=pool.device)
    _gather[(triton.cdiv(num_tokens, size), heads, tables_RB.shape[0])](
        pool,
        tables_RB,
        gathered,
        layer,
        num_tokens,
        tables_RB.stride(0),
        pool.stride(0),
        pool.stride(1),
        pool.stride(2),
        S=size,
        SIZE=triton.next_power_of_2(size),
        E=dim,
        K=heads,
    )
    return gathered[0], gathered[1]


@triton.jit(do_not_specialize=["layer", "num_tokens", "table_stride"])
def _gather(
    POOL,
    TABLES,
    OUT,
    layer,
    num_tokens,
    table_stride,
    block_stride,
    head_stride,
    layer_stride,
    S: tl.constexpr,
    SIZE: tl.constexpr,
    E: tl.constexpr,
    K: tl.constexpr,
):
    column = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(2).to(tl.int64)
    s = tl.arange(0, SIZE)
    e = tl.arange(0, E)
    position_S = column * S + s
    held_S1 = ((s < S) & (position_S < num_tokens))[:, None]
    block = tl.load(TABLES + row * table_stride + column).to(tl.int64)
    source = POOL + block * block_stride + head * head_stride + layer.to(tl.int64) * layer_stride
    where_SE = s[:, None] * E + e[None, :]
    target_SE = OUT + ((row * K + head) * num_tokens + position_S)[:, None] * E + e[None, :]
    tl.store(target_SE, tl.load(source + where_SE, mask=held_S1), mask=held_S1)
    values = tl.num_programs(2) * tl.cast(num_tokens, tl.int64) * K * E
    tl.store(target_SE + values, tl.load(source + S * E + where_SE, mask=held_S1), mask=held_S1)
