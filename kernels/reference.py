"""Every operation in plain torch: what a CPU serves with, and what the kernels are tested against.

Shape suffixes as in kernels.ops; C positions of one row's context, Q tokens of one row. Arithmetic is float32 whatever
the inputs are; results are rounded once.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from kernels.ops import AttentionBatch


class ReferenceOps:
    """Ops on any device that torch runs on. Holds no state."""

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        wide = x_TD.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (wide * scale).mul_(weight_D.float()).to(x_TD.dtype)

    def add_rms_norm(self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = (x_TD.float() + residual_TD.float()).to(x_TD.dtype)
        return self.rms_norm(total, weight_D, eps), total

    def rope_store(
        self,
        q_THE: Tensor,
        k_TKE: Tensor,
        v_TKE: Tensor,
        cos_sin_PE: Tensor,
        pool: Tensor,
        layer: int,
        batch: AttentionBatch,
    ) -> Tensor:
        cos_T1F, sin_T1F = cos_sin_PE[batch.positions_T].unsqueeze(1).chunk(2, -1)
        k_TKE = _rotate(k_TKE, cos_T1F, sin_T1F)
        slots = batch.slots_T
        written = slots >= 0
        if not written.all():
            slots, k_TKE, v_TKE = slots[written], k_TKE[written], v_TKE[written]
        block, offset = slots // pool.shape[4], slots % pool.shape[4]
        layer_NK2SE = pool[:, :, layer]
        layer_NK2SE[block, :, 0, offset] = k_TKE.to(pool.dtype)
        layer_NK2SE[block, :, 1, offset] = v_TKE.to(pool.dtype)
        return _rotate(q_THE, cos_T1F, sin_T1F)

    def decode_contexts(self, num_rows: int, num_kv_heads: int) -> tuple[int, ...]:
        return ()

    def prepare(self, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, most_tokens: int) -> None:
        pass

    def attention(self, q_THE: Tensor, pool: Tensor, layer: int, batch: AttentionBatch, scale: float) -> Tensor:
        out_THE = torch.zeros_like(q_THE)
        starts, contexts = batch.starts_R1.tolist(), batch.contexts_R.tolist()
        for row, context in enumerate(contexts):
            tokens = slice(starts[row], starts[row + 1])
            if context and tokens.start < tokens.stop:
                keys_KCE, values_KCE = gather_context(pool, layer, batch.block_tables_RB[row], context)
                out_THE[tokens] = attend(q_THE[tokens].float(), keys_KCE, values_KCE, scale)
        return out_THE

    def linear(self, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        return functional.linear(x_TI, weight_OI, bias_O)

    def silu_mul(self, x_T2F: Tensor) -> Tensor:
        gate, up = x_T2F.float().chunk(2, -1)
        return functional.silu(gate).mul_(up).to(x_T2F.dtype)


def gather_context(pool: Tensor, layer: int, blocks_B: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Keys and values of one row, float32 [K, C, E]: views of one gather, which copies each (block, head) piece once."""
    _, heads, layers, _, size, dim = pool.shape
    blocks = blocks_B[: -(-context // size)].long()
    head_K11 = torch.arange(heads, device=pool.device).view(-1, 1, 1)
    kv_21 = torch.arange(2, device=pool.device).view(2, 1)
    pieces_K2B = ((blocks * heads + head_K11) * layers + layer) * 2 + kv_21
    kv_K2CE = pool.view(-1, size * dim).index_select(0, pieces_K2B.flatten()).view(heads, 2, -1, dim).float()
    return kv_K2CE[:, 0, :context], kv_K2CE[:, 1, :context]


def attend(q_QHE: Tensor, keys_KCE: Tensor, values_KCE: Tensor, scale: float) -> Tensor:
    """The row's tokens are the last of its context. Query heads of one KV head sit side by side: no K or V repeats."""
    num_query, num_heads, dim = q_QHE.shape
    num_kv_heads, context, _ = keys_KCE.shape
    group = num_heads // num_kv_heads
    if num_query == 1:
        scores_KGC = q_QHE.view(num_kv_heads, group, dim).mul(scale).bmm(keys_KCE.transpose(1, 2))
        return scores_KGC.softmax(-1).bmm(values_KCE).view(1, num_heads, dim)
    queries_KGQE = q_QHE.view(num_query, num_kv_heads, group, dim).permute(1, 2, 0, 3)
    visible_QC = None
    if num_query < context:
        last_seen_Q1 = torch.arange(context - num_query, context, device=q_QHE.device).unsqueeze(1)
        visible_QC = torch.arange(context, device=q_QHE.device) <= last_seen_Q1
    out_KGQE = functional.scaled_dot_product_attention(
        queries_KGQE,
        keys_KCE.unsqueeze(1).expand(-1, group, -1, -1),
        values_KCE.unsqueeze(1).expand(-1, group, -1, -1),
        attn_mask=visible_QC,
        is_causal=visible_QC is None,
        scale=scale,
    )
    return out_KGQE.permute(2, 0, 1, 3).reshape(num_query, num_heads, dim)


def _rotate(x_TNE: Tensor, cos_T1F: Tensor, sin_T1F: Tensor) -> Tensor:
    low, high = x_TNE.float().chunk(2, -1)
    return torch.cat((low * cos_T1F - high * sin_T1F, high * cos_T1F + low * sin_T1F), -1).to(x_TNE.dtype)


def sum_over_ranks(parts: Sequence[Tensor]) -> Tensor:
    """What kernels.all_reduce makes of each rank's part: float32 sums in the order of ranks, which start at +0.0, in the
    parts' dtype."""
    total = torch.zeros_like(parts[0], dtype=torch.float32)
    for part in parts:
        total += part
    return total.to(parts[0].dtype)
