"""Times of a model on a GPU: a cost model from bytes, operations and the card's rates; and where on the roofline it is.

    prefill token    linear operations ÷ tp ÷ matrix_flops + two sums a layer of its row over the link
    prefill context  attention operations ÷ tp ÷ attention_flops, where a rank's heads and a chunk's tokens fill the card
    decode base      weights of a rank ÷ read rate + layers × layer_seconds + two sums a layer (tp > 1)
    decode sequence  the basis card's, by operations ÷ tp, + two sums' rows
    decode context   KV of a rank ÷ the attention kernel's rate
    transfer         KV over as many links as the narrower of the two pools has ranks in a row

Pipeline stages add memory, and no speed: what micro-batches add was not measured on GPUs (docs/performance.md).
"""

from dataclasses import dataclass

from cluster.planning.gpus import BASIS, BASIS_PRECISION, SUM_SECONDS, GpuType
from cluster.planning.shapes import KV_BYTES, ModelSpec, Precision
from cluster.simulation.cards import WHOLE_FROM_TOKENS
from headrace.costmodel import CostModel
from headrace.devicecost import AttentionGrid, DeviceCost, WholeAttention
from headrace.values import ParallelLayout
from workers.kv.layout import shard

TILE_ROWS = 128  # of a program that attends to prompts: query heads of a KV head × tokens (kernels/tuned)


def cost_model(
    model: ModelSpec, gpu: GpuType, layout: ParallelLayout, precision: Precision, *, num_links: int = 1
) -> DeviceCost:
    """Of one worker. `num_links`: ranks that read side by side in a hand-over. Quantised weights are read faster and
    computed no faster: what their kernels reach was not measured."""
    tp = layout.tp
    part = shard(model.shape, layout, 0)
    link, row_bytes = gpu.link_bytes_per_second.value, 2.0 * model.hidden_size
    sums = 2 * model.num_layers if tp > 1 else 0
    sum_row = sums * row_bytes * 2 * (tp - 1) / tp / link
    stages = (layout.pp - 1) * SUM_SECONDS
    weights = model.read_bytes(precision) / tp
    widths = BASIS.decode_flops_per_token
    rank_kv = 2.0 * model.num_layers * part.num_kv_heads * model.head_dim * KV_BYTES[precision.kv]
    read = gpu.read_bytes_per_second.value
    base = gpu.prefill_base_seconds.value * weights / BASIS.read_bytes(BASIS_PRECISION)
    launches = gpu.launch_seconds.value * model.num_layers
    group = max(model.num_heads // tp // part.num_kv_heads, 1)
    return DeviceCost(
        prefill_base_seconds=base + launches + sums * SUM_SECONDS + stages,
        prefill_token_seconds=model.linear_flops_per_token / tp / gpu.matrix_flops.value + sum_row,
        prefill_token_context_seconds=model.attention_flops_per_token_context / tp / gpu.attention_flops.value,
        decode_base_seconds=weights / read
        + model.num_layers * gpu.layer_seconds.value
        + (sums + (tp > 1)) * SUM_SECONDS
        + stages,
        decode_sequence_seconds=gpu.sequence_seconds.value * model.decode_flops_per_token / widths / tp + sum_row,
        decode_context_token_seconds=rank_kv / gpu.attention_bytes_per_second.value,
        transfer_base_seconds=gpu.transfer_base_seconds,
        transfer_bytes_per_second=link * num_links,
        grid=AttentionGrid(gpu.sheet.multiprocessors, part.num_kv_heads, max(TILE_ROWS // group, 1)),
        attention_launch_seconds=launches,
        whole=WholeAttention(
            WHOLE_FROM_TOKENS,
            gpu.whole_launch_seconds.value * model.num_layers,
            model.attention_flops_per_token_context / tp / gpu.whole_attention_flops.value,
        ),
    )


@dataclass(frozen=True, slots=True)
class Roofline:
    """Operations a byte of a phase's step against the card's ridge (both of its data sheet). `bound` by which."""

    phase: str
    intensity: float
    ridge: float
    flops_per_second: float
    attainable_flops_per_second: float
    seconds: float

    @property
    def bound(self) -> str:
        return "compute" if self.intensity >= self.ridge else "memory"

    @property
    def reached(self) -> float:
        """Of what the data sheet allows at this intensity."""
        return self.flops_per_second / self.attainable_flops_per_second


def roofline(
    phase: str,
    model: ModelSpec,
    gpu: GpuType,
    layout: ParallelLayout,
    precision: Precision,
    *,
    flops: float,
    context_bytes: float,
    seconds: float,
) -> Roofline:
    """Of a step of `flops` operations that reads the weights once and `context_bytes` of KV, and takes `seconds`. For one
    GPU of the worker."""
    num_bytes = model.read_bytes(precision) + context_bytes
    peak, memory = gpu.sheet.flops, gpu.sheet.bytes_per_second
    intensity = flops / num_bytes
    return Roofline(
        phase,
        intensity,
        peak / memory,
        flops / layout.tp / seconds,
        min(peak, intensity * memory),
        seconds,
    )


def prefill_roofline(
    model: ModelSpec, gpu: GpuType, layout: ParallelLayout, precision: Precision, cost: CostModel, prompt_tokens: float
) -> Roofline:
    tokens = max(prompt_tokens, 1.0)
    flops = tokens * (model.linear_flops_per_token + model.attention_flops_per_token_context * tokens / 2)
    written = tokens * model.kv_bytes_per_token(precision)
    seconds = cost.prefill_seconds(round(tokens))
    return roofline("prefill", model, gpu, layout, precision, flops=flops, context_bytes=written, seconds=seconds)


def decode_roofline(
    model: ModelSpec,
    gpu: GpuType,
    layout: ParallelLayout,
    precision: Precision,
    cost: CostModel,
    sequences: float,
    context_tokens: float,
) -> Roofline:
    flops = sequences * (model.decode_flops_per_token + model.attention_flops_per_token_context * context_tokens)
    read = sequences * context_tokens * model.kv_bytes_per_token(precision)
    seconds = cost.decode_step_seconds(round(sequences), round(sequences * context_tokens))
    return roofline("decode", model, gpu, layout, precision, flops=flops, context_bytes=read, seconds=seconds)
