"""Steps with prompts as CUDA graphs, up to as many tokens as a GPU computes faster than Python launches.

Captured once for each of a few numbers of tokens, and replayed for every step that fits: any decodes beside a few
prompts or chunks of prompts, at whatever contexts. What is left of the tokens is padding, which writes no K and V and is
read by nobody. A prompt that is alone and whole has graphs of its own, because the library's dense kernel takes it.

Shape suffixes as in kernels.ops.
"""

from bisect import bisect_left

import torch
from torch import Tensor

from kernels.ops import AttentionBatch
from workers.models.transformer import Transformer
from workers.ranks.graphs import Captured, GraphMemory
from workers.ranks.rows import PromptInputs, PromptShape, Rows
from workers.scheduling.plan import StepPlan
from workers.scheduling.work import GRAPH_PROMPTS, GRAPH_TOKENS

WHOLE_FROM_TOKENS = 512  # below, the kernels have one way only


class PromptGraphs:
    """Owns the graphs and the buffers whose addresses they hold. For workers of one stage."""

    def __init__(
        self, model: Transformer, pool: Tensor, rows: Rows, memory: GraphMemory, max_rows: int, max_tokens: int
    ) -> None:
        self._model, self._pool, self._rows, self._memory = model, pool, rows, memory
        self._max_rows = max_rows
        self._sizes = GRAPH_TOKENS[: bisect_left(GRAPH_TOKENS, max_tokens) + 1]
        self._captured: dict[PromptShape, Captured] = {}
        most = self._mixed(self._sizes[-1]).num_numbers
        self._numbers = torch.zeros(most, dtype=torch.int64, device=pool.device)
        self._decode_starts = torch.arange(max_rows, dtype=torch.int32, device=pool.device)

    def prepare(self) -> None:
        """Captures all of them, the largest first: the smaller ones then fit into its memory."""
        for size in reversed(self._sizes):
            for shape in (self._whole(size), self._mixed(size))[size < WHOLE_FROM_TOKENS :]:
                self._graph(shape)

    def shape_for(self, plan: StepPlan) -> PromptShape | None:
        """The graph that a plan with prompts would replay; None where it fits none."""
        num_tokens, num_prompts = plan.num_tokens, len(plan.work) - plan.num_decodes
        if num_tokens > self._sizes[-1] or num_prompts > GRAPH_PROMPTS:
            return None
        size = self._sizes[bisect_left(self._sizes, num_tokens)]
        whole = size >= WHOLE_FROM_TOKENS and len(plan.work) == 1 and plan.work[0].start == 0
        return self._whole(size) if whole else self._mixed(size)

    def residual(self, inputs: PromptInputs) -> Tensor:
        """[tokens and padding, D] that the layers end with, valid until the next call."""
        graph, residual_TD = self._graph(inputs.shape)
        self._numbers[: inputs.shape.num_numbers].copy_(inputs.numbers)
        graph.replay()
        assert residual_TD is not None
        return residual_TD

    @staticmethod
    def _whole(size: int) -> PromptShape:
        return PromptShape(size, 0, 1, whole=True)

    def _mixed(self, size: int) -> PromptShape:
        return PromptShape(size, min(size, self._max_rows), GRAPH_PROMPTS)

    def _graph(self, shape: PromptShape) -> Captured:
        """Captured over padding alone, once its kernels are compiled: what the pool holds stays as it is."""
        if shape not in self._captured:
            numbers = self._numbers[: shape.num_numbers]
            numbers.zero_()
            shape.fields(numbers).slots.fill_(-1)
            self._captured[shape] = self._memory.capture(lambda: self._step(shape))
        return self._captured[shape]

    def _step(self, shape: PromptShape) -> Tensor:
        numbers, decodes = shape.fields(self._numbers[: shape.num_numbers]), shape.num_decodes
        if decodes:
            self._rows.fill_late(numbers.token_ids, numbers.rows[:decodes])
        tables = self._rows.tables.index_select(0, numbers.rows)
        batch = AttentionBatch(
            starts_R1=torch.cat((self._decode_starts[:decodes], numbers.starts.to(torch.int32))),
            contexts_R=numbers.contexts.to(torch.int32),
            block_tables_RB=tables,
            slots_T=numbers.slots,
            positions_T=numbers.positions,
            num_decodes=decodes,
            max_query=shape.num_tokens,
            max_context=tables.shape[1] * self._pool.shape[4],
            prefill_lengths=((shape.num_tokens, shape.num_tokens),) if shape.whole else (),
        )
        return self._model.forward(self._model.embed(numbers.token_ids), self._pool, batch)
