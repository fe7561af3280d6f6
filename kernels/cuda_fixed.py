"""Ops on a CUDA device whose every row is the same to the bit, whatever is computed beside it: `deterministic: true`.

Left out are what would decide otherwise by who else is there: the libraries' products and dense attention, shares of
decode attention that depend on the batch, and norms of several rows a program.
"""

from dataclasses import replace

import torch
from torch import Tensor

from kernels.cuda import CudaOps
from kernels.fixed_linear import fixed_linear
from kernels.ops import AttentionBatch
from kernels.paged_prefill import paged_prefill
from kernels.tuning import RowTile, Tuning, tuning_of

PART_TOKENS = 512  # of a context; every token's bits depend on it
MOST_APART_BYTES = 2**28  # of what parts leave for each other
NORM = RowTile(1, 4)  # a row a program


class FixedCudaOps(CudaOps):
    """As CudaOps, captured alike."""

    def __init__(
        self, device: torch.device, tuning: Tuning | None = None, num_multiprocessors: int | None = None
    ) -> None:
        super().__init__(device, replace(tuning or tuning_of(device), norm=NORM), num_multiprocessors)

    def linear(self, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        out = torch.empty(x_TI.shape[0], weight_OI.shape[0], dtype=x_TI.dtype, device=x_TI.device)
        if out.numel():
            fixed_linear(x_TI, weight_OI, bias_O, out, self._tuning.fixed_linear)
        return out

    def attention(self, q_THE: Tensor, pool: Tensor, layer: int, batch: AttentionBatch, scale: float) -> Tensor:
        _, num_heads, head_dim = q_THE.shape
        num_kv_heads, decodes = pool.shape[1], batch.num_decodes
        self._check(num_heads, num_kv_heads, head_dim, decodes)
        out = torch.empty(q_THE.shape, dtype=q_THE.dtype, device=q_THE.device)
        tile = self._tuning.fixed_attention
        parts = -(-batch.max_context // PART_TOKENS)
        for rows, most in ((range(decodes), 1), (range(decodes, batch.contexts_R.shape[0]), batch.max_query)):
            if rows:
                programs = len(rows) * num_kv_heads * -(-most * num_heads // num_kv_heads // tile.rows)
                held = parts * q_THE.numel() * torch.float32.itemsize
                apart = programs < 4 * self._multiprocessors and held <= MOST_APART_BYTES
                paged_prefill(
                    q_THE,
                    pool,
                    layer,
                    batch,
                    scale,
                    out,
                    rows,
                    most,
                    tile,
                    splits=parts if apart else 1,
                    part_tokens=PART_TOKENS,
                )
        return out

    def decode_contexts(self, num_rows: int, num_kv_heads: int) -> tuple[int, ...]:
        return ()

    def prepare(self, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, most_tokens: int) -> None:
        pass
