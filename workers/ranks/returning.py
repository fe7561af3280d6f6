"""The way of drawn tokens back to where the next step begins."""

from collections import deque

import torch
from torch import Tensor

from workers.models.parallel import RankContext, Work
from workers.ranks.rows import Rows

UNDER_WAY = 2


class Returning:
    """From tp rank 0 of the last stage to that stage's ranks, and from each of them to its peer on the first stage.

    The first stage waits for a step's tokens only when a later step computes one of them, or when UNDER_WAY steps have
    drawn: until then it computes other rows' work. Both ends count alike, so nothing is left over.
    """

    def __init__(self, context: RankContext, rows: Rows) -> None:
        self._context = context
        self._rows = rows
        self._expected: deque[tuple[Tensor, Tensor, Work]] = deque()
        self._given: deque[tuple[Tensor, Work]] = deque()

    def give(self, rows: Tensor, token_ids: Tensor) -> None:
        """Last stage: what `rows` drew; on ranks other than tp rank 0 token_ids is filled in here."""
        self._context.share(token_ids)
        if self._context.is_first_stage:
            self._rows.sampled(rows, token_ids)
            return
        self._given.append((token_ids, self._context.send(token_ids, 0)))
        if len(self._given) > UNDER_WAY:
            self._given.popleft()[1].wait()

    def expect(self, rows: Tensor) -> None:
        """First stage of several: `rows` draw in the step that was just passed on."""
        if not self._context.is_first_stage or not rows.shape[0]:
            return
        if len(self._expected) == UNDER_WAY:
            self.collect()
        token_ids = torch.empty_like(rows)
        self._expected.append((rows, token_ids, self._context.receive(token_ids, self._context.layout.pp - 1)))

    def collect(self) -> None:
        """Waits for all tokens that are expected, and gives them to their rows."""
        while self._expected:
            rows, token_ids, work = self._expected.popleft()
            work.wait()
            self._rows.sampled(rows, token_ids)

    def settle(self) -> None:
        """Nothing is under way when this returns."""
        self.collect()
        while self._given:
            self._given.popleft()[1].wait()
