"""What workers' steps cost, as they report it; whoever has not measured a kind of work yet is lent another's figures. Pure.

A worker reports its own fit, line by line (prefill, decode, transfer), and the guess it started from where it has no fit.
Priced by that guess, which is a laptop's, it would look slower than all who have measured, get nothing to do, and so
never measure. Workers of one class and layout lend to each other: the last one heard of lends.
"""

from dataclasses import replace

from headrace.costmodel import CostModel
from headrace.values import Compatibility, ParallelLayout, WorkerInfo

GUESS = CostModel()
LINES = tuple(
    tuple(name for name in CostModel.__dataclass_fields__ if name.startswith(line))
    for line in ("prefill", "decode", "transfer")
)
Kind = tuple[Compatibility, ParallelLayout]


class Costs:
    """Owns the figures that are lent, of one router. `version` changes when a kind of work is measured for the first
    time: from then on all who have not measured it are priced anew."""

    def __init__(self) -> None:
        self.version = 0
        self._lent: dict[Kind, dict[str, float]] = {}
        self._complete: dict[str, CostModel] = {}  # by worker: its last report, where it has measured everything

    def heard(self, info: WorkerInfo, cost: CostModel) -> None:
        """The worker reported this."""
        lent = self._lent.setdefault((info.compatibility, info.layout), {})
        measured = [line for line in LINES if _measured(cost, line)]
        for line in measured:
            self.version += line[0] not in lent
            lent.update((name, getattr(cost, name)) for name in line)
        if len(measured) == len(LINES):
            self._complete[info.worker_id] = cost
        else:
            self._complete.pop(info.worker_id, None)

    def forget(self, worker_id: str) -> None:
        """The worker is gone; what it lent stays."""
        self._complete.pop(worker_id, None)

    def of(self, info: WorkerInfo, cost: CostModel) -> CostModel:
        """The worker's cost, with what it has not measured itself lent by others."""
        if self._complete.get(info.worker_id) is cost:
            return cost
        lent = self._lent.get((info.compatibility, info.layout))
        if not lent:
            return cost
        missing = {name: lent[name] for line in LINES if line[0] in lent and not _measured(cost, line) for name in line}
        return replace(cost, **missing) if missing else cost


def _measured(cost: CostModel, line: tuple[str, ...]) -> bool:
    return any(getattr(cost, name) != getattr(GUESS, name) for name in line)
