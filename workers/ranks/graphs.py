"""Decode steps as CUDA graphs: the stage's layers captured once for each of a few numbers of rows, and replayed.

A step is some 330 launches, which Python makes more slowly than a GPU carries them out at small batches. Steps of other
numbers of rows use the next larger graph; rows beyond the step's own are padding, which writes no K and V and is read
by nobody.
"""

from bisect import bisect_left

import torch
from torch import Tensor

from kernels.ops import AttentionBatch
from workers.models.transformer import Transformer


def graph_sizes(most: int) -> list[int]:
    """Dense where a row more costs most, and up to `most` at least: 1, 2, 4, then by 8, and by 16 from 64 on."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, most + 16, 16)]
    return sizes[: bisect_left(sizes, most) + 1]


class DecodeGraphs:
    """Owns the graphs and the buffers whose addresses they hold. One rank alone, whose every row computes one token."""

    def __init__(self, model: Transformer, pool: Tensor, max_rows: int, blocks_per_row: int, width: int) -> None:
        self._model, self._pool = model, pool
        self._sizes = graph_sizes(max_rows)
        most, device = self._sizes[-1], pool.device
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._memory = torch.cuda.graph_pool_handle()
        self._blocks_per_row = blocks_per_row
        self._starts = torch.arange(most + 1, dtype=torch.int32, device=device)
        self._contexts = torch.zeros(most, dtype=torch.int32, device=device)
        self._tables = torch.zeros(most, blocks_per_row, dtype=torch.int32, device=device)
        self._slots = torch.full((most,), -1, dtype=torch.int64, device=device)
        self._positions = torch.zeros(most, dtype=torch.int64, device=device)
        self._token_ids = torch.zeros(most, dtype=torch.int64, device=device)
        self._residual = torch.zeros(most, width, dtype=pool.dtype, device=device)

    def prepare(self) -> None:
        """Captures all of them, the largest first: the smaller ones then fit into its memory."""
        for size in reversed(self._sizes):
            self._graph(size)

    def forward(self, token_ids_T: Tensor, batch: AttentionBatch) -> Tensor:
        """The residual stream after the last layer, valid until the next call."""
        num_rows, num_columns = batch.block_tables_RB.shape
        size = self._sizes[bisect_left(self._sizes, num_rows)]
        graph = self._graph(size)
        self._token_ids[:num_rows].copy_(token_ids_T)
        self._positions[:num_rows].copy_(batch.positions_T)
        self._slots[:num_rows].copy_(batch.slots_T)
        self._contexts[:num_rows].copy_(batch.contexts_R)
        self._tables[:num_rows, :num_columns].copy_(batch.block_tables_RB)
        if num_rows < size:
            self._pad(num_rows, size)
        graph.replay()
        return self._residual[:num_rows]

    def _pad(self, first: int, end: int) -> None:
        self._contexts[first:end].zero_()
        self._slots[first:end].fill_(-1)

    def _graph(self, size: int) -> torch.cuda.CUDAGraph:
        """Captured over padding alone, once its kernels are compiled: what the pool holds stays as it is."""
        if size not in self._graphs:
            self._pad(0, size)
            self._step(size)
            torch.cuda.synchronize(self._pool.device)
            graph = torch.cuda.CUDAGraph()
            # other threads of the process may use the device meanwhile
            with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
                self._step(size)
            self._graphs[size] = graph
        return self._graphs[size]

    def _step(self, size: int) -> None:
        block_size = self._pool.shape[4]
        batch = AttentionBatch(
            starts_R1=self._starts[: size + 1],
            contexts_R=self._contexts[:size],
            block_tables_RB=self._tables[:size],
            slots_T=self._slots[:size],
            positions_T=self._positions[:size],
            num_decodes=size,
            max_query=1,
            max_context=self._blocks_per_row * block_size,
        )
        residual_TD = self._model.embed(self._token_ids[:size])
        self._residual[:size].copy_(self._model.forward(residual_TD, self._pool, batch))
