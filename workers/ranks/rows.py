"""A rank's table of rows (see scheduling.plan): block tables and last tokens, and from them and a plan the step's inputs.

Shape suffixes as in kernels.ops; W rows of a plan's work.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.ops import AttentionBatch
from workers.ranks.staging import Array, to_device
from workers.scheduling.plan import RowWork, StepPlan

LAST_DRAWN = -1  # stands among token ids for what the row drew last


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What the model computes in a step. Of the batch's decode rows, `rows_W` leading, the late ones compute what they drew
    last, which Rows.fill_late puts in place. `sample_at`: the last token of every row that draws,
    and `sample_rows` these rows."""

    token_ids_T: Tensor
    batch: AttentionBatch
    rows_W: Tensor
    sample_at: Tensor
    sample_rows: Tensor

    @property
    def num_tokens(self) -> int:
        return self.token_ids_T.shape[0]


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """What a step of one token a row computes, as rows of one tensor of the device. From `num_rows` on columns are
    padding: context 0, no slot."""

    numbers: Tensor  # int64 [5, columns]: the fields below, in their order
    num_rows: int

    @staticmethod
    def fields(numbers: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """(token ids, positions, slots, rows, contexts)."""
        token_ids, positions, slots, rows, contexts = numbers.unbind()
        return token_ids, positions, slots, rows, contexts

    @property
    def rows(self) -> Tensor:
        return self.numbers[3, : self.num_rows]


class PromptFields(NamedTuple):
    """Of PromptInputs.numbers, in their order: of each token, of each row slot, and the first token of each prompt slot
    with the last one's end. Tensors, or arrays of the host."""

    token_ids: Any
    positions: Any
    slots: Any
    rows: Any
    contexts: Any
    starts: Any


@dataclass(frozen=True, slots=True)
class PromptShape:
    """What a step with prompts is padded to: so many tokens, decode slots and prompt slots. `whole`: of one prompt, which
    is its whole context, and nothing else."""

    num_tokens: int
    num_decodes: int
    num_prompts: int
    whole: bool = False

    @property
    def num_rows(self) -> int:
        return self.num_decodes + self.num_prompts

    @property
    def num_numbers(self) -> int:
        return 3 * self.num_tokens + 2 * self.num_rows + self.num_prompts + 1

    def fields(self, numbers: Any) -> PromptFields:
        """Views of a vector of num_numbers."""
        lengths = [*[self.num_tokens] * 3, *[self.num_rows] * 2, self.num_prompts + 1]
        ends = list(accumulate(lengths))
        return PromptFields(*(numbers[end - length : end] for end, length in zip(ends, lengths, strict=True)))


@dataclass(frozen=True, slots=True)
class PromptInputs:
    """What a step with prompts computes, padded: decodes lead their slots and the tokens, prompts lead theirs and follow
    in the tokens. Padding: context 0, no slot, no tokens."""

    shape: PromptShape
    numbers: Tensor  # int64 [shape.num_numbers]
    sample_at: Tensor
    sample_rows: Tensor


@dataclass(frozen=True, slots=True)
class _Layout:
    """A plan's work on the host, one number a row of it or a token. `starts` has one number more."""

    rows: Array
    starts: Array
    contexts: Array
    slots: Array
    positions: Array
    sample_at: Array
    sample_rows: Array


class Rows:
    """Owned by the rank's runner. All arrays are made once; on a CPU tensors and arrays share their memory, elsewhere
    `tables` and the last tokens live on the device too, and a step sends what changed."""

    def __init__(self, max_num_seqs: int, max_blocks_per_row: int, block_size: int, device: torch.device) -> None:
        self._block_size = block_size
        self._device = device
        self._tables = np.zeros((max_num_seqs, max_blocks_per_row), dtype=np.int32)
        self._num_blocks = [0] * max_num_seqs
        self._last_tokens = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self.tables = torch.from_numpy(self._tables)
        if device.type != "cpu":
            self.tables = self.tables.to(device)

    def start(self, row: int) -> None:
        """Its block table is empty."""
        self._num_blocks[row] = 0

    def resume(self, row: int, last_token: int) -> None:
        """A sequence that comes with output goes on from its last token."""
        self._last_tokens[row].fill_(last_token)

    def sampled(self, rows_W: Tensor, token_ids_W: Tensor) -> None:
        """What these rows drew last."""
        self._last_tokens[rows_W] = token_ids_W

    def fill_late(self, token_ids_T: Tensor, rows_W: Tensor) -> None:
        """Puts what the leading rows drew last where LAST_DRAWN stands for it."""
        ids_W = token_ids_T[: rows_W.shape[0]]
        ids_W.copy_(torch.where(ids_W == LAST_DRAWN, self._last_tokens[rows_W], ids_W))

    def decode_inputs(self, plan: StepPlan, num_columns: int) -> DecodeInputs:
        """Appends the plan's new blocks and lays out its rows, each of which computes one token."""
        rows, starts, _, token_ids, new_blocks, _ = zip(*plan.work, strict=True)
        self._append(rows, new_blocks)
        count, size = len(rows), self._block_size
        numbers = np.zeros((5, num_columns), dtype=np.int64)
        numbers[0, :count] = [LAST_DRAWN if ids is None else ids[0] for ids in token_ids]
        numbers[1, :count] = positions = np.array(starts, dtype=np.int64)
        numbers[2] = -1
        numbers[2, :count] = self._tables[rows, positions // size].astype(np.int64) * size + positions % size
        numbers[3, :count] = rows
        numbers[4, :count] = positions + 1
        return DecodeInputs(to_device(self._device, [numbers])[0], count)

    def inputs(self, plan: StepPlan) -> StepInputs:
        """Appends the plan's new blocks and lays out its tokens."""
        work, laid = plan.work, self._lay_out(plan)
        max_context = int(laid.contexts.max())
        token_ids_T, rows_W, starts_R1, contexts_R, slots_T, positions_T, sample_at, sample_rows = to_device(
            self._device,
            [
                _token_ids(work, len(laid.slots)),
                laid.rows,
                laid.starts.astype(np.int32),
                laid.contexts.astype(np.int32),
                laid.slots,
                laid.positions,
                laid.sample_at,
                laid.sample_rows,
            ],
        )
        batch = AttentionBatch(
            starts_R1=starts_R1,
            contexts_R=contexts_R,
            block_tables_RB=self.tables[rows_W, : -(-max_context // self._block_size)],
            slots_T=slots_T,
            positions_T=positions_T,
            num_decodes=plan.num_decodes,
            max_query=max(item.num_tokens for item in work),
            max_context=max_context,
            prefill_lengths=tuple((item.num_tokens, item.start + item.num_tokens) for item in work[plan.num_decodes :]),
        )
        return StepInputs(token_ids_T, batch, rows_W[: plan.num_decodes], sample_at, sample_rows)

    def prompt_inputs(self, plan: StepPlan, shape: PromptShape) -> PromptInputs:
        """The same for a step that is padded to `shape`."""
        laid, decodes = self._lay_out(plan), plan.num_decodes
        count, prompts = len(laid.slots), slice(shape.num_decodes, shape.num_decodes + len(plan.work) - decodes)
        numbers = np.zeros(shape.num_numbers, dtype=np.int64)
        fields = shape.fields(numbers)
        fields.token_ids[:count] = _token_ids(plan.work, count)
        fields.positions[:count] = laid.positions
        fields.slots[:] = -1
        fields.slots[:count] = laid.slots
        for field, values in ((fields.rows, laid.rows), (fields.contexts, laid.contexts)):
            field[:decodes], field[prompts] = values[:decodes], values[decodes:]
        fields.starts[:] = count
        fields.starts[: len(plan.work) - decodes] = laid.starts[decodes:-1]
        there, sample_at, sample_rows = to_device(self._device, [numbers, laid.sample_at, laid.sample_rows])
        return PromptInputs(shape, there, sample_at, sample_rows)

    def _lay_out(self, plan: StepPlan) -> _Layout:
        work, size = plan.work, self._block_size
        self._append([item.row for item in work], [item.new_blocks for item in work])
        rows = np.array([item.row for item in work], dtype=np.int64)
        counts = np.array([item.num_tokens for item in work], dtype=np.int64)
        firsts = np.array([item.start for item in work], dtype=np.int64)
        ends = np.cumsum(counts)
        starts = np.concatenate((np.zeros(1, dtype=np.int64), ends))
        owner = np.repeat(np.arange(len(work)), counts)
        positions = np.arange(int(ends[-1])) - starts[owner] + firsts[owner]
        slots = self._tables[rows[owner], positions // size].astype(np.int64) * size + positions % size
        draws = np.array([item.num_samples > 0 for item in work], dtype=bool)
        return _Layout(rows, starts, firsts + counts, slots, positions, ends[draws] - 1, rows[draws])

    def _append(self, rows: Sequence[int], new_blocks: Sequence[tuple[int, ...]]) -> None:
        """New blocks go behind those that their rows have."""
        changed = [(row, blocks) for row, blocks in zip(rows, new_blocks, strict=True) if blocks]
        places: list[Array] = []
        for row, blocks in changed:
            first = self._num_blocks[row]
            self._num_blocks[row] = first + len(blocks)
            self._tables[row, first : first + len(blocks)] = blocks
            places.append(row * self._tables.shape[1] + np.arange(first, first + len(blocks)))
        if changed and self._device.type != "cpu":
            numbers = np.concatenate([np.array(blocks, dtype=np.int32) for _, blocks in changed])
            where, blocks_there = to_device(self._device, [np.concatenate(places), numbers])
            self.tables.view(-1)[where] = blocks_there


def late_rows(plan: StepPlan) -> list[int]:
    """Those that compute what they drew last."""
    return [item.row for item in plan.work[: plan.num_decodes] if item.token_ids is None]


def _token_ids(work: tuple[RowWork, ...], num_tokens: int) -> "np.ndarray[tuple[int, ...], np.dtype[np.int64]]":
    """In order, LAST_DRAWN where a row's last token belongs."""
    ids: list[int] = []
    for item in work:
        ids += (LAST_DRAWN,) if item.token_ids is None else item.token_ids
    return np.array(ids, dtype=np.int64).reshape(num_tokens)
