"""What fits on a GPU: weights, KV, the rest; and by how much something does not."""

import math
from dataclasses import dataclass

from cluster.planning.gpus import GpuType
from cluster.planning.shapes import KV_BYTES, ModelSpec, Precision
from headrace.errors import ConfigError, IncompatiblePeer
from headrace.values import ParallelLayout
from workers.kv.layout import shard

CONTEXT_BYTES = 1.5 * 2**30  # CUDA's context, the allocator's slack, graphs and tuned kernels: a guess
FRAGMENT = 0.02  # of the memory, left free
LAYOUTS = tuple(ParallelLayout(tp, pp) for pp in (1, 2, 4) for tp in (1, 2, 4, 8))


@dataclass(frozen=True, slots=True)
class Budget:
    """One rank's memory, in bytes, and what a worker of such ranks holds. `max_sequences`: at the mean context that was
    asked about; `kv_tokens`, `kv_bytes` and `weight_bytes` of the whole worker."""

    layout: ParallelLayout
    rank_memory_bytes: float
    rank_weight_bytes: float
    rank_activation_bytes: float
    rank_overhead_bytes: float
    rank_kv_bytes: float
    kv_bytes_per_token: float
    kv_tokens: int
    kv_bytes: int
    weight_bytes: float

    def max_sequences(self, context_tokens: float) -> int:
        return int(self.kv_tokens / max(context_tokens, 1.0))


@dataclass(frozen=True, slots=True)
class TooLarge:
    """The model does not fit: `missing_bytes` a GPU, for one sequence of `context_tokens`."""

    layout: ParallelLayout
    missing_bytes: float
    reason: str


def budget(
    model: ModelSpec,
    gpu: GpuType,
    layout: ParallelLayout,
    precision: Precision,
    *,
    context_tokens: int,
    max_num_seqs: int = 256,
    max_step_tokens: int = 8192,
    block_size: int = 32,
) -> Budget | TooLarge:
    """What is left for KV of `layout`'s ranks, of which the fullest counts. At least a sequence of `context_tokens` must
    fit. IncompatiblePeer where heads or layers cannot be spread so."""
    part = shard(model.shape, layout, 0)
    whole = model.weight_bytes(precision)
    rank_weights = whole / layout.world_size
    rank_weights *= part.num_layers * layout.pp / model.num_layers  # the first stage takes the remainder
    widest = 2 * model.hidden_size + 3 * model.intermediate_size / layout.tp
    widest += (model.num_heads + 2 * model.num_kv_heads) * model.head_dim / layout.tp
    activations = max_step_tokens * widest * 2.0 + max_num_seqs * model.vocab_size * 4.0
    memory = gpu.sheet.memory_bytes
    overhead = CONTEXT_BYTES + FRAGMENT * memory
    left = memory - rank_weights - activations - overhead
    rank_token = 2 * part.num_layers * part.num_kv_heads * model.head_dim * KV_BYTES[precision.kv]
    needed = math.ceil(context_tokens / block_size) * block_size * rank_token
    if left < needed:
        return TooLarge(
            layout,
            needed - left,
            f"{layout} of {gpu.name}: {rank_weights / 1e9:.1f} GB of weights, {(activations + overhead) / 1e9:.1f} GB of "
            f"activations and overhead and {needed / 1e9:.1f} GB of KV for one sequence of {context_tokens:,} tokens need "
            f"{(needed - left) / 1e9:.1f} GB more than its {memory / 1e9:.1f} GB",
        )
    blocks = int(left / (rank_token * block_size))
    # Replicated heads count as often as they are held.
    each = rank_token * layout.world_size if layout.pp == 1 else 2 * model.num_layers * part.num_kv_heads * layout.tp
    if layout.pp > 1:
        each *= model.head_dim * KV_BYTES[precision.kv]
    return Budget(
        layout=layout,
        rank_memory_bytes=memory,
        rank_weight_bytes=rank_weights,
        rank_activation_bytes=activations,
        rank_overhead_bytes=overhead,
        rank_kv_bytes=blocks * block_size * rank_token,
        kv_bytes_per_token=each,
        kv_tokens=blocks * block_size,
        kv_bytes=int(blocks * block_size * each),
        weight_bytes=whole,
    )


def feasible(
    model: ModelSpec,
    gpu: GpuType,
    precision: Precision,
    *,
    context_tokens: int,
    max_num_seqs: int = 256,
    max_step_tokens: int = 8192,
) -> tuple[list[Budget], list[TooLarge]]:
    """All layouts of one host that fit, and those that do not. tp and pp as they are allowed by the model's heads."""
    fit: list[Budget] = []
    too_large: list[TooLarge] = []
    for layout in LAYOUTS:
        if layout.world_size > gpu.sheet.per_host:
            continue
        try:
            found = budget(
                model,
                gpu,
                layout,
                precision,
                context_tokens=context_tokens,
                max_num_seqs=max_num_seqs,
                max_step_tokens=max_step_tokens,
            )
        except IncompatiblePeer:
            continue
        if isinstance(found, Budget):
            fit.append(found)
        else:
            too_large.append(found)
    return fit, too_large


def does_not_fit(
    model: ModelSpec,
    gpu: GpuType,
    precision: Precision,
    too_large: list[TooLarge],
    *,
    context_tokens: int,
    max_num_seqs: int = 256,
    max_step_tokens: int = 8192,
) -> ConfigError:
    """By how much, and what would."""
    best = min(too_large, key=lambda one: one.missing_bytes)
    weights = model.weight_bytes(precision)
    would = [f"GPUs with {math.ceil((gpu.sheet.memory_bytes + best.missing_bytes) / 1e9)} GB each"]
    for name in ("bfloat16", "fp8", "int4"):
        other = Precision(name, precision.kv)
        if model.weight_bytes(other) >= weights:
            continue
        limits = {"max_num_seqs": max_num_seqs, "max_step_tokens": max_step_tokens}
        if feasible(model, gpu, other, context_tokens=context_tokens, **limits)[0]:
            would.append(f"weights in {name} ({model.weight_bytes(other) / 1e9:.1f} GB)")
            break
    return ConfigError(
        f"{model.name} in {precision.weights} ({weights / 1e9:.1f} GB of weights) does not fit a host of "
        f"{gpu.sheet.per_host} {gpu.name}: at best {best.reason}. What would: {' or '.join(would)}",
        missing_bytes=int(best.missing_bytes),
    )
