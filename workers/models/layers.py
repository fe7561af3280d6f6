"""The layers that are spread over a stage's ranks. A layer allocates this rank's part and lists the weights it wants.

Shape suffixes as in kernels.ops; I inputs, O outputs of this rank.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from kernels.ops import Ops
from workers.models.parallel import RankContext
from workers.models.weights import Span, Wanted


@dataclass(frozen=True, slots=True)
class Parts:
    """What layers are made with, and the list of weights that they want."""

    context: RankContext
    ops: Ops
    dtype: torch.dtype
    wanted: list[Wanted] = field(default_factory=list)

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.context.device)

    def vector(self, name: str, size: int) -> Tensor:
        """A weight that every rank holds whole."""
        target = self.empty(size)
        self.wanted.append(Wanted(name, (size,), target, (0, size)))
        return target

    def share_of(self, size: int) -> Span:
        """This rank's part of `size` columns, as even as can be."""
        tp, rank = self.context.layout.tp, self.context.tp_rank
        return (rank * size // tp, (rank + 1) * size // tp)


@dataclass(frozen=True, slots=True)
class Columns:
    """One matrix of the checkpoint of which this rank computes the outputs of `span`."""

    name: str
    size: int
    span: Span


class ColumnLinear:
    """Outputs spread over the ranks; several matrices that share their input are one product here."""

    def __init__(self, parts: Parts, num_inputs: int, columns: tuple[Columns, ...], *, bias: bool) -> None:
        self._ops = parts.ops
        num_outputs = sum(part.span[1] - part.span[0] for part in columns)
        self.weight_OI = parts.empty(num_outputs, num_inputs)
        self.bias_O = parts.empty(num_outputs) if bias else None
        start = 0
        for part in columns:
            here = slice(start, start := start + part.span[1] - part.span[0])
            parts.wanted.append(Wanted(f"{part.name}.weight", (part.size, num_inputs), self.weight_OI[here], part.span))
            if self.bias_O is not None:
                parts.wanted.append(Wanted(f"{part.name}.bias", (part.size,), self.bias_O[here], part.span))

    def __call__(self, x_TI: Tensor) -> Tensor:
        return self._ops.linear(x_TI, self.weight_OI, self.bias_O)


class RowLinear:
    """Inputs spread over the ranks, whose products are parts of a sum that is still to be made (RankContext). The bias is
    one rank's, so that it counts once."""

    def __init__(self, parts: Parts, name: str, num_inputs: int, span: Span, num_outputs: int, *, bias: bool) -> None:
        self._ops = parts.ops
        self.weight_OI = parts.empty(num_outputs, span[1] - span[0])
        parts.wanted.append(Wanted(f"{name}.weight", (num_outputs, num_inputs), self.weight_OI, (0, num_outputs), span))
        with_bias = bias and parts.context.tp_rank == 0
        self.bias_O = parts.vector(f"{name}.bias", num_outputs) if with_bias else None

    def __call__(self, x_TI: Tensor) -> Tensor:
        return self._ops.linear(x_TI, self.weight_OI, self.bias_O)


class Vocabulary:
    """The vocabulary spread over the ranks: token embeddings, logits, or both where they are one matrix.

    Every rank holds equally many rows; those beyond the vocabulary are zero, and their logits are cut off.
    """

    def __init__(self, parts: Parts, name: str, size: int, width: int) -> None:
        self._context, self._ops = parts.context, parts.ops
        self._size = size
        each = -(-size // parts.context.layout.tp)
        self._first = each * parts.context.tp_rank
        span = (min(self._first, size), min(self._first + each, size))
        # on a CPU transposed in memory: the logits of one or two rows, a laptop's load, then come at twice the speed
        transposed = parts.context.device.type == "cpu"
        self.weight_VD = parts.empty(width, each).t() if transposed else parts.empty(each, width)
        held = span[1] - span[0]
        self.weight_VD[held:] = 0
        parts.wanted.append(Wanted(name, (size, width), self.weight_VD[:held], span))

    def embed(self, token_ids_T: Tensor) -> Tensor:
        if self._context.tp_group is None:
            return functional.embedding(token_ids_T, self.weight_VD)
        local_T = token_ids_T - self._first
        ours_T = (local_T >= 0) & (local_T < self.weight_VD.shape[0])
        x_TD = functional.embedding(local_T.where(ours_T, 0), self.weight_VD)
        return self._context.all_reduce(x_TD.mul_(ours_T.unsqueeze(1)))

    def logits(self, x_RD: Tensor) -> Tensor | None:
        """[R, whole vocabulary] on tp rank 0, None on the others."""
        parts = self._context.gather(self._ops.linear(x_RD, self.weight_VD))
        if parts is None:
            return None
        logits_RV = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        return logits_RV[:, : self._size]
