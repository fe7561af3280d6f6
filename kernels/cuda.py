"""Ops on a CUDA device: each operation's Triton kernel, with the tiles that were measured best on this card."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from torch.nn import functional

from kernels import norm, silu_mul
from kernels.dense_prefill import dense_prefill, prepare
from kernels.ops import AttentionBatch
from kernels.paged_decode import MATRIX_ROWS, DecodeScratch, paged_decode
from kernels.paged_prefill import paged_prefill
from kernels.rope_store import rope_store
from kernels.tuning import DecodeTile, Tuning, tuning_of

MAX_DECODE_ROWS = 1024
FEW_UNITS, MANY_UNITS = 64, 512  # rows × KV heads
MOST_SPLITS = 16
# Below, the gather and its launches cost more than the faster kernel saves. Of several prompts in a step the short ones
# are better off together in one paged launch, which fills the device.
DENSE_FROM_TOKENS = 512
DENSE_AMONG_OTHERS_FROM_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class WholePrompt:
    """A prefill row that is its whole context. Numbers count from the first prefill row."""

    row: int
    first_token: int
    num_tokens: int


def whole_prompts(lengths: Sequence[tuple[int, int]], least_tokens: int) -> list[WholePrompt]:
    """The rows of `least_tokens` or more that are their whole context, in order."""
    found, first = [], 0
    for row, (tokens, context) in enumerate(lengths):
        if tokens == context >= least_tokens:
            found.append(WholePrompt(row, first, tokens))
        first += tokens
    return found


class CudaOps:
    """Owns the scratch of decode attention: one stream at a time may run its operations. Fixed addresses and fixed
    grids, nothing synchronised: all of it can be captured in a graph once it ran."""

    def __init__(
        self,
        device: torch.device,
        tuning: Tuning | None = None,
        num_multiprocessors: int | None = None,
        dense_from_tokens: tuple[int, int] = (DENSE_FROM_TOKENS, DENSE_AMONG_OTHERS_FROM_TOKENS),
    ) -> None:
        self._device = device
        self._dense_from = dense_from_tokens
        self._tuning = tuning or tuning_of(device)
        self._multiprocessors = num_multiprocessors or torch.cuda.get_device_properties(device).multi_processor_count
        self._scratch: dict[tuple[int, int, int], DecodeScratch] = {}

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        out = torch.empty(x_TD.shape, dtype=x_TD.dtype, device=x_TD.device)
        if out.numel():
            flat = x_TD if x_TD.dim() in (2, 3) else x_TD.reshape(-1, x_TD.shape[-1])
            norm.rms_norm(flat, weight_D, eps, out, self._tuning.norm)
        return out

    def add_rms_norm(self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        out, total = torch.empty_like(x_TD), torch.empty_like(x_TD)
        if out.numel():
            norm.add_rms_norm(x_TD, residual_TD, weight_D, eps, out, total, self._tuning.norm)
        return out, total

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
        out = torch.empty(q_THE.shape, dtype=q_THE.dtype, device=q_THE.device)
        rope_store(q_THE, k_TKE, v_TKE, cos_sin_PE, pool, layer, batch, out, self._tuning.rope)
        return out

    def attention(self, q_THE: Tensor, pool: Tensor, layer: int, batch: AttentionBatch, scale: float) -> Tensor:
        num_tokens, num_heads, head_dim = q_THE.shape
        num_kv_heads, decodes = pool.shape[1], batch.num_decodes
        self._check(num_heads, num_kv_heads, head_dim, decodes)
        dense_from = self._dense_from[len(batch.prefill_lengths) > 1]
        whole = whole_prompts(batch.prefill_lengths, dense_from)
        tables, contexts = batch.block_tables_RB[decodes:], batch.contexts_R[decodes:]
        if len(whole) == 1 and whole[0].num_tokens == num_tokens:
            return dense_prefill(q_THE, pool, layer, tables[0], contexts[:1], scale)
        out = torch.empty(q_THE.shape, dtype=q_THE.dtype, device=q_THE.device)
        if decodes:
            tile = self._decode_tile(decodes * num_kv_heads, batch.max_context)
            scratch = self._decode_scratch(tile, num_kv_heads, head_dim)
            paged_decode(q_THE[:decodes], pool, layer, batch, scale, out, scratch, tile)
        for prompt in whole:
            first = decodes + prompt.first_token
            here = slice(first, first + prompt.num_tokens)
            context = contexts[prompt.row : prompt.row + 1]
            out[here] = dense_prefill(q_THE[here], pool, layer, tables[prompt.row], context, scale)
        if len(whole) < batch.contexts_R.shape[0] - decodes:
            whole_from = dense_from if whole else None
            splits = self._splits(batch.max_query, num_heads // num_kv_heads, num_kv_heads)
            paged_prefill(
                q_THE,
                pool,
                layer,
                batch,
                scale,
                out,
                range(decodes, batch.contexts_R.shape[0]),
                batch.max_query,
                self._tuning.prefill,
                splits=splits,
                whole_from=whole_from,
            )
        return out

    def _splits(self, max_query: int, group: int, num_kv_heads: int) -> int:
        """So many parts of a long context as one row of so many tokens needs to fill the device."""
        tokens_held = self._tuning.prefill.rows // group
        programs = -(-max_query // tokens_held) * num_kv_heads
        return max(1, min(MOST_SPLITS, self._multiprocessors // programs))

    def prepare(self, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, most_tokens: int) -> None:
        prepare(num_heads, num_kv_heads, head_dim, dtype, range(self._dense_from[0], most_tokens + 1), self._device)

    def decode_contexts(self, num_rows: int, num_kv_heads: int) -> tuple[int, ...]:
        long = self._tuning.decode_long
        return () if long is None or num_rows * num_kv_heads > long.most_units else (long.least_context,)

    def linear(self, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        return functional.linear(x_TI, weight_OI, bias_O)

    def silu_mul(self, x_T2F: Tensor) -> Tensor:
        out = torch.empty(x_T2F.shape[0], x_T2F.shape[1] // 2, dtype=x_T2F.dtype, device=x_T2F.device)
        if out.numel():
            silu_mul.silu_mul(x_T2F, out, self._tuning.silu)
        return out

    def _decode_tile(self, num_units: int, max_context: int) -> DecodeTile:
        long = self._tuning.decode_long
        if long is not None and num_units <= long.most_units and max_context >= long.least_context:
            return long.tile
        if num_units >= MANY_UNITS:
            return self._tuning.decode_many
        return self._tuning.decode_few if num_units <= FEW_UNITS else self._tuning.decode

    def _decode_scratch(self, tile: DecodeTile, num_kv_heads: int, head_dim: int) -> DecodeScratch:
        programs = self._multiprocessors * tile.programs_per_multiprocessor
        key = programs, num_kv_heads, head_dim
        if key not in self._scratch:
            self._scratch[key] = DecodeScratch.of(programs, MAX_DECODE_ROWS, num_kv_heads, head_dim, self._device)
        return self._scratch[key]

    @staticmethod
    def _check(num_heads: int, num_kv_heads: int, head_dim: int, num_decodes: int) -> None:
        if head_dim != triton.next_power_of_2(head_dim) or not 16 <= head_dim <= 256:
            raise ValueError(f"head_dim must be a power of two from 16 to 256, got {head_dim}")
        if num_heads > num_kv_heads * MATRIX_ROWS:
            raise ValueError(f"query heads per KV head must be at most {MATRIX_ROWS}, got {num_heads / num_kv_heads:g}")
        if num_decodes > MAX_DECODE_ROWS:
            raise ValueError(f"num_decodes must be at most {MAX_DECODE_ROWS}, got {num_decodes}")
