"""The way of drawn tokens back to where the next step begins."""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

from torch import Tensor

from workers.models.parallel import RankContext, Work
from workers.ranks.rows import Rows


@dataclass(frozen=True, slots=True)
class _Draw:
    """What a step draws, on its way: its rows, and where their tokens arrive."""

    rows: frozenset[int]
    rows_there: Tensor
    token_ids: Tensor
    work: Work


class Returning:
    """From tp rank 0 of the last stage to that stage's ranks, and from each of them to its peer on the first stage.

    The first stage waits for a step's tokens only when a later step computes one of them, or when as many steps have drawn
    as may be under way: until then it computes other rows' work. Both ends count alike, so nothing is left over.
    """

    def __init__(self, context: RankContext, rows: Rows) -> None:
        self._context = context
        self._rows = rows
        self._under_way = 1 + context.layout.pp
        self._expected: deque[_Draw] = deque()
        self._given: deque[tuple[Tensor, Work]] = deque()

    def give(self, rows: Tensor, token_ids: Tensor) -> None:
        """Last stage: what `rows` drew; on ranks other than tp rank 0 token_ids is filled in here."""
        self._context.share(token_ids)
        if self._context.is_first_stage:
            self._rows.sampled(rows, token_ids)
            return
        self._given.append((token_ids, self._context.send(token_ids, 0)))
        if len(self._given) > self._under_way:
            self._given.popleft()[1].wait()

    def expect(self, rows: Collection[int], rows_there: Tensor) -> None:
        """First stage of several: these rows draw in the step that was just passed on."""
        if not self._context.is_first_stage or not rows:
            return
        if len(self._expected) == self._under_way:
            self._collect_oldest()
        token_ids = rows_there.new_empty(rows_there.shape)
        work = self._context.receive(token_ids, self._context.layout.pp - 1)
        self._expected.append(_Draw(frozenset(rows), rows_there, token_ids, work))

    @property
    def expects(self) -> bool:
        """Whether anything is on its way to here."""
        return bool(self._expected)

    def collect(self, rows: Collection[int]) -> None:
        """Waits for what these rows drew, and with it for all that was drawn before, and gives it to its rows."""
        last = max((at for at, draw in enumerate(self._expected) if not draw.rows.isdisjoint(rows)), default=-1)
        for _ in range(last + 1):
            self._collect_oldest()

    def _collect_oldest(self) -> None:
        draw = self._expected.popleft()
        draw.work.wait()
        self._rows.sampled(draw.rows_there, draw.token_ids)

    def settle(self) -> None:
        """Nothing is under way when this returns."""
        while self._expected:
            self._collect_oldest()
        while self._given:
            self._given.popleft()[1].wait()
