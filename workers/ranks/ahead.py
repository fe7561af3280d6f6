"""Every launch that a rank makes, on tensors that have no memory: what a start compiles, and what a worker comes to later.

The model, the graphs and the sums are the engine's own; only the device is missing (kernels.ahead stands in for it). What a
rank's tokens, contexts and blocks are changes nothing of its kernels, but how many there are does: alignments, tiles and
padding. So steps of all kinds are made, and of every number that decides.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from headrace.config import EngineConfig
from headrace.values import ParallelLayout
from kernels.all_reduce import Meeting
from kernels.cuda import DENSE_AMONG_OTHERS_FROM_TOKENS, DENSE_FROM_TOKENS, CudaOps
from kernels.cuda_fixed import FixedCudaOps
from kernels.draws import CudaDraws
from kernels.noise import Keys
from kernels.ops import AttentionBatch, DrawNumbers
from kernels.pull_blocks import PullLauncher, PullShape
from kernels.tuning import Tuning
from workers.kv.layout import SlabLayout, slab_of
from workers.models.config import ModelConfig
from workers.models.meeting import ROOM_BYTES, SmallSums
from workers.models.parallel import RankContext
from workers.models.transformer import Transformer
from workers.ranks.graphs import Captured, DecodeGraphs, GraphMemory
from workers.ranks.prompt_graphs import PromptGraphs
from workers.ranks.rows import Rows
from workers.ranks.runner import DTYPES

META = torch.device("meta")
NUM_BLOCKS = 64  # of a pool without memory
DRAWS = (1, 2, 3, 4)  # of which any number is a multiple of what alignments ask for, or is not


class _Group:
    """In a process group's place, whose operations launch nothing of ours."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments: None


class _Memory(GraphMemory):
    """Captures nothing: a step is carried out once, as before a capture."""

    def __init__(self) -> None:
        super().__init__(META)

    def capture(self, step: Callable[[], Tensor | None]) -> Captured:
        return Any, step()  # type: ignore[return-value]  # nobody replays it


def launch_all(
    config: ModelConfig,
    layout: ParallelLayout,
    engine: EngineConfig,
    tuning: Tuning,
    num_multiprocessors: int,
    max_context_tokens: int | None = None,
) -> None:
    """What the ranks of a worker launch, by this thread, into whatever takes launches."""
    contexts = min(config.context.tokens, max_context_tokens or config.context.tokens)
    ops = (FixedCudaOps if engine.deterministic else CudaOps)(META, tuning, num_multiprocessors)
    with torch.inference_mode():
        for rank in range(layout.world_size):
            _rank(config, layout, rank, engine, tuning, ops, contexts)


