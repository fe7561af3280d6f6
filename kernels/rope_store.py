"""Rotary embedding of q and k, and the write of k and v into their slots: one pass, one launch.

A program holds one token and up to X heads: the first programs of a token rotate q, the last rotate and store k and
carry v. F is E / 2, the pairs of a head.
"""

# The kernel language has no types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from kernels.early import begins_early
from kernels.ops import AttentionBatch
from kernels.tuning import RopeTile


def rope_store(
    q_THE: Tensor,
    k_TKE: Tensor,
    v_TKE: Tensor,
    cos_sin_PE: Tensor,
    pool: Tensor,
    layer: int,
    batch: AttentionBatch,
    out_THE: Tensor,
    tile: RopeTile,
) -> None:
    """Heads of q, k and v lie side by side within a token; tokens may be strided (slices of one projection)."""
    num_tokens, num_heads, head_dim = q_THE.shape
    num_kv_heads = k_TKE.shape[1]
    heads = min(tile.heads, triton.next_power_of_2(num_heads))
    _rope[(triton.cdiv(num_heads, heads) + triton.cdiv(num_kv_heads, heads), num_tokens)](
        q_THE,
        k_TKE,
        v_TKE,
        cos_sin_PE,
        pool,
        batch.slots_T,
        batch.positions_T,
        out_THE,
        layer,
        q_THE.stride(0),
        k_TKE.stride(0),
        v_TKE.stride(0),
        pool.stride(0),
        pool.stride(1),
        pool.stride(2),
        H=num_heads,
        K=num_kv_heads,
        F=head_dim // 2,
        S=pool.shape[4],
        X=heads,
        EARLY=begins_early(),
        num_warps=tile.num_warps,
    )


@triton.jit(do_not_specialize=["layer"])
def _rope(
    Q,
    KEYS,
    VALUES,
    COS_SIN,
    POOL,
    SLOTS,
    POSITIONS,
    OUT,
    layer,
    q_stride,
    k_stride,
    v_stride,
    block_stride,
    head_stride,
    layer_stride,
    H: tl.constexpr,
    K: tl.constexpr,
    F: tl.constexpr,
    S: tl.constexpr,
    X: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        gdc_launch_dependents()  # attention finds its tiles meanwhile
    token = tl.program_id(1).to(tl.int64)
    part = tl.program_id(0)
    q_parts: tl.constexpr = (H + X - 1) // X
    f = tl.arange(0, F)
    angles = COS_SIN + tl.load(POSITIONS + token) * (2 * F)
    cos_1F = tl.load(angles + f)[None, :]
    sin_1F = tl.load(angles + F + f)[None, :]
    if part < q_parts:
        head = part * X + tl.arange(0, X)
        held_X1 = (head < H)[:, None]
        where_XF = head[:, None] * (2 * F) + f[None, :]
        low_XF = tl.load(Q + token * q_stride + where_XF, mask=held_X1, other=0.0).to(tl.float32)
        high_XF = tl.load(Q + token * q_stride + where_XF + F, mask=held_X1, other=0.0).to(tl.float32)
        target_XF = OUT + token * (H * 2 * F) + where_XF
        tl.store(target_XF, (low_XF * cos_1F - high_XF * sin_1F).to(OUT.dtype.element_ty), mask=held_X1)
        tl.store(target_XF + F, (high_XF * cos_1F + low_XF * sin_1F).to(OUT.dtype.element_ty), mask=held_X1)
    else:
        slot = tl.load(SLOTS + token)
        if slot >= 0:
            head = (part - q_parts) * X + tl.arange(0, X)
            held_X1 = (head < K)[:, None]
            where_XF = head[:, None] * (2 * F) + f[None, :]
            low_XF = tl.load(KEYS + token * k_stride + where_XF, mask=held_X1, other=0.0).to(tl.float32)
            high_XF = tl.load(KEYS + token * k_stride + where_XF + F, mask=held_X1, other=0.0).to(tl.float32)
            value_low_XF = tl.load(VALUES + token * v_stride + where_XF, mask=held_X1, other=0.0)
            value_high_XF = tl.load(VALUES + token * v_stride + where_XF + F, mask=held_X1, other=0.0)
            target = POOL + slot // S * block_stride + layer.to(tl.int64) * layer_stride + slot % S * (2 * F)
            target_XF = target + head.to(tl.int64)[:, None] * head_stride + f[None, :]
            tl.store(target_XF, (low_XF * cos_1F - high_XF * sin_1F).to(POOL.dtype.element_ty), mask=held_X1)
            tl.store(target_XF + F, (high_XF * cos_1F + low_XF * sin_1F).to(POOL.dtype.element_ty), mask=held_X1)
            tl.store(target_XF + S * 2 * F, value_low_XF.to(POOL.dtype.element_ty), mask=held_X1)
            tl.store(target_XF + S * 2 * F + F, value_high_XF.to(POOL.dtype.element_ty), mask=held_X1)
