"""The operations a model is made of, behind one Protocol: torch on a CPU (`reference`), Triton on a CUDA device (`cuda`).

Shape suffixes: T tokens of the step (flattened over rows), R rows, D model width, H query heads, K KV heads,
G = H / K, E head dimension, F feed-forward width, V vocabulary (of this rank), S block size, N blocks of the pool,
L layers of this rank, P positions, B columns of the block table.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kernels.noise import Keys


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """How the T tokens of a step belong to R rows, and where each row's KV lies. All int32 on the device.

    Rows 0 … num_decodes − 1 have exactly one token each. Padding rows (graphs) have context 0 and are left alone.
    """

    starts_R1: Tensor  # [R + 1] first token of each row; starts[R] = T
    contexts_R: Tensor  # [R] tokens of the row after this step: cached and computed before, and this step's
    block_tables_RB: Tensor  # [R, B] block numbers; columns beyond a row's context are never read
    slots_T: Tensor  # [T] int64: block · S + offset where the token's K and V go; −1: nowhere (padding)
    positions_T: Tensor  # [T] int64
    num_decodes: int
    max_query: int  # most tokens of any row
    max_context: int  # largest context of any row
    # (tokens, context) of each row after the decodes, where the host knows them: whole prompts may take a dense kernel.
    prefill_lengths: tuple[tuple[int, int], ...] = ()


class Ops(Protocol):
    """Each function allocates and returns its output unless it says that it works in place."""

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        """x / rms(x) · weight over the last axis, computed in float32, returned in x's dtype. Any leading shape."""
        ...

    def add_rms_norm(self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(rms_norm(x + residual), x + residual)."""
        ...

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
        """Rotates q and k by position (half-split pairing: dimension i with i + E/2; cos_sin_PE holds cos in its first
        half and sin in its second, float32) and writes k and v into the pool at batch.slots_T. Returns rotated q.
        `pool` is [N, K, L, 2, S, E] (workers.kv.layout.SlabLayout), `layer` local to this rank."""
        ...

    def attention(self, q_THE: Tensor, pool: Tensor, layer: int, batch: AttentionBatch, scale: float) -> Tensor:
        """Causal attention of each row's tokens over its whole context, read from the pool (this step's K and V are in
        it already). A row's token j (0-based of q tokens, context c) sees positions 0 … c − q + j. Returns [T, H, E]."""
        ...

    def prepare(self, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, most_tokens: int) -> None:
        """Makes what attention over whole prompts of up to `most_tokens` would make on first use, for the calling
        thread."""
        ...

    def decode_contexts(self, num_rows: int, num_kv_heads: int) -> tuple[int, ...]:
        """Contexts from which on so many decode rows are computed in another way, by batch.max_context: what was captured
        of shorter ones gives the same of longer ones, more slowly."""
        ...

    def linear(self, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        """x · wᵀ + b. I inputs, O outputs of this rank; rows of w may be strided, and on a CPU its columns."""
        ...

    def silu_mul(self, x_T2F: Tensor) -> Tensor:
        """silu(x[:, :F]) · x[:, F:]."""
        ...


@dataclass(frozen=True, slots=True)
class DrawNumbers:
    """What S draws depend on beside their logits, on the device. Temperature 0 is greedy; off are min_p 0, top_k 0
    (int32) and top_p 1. `filtered`: whether any of these is on."""

    keys: Keys
    temperature_S: Tensor
    min_p_S: Tensor
    top_k_S: Tensor
    top_p_S: Tensor
    filtered: bool
