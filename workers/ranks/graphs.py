"""Decode steps as CUDA graphs: a stage's whole step, from numbers of the host to logits or to the residual stream for the
next stage, captured once for each of a few numbers of rows, and replayed. What the ranks of a stage sum and gather is in
them; what goes from stage to stage is not.

A step is some 330 launches, which Python makes more slowly than a GPU carries them out at small batches. Steps of other
numbers of rows use the next larger graph; rows beyond the step's own are padding, which writes no K and V and is read
by nobody. Where the card's kernels take long contexts in another way (Ops.decode_contexts: of the smallest sizes, where one
context can be most of the step), a size has a graph for these too.
"""

from bisect import bisect_left
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.ops import AttentionBatch, Ops
from workers.models.parallel import RankContext
from workers.models.transformer import Transformer
from workers.ranks.rows import DecodeInputs, Rows
from workers.scheduling.plan import StepPlan


def graph_sizes(most: int) -> list[int]:
    """Dense where a row more costs most, and up to `most` at least: 1, 2, 4, then by 8, and by 16 from 64 on."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, most + 16, 16)]
    return sizes[: bisect_left(sizes, most) + 1]


# a graph, and what its replay fills: None on ranks that have no logits
Captured = tuple[torch.cuda.CUDAGraph, Tensor | None]


class GraphMemory:
    """The memory that all graphs of one rank compute in: one of them is replayed at a time, and what it fills is read
    before the next one is."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None  # torch names no type for it; None makes one
        self._graphs: list[torch.cuda.CUDAGraph] = []

    def capture(self, step: Callable[[], Tensor | None]) -> Captured:
        """The launches of `step`, which runs once before, so that its kernels are compiled."""
        step()
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        # other threads of the process may use the device meanwhile
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            filled = step()
        self._pool = graph.pool()
        self._graphs.append(graph)
        return graph, filled

    def close(self) -> None:
        """Lets go of the graphs, never to be replayed: what their operations go through may be closed then."""
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()


class DecodeShape(NamedTuple):
    """What a graph is of: so many columns, and kernels for contexts up to so many tokens."""

    num_columns: int
    max_context: int


class DecodeGraphs:
    """Owns the graphs and the buffers whose addresses they hold. Every row computes one token."""

    def __init__(
        self,
        model: Transformer,
        pool: Tensor,
        rows: Rows,
        memory: GraphMemory,
        max_rows: int,
        context: RankContext,
        ops: Ops,
    ) -> None:
        self._model, self._pool, self._rows, self._memory = model, pool, rows, memory
        self._ops = ops
        self._context = context
        self._sizes = graph_sizes(max_rows)
        most, device = self._sizes[-1], pool.device
        self._captured: dict[DecodeShape, Captured] = {}
        self._shapes = {size: self._shapes_of(size) for size in self._sizes}
        self._numbers = torch.zeros(5 * most, dtype=torch.int64, device=device)
        self._starts = torch.arange(most + 1, dtype=torch.int32, device=device)
        self._contexts = torch.zeros(most, dtype=torch.int32, device=device)
        self._tables = torch.zeros(most, rows.tables.shape[1], dtype=torch.int32, device=device)
        width = 0 if context.is_first_stage else model.hidden_size
        self._entering = torch.zeros(most, width, dtype=pool.dtype, device=device)

    def prepare(self) -> None:
        """Captures all of them, the largest first: the smaller ones then fit into its memory."""
        for size in reversed(self._sizes):
            for shape in self._shapes[size]:
                self._graph(shape)

    def shape_for(self, plan: StepPlan) -> DecodeShape:
        """The graph that a plan of decodes replays."""
        shapes = self._shapes[self._sizes[bisect_left(self._sizes, plan.num_decodes)]]
        if len(shapes) == 1:
            return shapes[0]
        longest = max(item.start for item in plan.work) + 1
        return next(shape for shape in shapes if shape.max_context >= longest)

    def _shapes_of(self, size: int) -> list[DecodeShape]:
        most = self._rows.tables.shape[1] * self._pool.shape[4]
        others = self._ops.decode_contexts(size, self._pool.shape[1])
        return [DecodeShape(size, context) for context in (*(least - 1 for least in others if least <= most), most)]

    def entering(self, num_rows: int) -> Tensor:
        """Where a later stage's next replay finds the residual stream of these rows."""
        return self._entering[:num_rows]

    def replay(self, shape: DecodeShape, inputs: DecodeInputs) -> Tensor | None:
        """What the stage ends with, [rows, vocabulary or model width], valid until the next call; None on ranks of the last
        stage that have no logits."""
        graph, leaving = self._graph(shape)
        self._numbers[: inputs.numbers.numel()].copy_(inputs.numbers.view(-1))
        graph.replay()
        return None if leaving is None else leaving[: inputs.num_rows]

    def _graph(self, shape: DecodeShape) -> Captured:
        """Captured over padding alone, once its kernels are compiled: what the pool holds stays as it is."""
        if shape not in self._captured:
            numbers = self._numbers[: 5 * shape.num_columns].view(5, shape.num_columns)
            numbers.zero_()
            DecodeInputs.fields(numbers)[2].fill_(-1)
            self._captured[shape] = self._memory.capture(lambda: self._step(shape))
        return self._captured[shape]

    def _step(self, shape: DecodeShape) -> Tensor | None:
        size = shape.num_columns
        token_ids, positions, slots, rows, contexts = DecodeInputs.fields(self._numbers[: 5 * size].view(5, size))
        if self._context.is_first_stage:
            self._rows.fill_late(token_ids, rows)
        self._contexts[:size].copy_(contexts)
        torch.index_select(self._rows.tables, 0, rows, out=self._tables[:size])
        batch = AttentionBatch(
            starts_R1=self._starts[: size + 1],
            contexts_R=self._contexts[:size],
            block_tables_RB=self._tables[:size],
            slots_T=slots,
            positions_T=positions,
            num_decodes=size,
            max_query=1,
            max_context=shape.max_context,
        )
        entering_TD = self._model.embed(token_ids) if self._context.is_first_stage else self._entering[:size]
        leaving_TD = self._model.forward(entering_TD, self._pool, batch)
        return self._model.logits(leaving_TD) if self._context.is_last_stage else leaving_TD
