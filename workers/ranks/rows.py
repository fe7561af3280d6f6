"""A rank's table of rows (see scheduling.plan): block tables and last tokens, and from them and a plan the step's inputs.

Shape suffixes as in kernels.ops; W rows of a plan's work.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.ops import AttentionBatch
from workers.scheduling.plan import RowWork, StepPlan


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What the model computes in a step. `late_rows` sampled the token that they now compute, at index `late_at` of
    `token_ids_T`; it is filled in by Rows.fill_late. `sample_at`: the last token of every row that draws, and
    `sample_rows` these rows."""

    token_ids_T: Tensor
    batch: AttentionBatch
    late_at: Tensor
    late_rows: Tensor
    sample_at: Tensor
    sample_rows: Tensor

    @property
    def num_tokens(self) -> int:
        return self.token_ids_T.shape[0]


class Rows:
    """Owned by the rank's runner. All arrays are made once; on a CPU tensors and arrays share their memory."""

    def __init__(self, max_num_seqs: int, max_blocks_per_row: int, block_size: int, device: torch.device) -> None:
        self._block_size = block_size
        self._device = device
        self._tables = np.zeros((max_num_seqs, max_blocks_per_row), dtype=np.int32)
        self._num_blocks = [0] * max_num_seqs
        self._last_tokens = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)

    def start(self, row: int) -> None:
        """Its block table is empty."""
        self._num_blocks[row] = 0

    def resume(self, row: int, last_token: int) -> None:
        """A sequence that comes with output goes on from its last token."""
        self._last_tokens[row] = last_token

    def sampled(self, rows_W: Tensor, token_ids_W: Tensor) -> None:
        """What these rows drew last."""
        self._last_tokens[rows_W] = token_ids_W

    def fill_late(self, inputs: StepInputs) -> None:
        """Puts the rows' last tokens in their places."""
        if inputs.late_at.shape[0]:
            inputs.token_ids_T[inputs.late_at] = self._last_tokens[inputs.late_rows]

    def inputs(self, plan: StepPlan) -> StepInputs:
        """Appends the plan's new blocks and lays out its tokens."""
        work, size = plan.work, self._block_size
        for item in work:
            if item.new_blocks:
                first = self._num_blocks[item.row]
                self._num_blocks[item.row] = first + len(item.new_blocks)
                self._tables[item.row, first : first + len(item.new_blocks)] = item.new_blocks
        rows = np.array([item.row for item in work], dtype=np.int64)
        counts = np.array([item.num_tokens for item in work], dtype=np.int64)
        firsts = np.array([item.start for item in work], dtype=np.int64)
        ends = np.cumsum(counts)
        starts = np.concatenate((np.zeros(1, dtype=np.int64), ends))
        contexts = firsts + counts
        num_tokens = int(ends[-1])
        owner = np.repeat(np.arange(len(work)), counts)
        positions = np.arange(num_tokens) - starts[owner] + firsts[owner]
        slots = self._tables[rows[owner], positions // size].astype(np.int64) * size + positions % size
        draws = np.array([item.num_samples > 0 for item in work], dtype=bool)
        max_context = int(contexts.max())
        late = [index for index, item in enumerate(work) if item.token_ids is None]
        batch = AttentionBatch(
            starts_R1=self._tensor(starts.astype(np.int32)),
            contexts_R=self._tensor(contexts.astype(np.int32)),
            block_tables_RB=self._tensor(self._tables[rows, : -(-max_context // size)]),
            slots_T=self._tensor(slots),
            positions_T=self._tensor(positions),
            num_decodes=plan.num_decodes,
            max_query=int(counts.max()),
            max_context=max_context,
            prefill_lengths=tuple((item.num_tokens, item.start + item.num_tokens) for item in work[plan.num_decodes :]),
        )
        return StepInputs(
            token_ids_T=self._tensor(_token_ids(work, num_tokens)),
            batch=batch,
            late_at=self._tensor(starts[late]),
            late_rows=self._tensor(rows[late]),
            sample_at=self._tensor(ends[draws] - 1),
            sample_rows=self._tensor(rows[draws]),
        )

    def _tensor(self, array: "np.ndarray[tuple[int, ...], np.dtype[np.int64 | np.int32]]") -> Tensor:
        return torch.from_numpy(array).to(self._device)


def _token_ids(work: tuple[RowWork, ...], num_tokens: int) -> "np.ndarray[tuple[int, ...], np.dtype[np.int64]]":
    """In order, 0 where a row's last token belongs."""
    ids: list[int] = []
    for item in work:
        ids += (0,) if item.token_ids is None else item.token_ids
    return np.array(ids, dtype=np.int64).reshape(num_tokens)
