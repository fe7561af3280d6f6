"""What is drawn: a token that is asked for, and what came of those of a step.

Shape suffixes: S draws of a step, A those that ask for log-probabilities, K the most that one asks for.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from headrace.values import TokenLogprobs


class Draw(NamedTuple):
    """One token to draw. `position` is its place in the sequence; sample 0 of a row is the row's `own`."""

    row: int
    sample_index: int
    position: int
    own: bool = True


@dataclass(frozen=True, slots=True)
class Drawn:
    """In the order of the draws. Reading what it reports waits for the device, unless it was sent `to_host` and has
    arrived."""

    token_ids_S: Tensor
    best: "Best | None" = None
    margins_S: Tensor | None = None

    def to_host(self) -> "Drawn":
        """On its way: to be read after what the device has been given so far."""
        best = self.best and self.best.to_host()
        margins_S = None if self.margins_S is None else self.margins_S.to("cpu", non_blocking=True)
        return Drawn(self.token_ids_S.to("cpu", non_blocking=True), best, margins_S)

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(self.token_ids_S.tolist())

    @property
    def logprobs(self) -> tuple[TokenLogprobs | None, ...]:
        """Empty when no row asked."""
        return () if self.best is None else self.best.logprobs(self.token_ids)

    @property
    def margins(self) -> tuple[float, ...]:
        """Empty unless they are recorded."""
        return () if self.margins_S is None else tuple(self.margins_S.tolist())


@dataclass(frozen=True, slots=True)
class Best:
    """Logprobs of the A draws that ask for them: of the token drawn, and the most likely K."""

    counts: tuple[int | None, ...]  # of each draw: how many it asks for
    chosen_A: Tensor
    values_AK: Tensor
    token_ids_AK: Tensor

    def to_host(self) -> "Best":
        parts = (self.chosen_A, self.values_AK, self.token_ids_AK)
        return Best(self.counts, *(part.to("cpu", non_blocking=True) for part in parts))

    def logprobs(self, token_ids: Sequence[int]) -> tuple[TokenLogprobs | None, ...]:
        found: list[TokenLogprobs | None] = []
        asked = zip(self.chosen_A.tolist(), self.values_AK.tolist(), self.token_ids_AK.tolist(), strict=True)
        for token_id, count in zip(token_ids, self.counts, strict=True):
            if count is None:
                found.append(None)
                continue
            chosen, values, ids = next(asked)
            found.append(TokenLogprobs(token_id, chosen, tuple(zip(ids[:count], values[:count], strict=True))))
        return tuple(found)