def _rank(
    config: ModelConfig,
    layout: ParallelLayout,
    rank: int,
    engine: EngineConfig,
    tuning: Tuning,
    ops: CudaOps,
    max_context_tokens: int,
) -> None:
    context = _context(layout, rank, engine, tuning)
    dtype, slab = DTYPES[engine.dtype], slab_of(config.shape, layout, rank, engine)
    # Layers are alike: the first and the last of a stage launch what all do.
    model = Transformer(config, context, ops, dtype, max_context_tokens)
    model._layers = [model._layers[0], model._layers[-1]] if len(model._layers) > 1 else model._layers
    shape = (NUM_BLOCKS, slab.num_kv_heads, slab.num_layers, 2, slab.block_size, slab.head_dim)
    pool = torch.empty(shape, dtype=dtype, device=META)
    rows = Rows(engine.max_num_seqs, -(-max_context_tokens // engine.block_size), engine.block_size, META)
    memory = _Memory()
    DecodeGraphs(model, pool, rows, memory, engine.max_num_seqs, context, ops).prepare()
    if layout.pp == 1:
        PromptGraphs(model, pool, rows, memory, engine.max_num_seqs, engine.max_step_tokens).prepare()
    most = min(engine.max_step_tokens, max_context_tokens - 1)
    for batch in _batches(most, engine.max_num_seqs, rows.tables.shape[1], engine.block_size):
        num_tokens = batch.positions_T.shape[0]
        tokens = torch.empty(num_tokens, dtype=torch.int64, device=META)
        first = context.is_first_stage
        entering = (
            model.embed(tokens) if first else torch.empty(num_tokens, config.hidden_size, dtype=dtype, device=META)
        )
        leaving = model.forward(entering, pool, batch)
        if context.is_last_stage:
            model.logits(leaving[torch.empty(batch.contexts_R.shape[0], dtype=torch.int64, device=META)])
    if context.samples:
        _draw(model, config, dtype, tuning)
    _pull(slab, tuning)


def _context(layout: ParallelLayout, rank: int, engine: EngineConfig, tuning: Tuning) -> RankContext:
    tp_group = sums = None
    if layout.tp > 1:
        addresses = torch.empty(layout.tp, dtype=torch.int64, device=META)
        meeting = Meeting(rank % layout.tp, addresses, torch.empty(3, dtype=torch.int32, device=META), ROOM_BYTES)
        tp_group, sums = _Group(), SmallSums(meeting, _Group(), tuning.reduce)  # type: ignore[arg-type]
    pp_group = _Group() if layout.pp > 1 else None
    return RankContext(layout, rank, META, tp_group, pp_group, sums, fixed_order=engine.deterministic)


def _batches(most: int, max_num_seqs: int, num_columns: int, block_size: int) -> list[AttentionBatch]:
    """Steps that no graph takes: prompts that are whole, and chunks behind a context, of few tokens and of many, alone and
    beside others, by themselves and beside decodes."""
    lengths = {1, 2, most, *(length for length in (16, 100, DENSE_FROM_TOKENS) if length < most)}
    batches = [
        _batch([(length, length + behind)], decodes, num_columns, block_size)
        for length in sorted(lengths)
        for behind in (0, 2 * block_size, num_columns * block_size - length)
        for decodes in sorted({0, 1, min(max_num_seqs - 1, most - length)})
        if 0 <= decodes <= most - length
    ]
    half = most // 2
    if half:
        batches.append(_batch([(half, half), (half, half + block_size)], 0, num_columns, block_size))
    if most > DENSE_AMONG_OTHERS_FROM_TOKENS:
        long = DENSE_AMONG_OTHERS_FROM_TOKENS
        batches.append(_batch([(long, long), (most - long, most)], 0, num_columns, block_size))
    return batches


def _batch(prefills: list[tuple[int, int]], decodes: int, num_columns: int, block_size: int) -> AttentionBatch:
    num_rows, num_tokens = decodes + len(prefills), decodes + sum(tokens for tokens, _ in prefills)
    largest = max(context for _, context in prefills)
    columns = min(-(-largest // block_size), num_columns)

    def numbers(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=META)

    return AttentionBatch(
        starts_R1=numbers(num_rows + 1),
        contexts_R=numbers(num_rows),
        block_tables_RB=numbers(num_rows, columns),
        slots_T=numbers(num_tokens, dtype=torch.int64),
        positions_T=numbers(num_tokens, dtype=torch.int64),
        num_decodes=decodes,
        max_query=max(tokens for tokens, _ in prefills),
        max_context=largest,
        prefill_lengths=tuple(prefills),
    )


def _draw(model: Transformer, config: ModelConfig, dtype: torch.dtype, tuning: Tuning) -> None:
    """Greedy, by chance, and filtered; of logits as the model leaves them, and as penalties and biases make them."""
    draws = CudaDraws(META, tuning)

    def numbers(count: int, kind: torch.dtype) -> Tensor:
        return torch.empty(count, dtype=kind, device=META)

    for count in DRAWS:
        plain = model.logits(torch.empty(count, config.hidden_size, dtype=dtype, device=META))
        assert plain is not None
        keys = Keys(numbers(count, torch.int64), numbers(count, torch.int64))
        floats = (numbers(count, torch.float32) for _ in range(3))
        temperature, min_p, top_p = floats
        drawn = DrawNumbers(keys, temperature, min_p, numbers(count, torch.int32), top_p, filtered=True)
        for logits in (plain, plain.to(torch.float32, copy=True)):
            draws.largest(logits)
            draws.draw(logits, drawn)
            draws.draw(logits, replace(drawn, filtered=False))


def _pull(slab: SlabLayout, tuning: Tuning) -> None:
    """From a peer of the same layout, all of its blocks."""
    heads, layers = slab.num_kv_heads, slab.num_layers
    layer_bytes = slab.layer_stride * slab.element_bytes
    shape = PullShape.of(layer_bytes, heads, layers, heads, layers, 0, 0, heads, 0, 0, layers)
    blocks = torch.empty(NUM_BLOCKS, dtype=torch.int32, device=META)
    PullLauncher(tuning.pull).launch(0, 0, blocks, blocks, slice(0, NUM_BLOCKS), shape)
