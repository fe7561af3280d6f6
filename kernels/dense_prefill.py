"""Prefill attention of a whole prompt: its K and V gathered from the pool once, then the library's dense kernel.

Gathering costs a few microseconds per thousand tokens; cuDNN's kernel is half as fast again as the paged one. Only where
the row's tokens are its whole context: the library aligns its causal mask to the first position.
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


def dense_prefill(q_QHE: Tensor, pool: Tensor, layer: int, table_B: Tensor, scale: float, out_QHE: Tensor) -> None:
    """Writes the attention of one row's tokens over themselves."""
    keys_KQE, values_KQE = gather_row(pool, layer, table_B, q_QHE.shape[0])
    with sdpa_kernel(BACK_ENDS, set_priority=True):
        result_1HQE = scaled_dot_product_attention(
            q_QHE.transpose(0, 1).unsqueeze(0),
            keys_KQE.unsqueeze(0),
            values_KQE.unsqueeze(0),
            is_causal=True,
            scale=scale,
            enable_gqa=True,
        )
    out_QHE.copy_(result_1HQE.squeeze(0).transpose(0, 1))


def gather_row(pool: Tensor, layer: int, table_B: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """K and V of a row's first tokens, [K, tokens, E] each."""
    _, heads, _, _, size, dim = pool.shape
    gathered = torch.empty(2, heads, num_tokens, dim, dtype=pool.dtype, device=pool.device)
    _gather[(triton.cdiv(num_tokens, size), heads)](
        pool,
        table_B,
        gathered,
        layer,
        num_tokens,
        pool.stride(0),
        pool.stride(1),
        pool.stride(2),
        S=size,
        SIZE=triton.next_power_of_2(size),
        E=dim,
        K=heads,
    )
    return gathered[0], gathered[1]


@triton.jit(do_not_specialize=["layer", "num_tokens"])
def _gather(
    POOL,
    TABLE,
    OUT,
    layer,
    num_tokens,
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
    s = tl.arange(0, SIZE)
    e = tl.arange(0, E)
    position_S = column * S + s
    held_S1 = ((s < S) & (position_S < num_tokens))[:, None]
    block = tl.load(TABLE + column).to(tl.int64)
    source = POOL + block * block_stride + head * head_stride + layer.to(tl.int64) * layer_stride
    where_SE = s[:, None] * E + e[None, :]
    target_SE = OUT + (head * num_tokens + position_S)[:, None] * E + e[None, :]
    tl.store(target_SE, tl.load(source + where_SE, mask=held_S1), mask=held_S1)
    values = tl.cast(num_tokens, tl.int64) * K * E
    tl.store(target_SE + values, tl.load(source + S * E + where_SE, mask=held_S1), mask=held_S1)
