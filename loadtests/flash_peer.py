"""`flash-attn-4` as a peer of prefill attention in bench_kernels, where a host has it; nothing of ours needs it.

It takes the pool as it lies: of a layer a view [blocks, block, KV heads, dimension], and a row's block table.
"""

import importlib
import importlib.util
from collections.abc import Callable

from torch import Tensor

from kernels.ops import AttentionBatch

NAME = "flash-attn-4"


def flash_prefill(q_THE: Tensor, pool: Tensor, layer: int, batch: AttentionBatch, scale: float) -> Tensor:
    """As Ops.attention of rows without decodes."""
    attend = importlib.import_module("flash_attn.cute").flash_attn_varlen_func
    keys, values = (pool[:, :, layer, part].transpose(1, 2) for part in (0, 1))
    found = attend(
        q_THE,
        keys,
        values,
        cu_seqlens_q=batch.starts_R1,
        max_seqlen_q=batch.max_query,
        seqused_k=batch.contexts_R,
        max_seqlen_k=batch.max_context,
        page_table=batch.block_tables_RB,
        softmax_scale=scale,
        causal=True,
    )
    out: Tensor = found[0] if isinstance(found, tuple) else found
    return out


def peer_seconds(
    of: Callable[[Callable[[], object]], list[float]], run: Callable[[], Tensor], expected: Tensor
) -> list[float] | None:
    """What `of` times of it, once it computes what is expected; None, said why, where it is not here, fails or is off."""
    if importlib.util.find_spec("flash_attn") is None:
        return None
    try:
        error = float((run().double() - expected.double()).norm() / expected.double().norm())
        if not error < 1e-2:
            raise ValueError(f"relative error must be below 1e-2, got {error:.1e}")
        return of(run)
    except Exception as error:  # a peer that fails is a result
        print(f"  {NAME}: {type(error).__name__}: {error}"[:300], flush=True)
        return None
