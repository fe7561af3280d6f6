"""What placement sees of the workers: frozen values, made from their reports and the router's own ledger. Pure."""

from dataclasses import dataclass

from headrace.costmodel import CostModel
from headrace.values import Load, LoadReport, PrefillTarget, Role, WorkerInfo
from router.decisions.health import Health
from router.decisions.ledger import Ledger


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker as it is believed to be now. `load` is net of double counting; `free_blocks` is as reported."""

    info: WorkerInfo
    role: Role
    load: Load
    cost: CostModel
    free_blocks: int
    draining: bool = False
    ejected_until: float = 0.0

    @property
    def worker_id(self) -> str:
        return self.info.worker_id

    @property
    def target(self) -> PrefillTarget:
        return PrefillTarget(self.info.worker_id, self.info.generation, self.info.address)

    @property
    def free_tokens(self) -> int:
        """Tokens of KV that are neither held nor promised; below 0 when more is promised than there is."""
        return self.free_blocks * self.info.compatibility.block_size - self.load.claimed_tokens

    @property
    def free_slots(self) -> int:
        """How many more sequences the worker runs at once; below 0 when some already wait."""
        return self.info.capacity.max_num_seqs - self.load.num_running - self.load.num_waiting


@dataclass(frozen=True, slots=True)
class View:
    workers: tuple[WorkerView, ...] = ()

    def find(self, worker_id: str) -> WorkerView | None:
        return next((worker for worker in self.workers if worker.worker_id == worker_id), None)


def net_load(total: Load, yours: Load, own: Load) -> Load:
    """(total − yours) + own: others' work as the worker reports it, and ours as we know it (design 5.6).

    Blocks are only the worker's to know and stay as reported. A report may be older than what left since; nothing
    goes below zero.
    """
    return Load(
        num_waiting=max(total.num_waiting - yours.num_waiting, 0) + own.num_waiting,
        num_running=max(total.num_running - yours.num_running, 0) + own.num_running,
        waiting_prefill_tokens=max(total.waiting_prefill_tokens - yours.waiting_prefill_tokens, 0)
        + own.waiting_prefill_tokens,
        context_tokens=max(total.context_tokens - yours.context_tokens, 0) + own.context_tokens,
        used_blocks=total.used_blocks,
        pinned_blocks=total.pinned_blocks,
        claimed_tokens=max(total.claimed_tokens - yours.claimed_tokens, 0) + own.claimed_tokens,
    )


def worker_view(info: WorkerInfo, report: LoadReport | None, ledger: Ledger, health: Health) -> WorkerView:
    """A worker that has not reported yet is taken to be empty but for what this router placed on it."""
    own = ledger.own(info.worker_id)
    ejected_until = health.ejected_until(info.worker_id)
    if report is None:
        return WorkerView(info, info.role, own, info.cost, info.capacity.num_blocks, ejected_until=ejected_until)
    return WorkerView(
        info,
        report.role,
        net_load(report.total, report.yours, own),
        report.cost,
        report.free_blocks,
        report.draining,
        ejected_until,
    )
