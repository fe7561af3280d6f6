"""Workers as admission sees them, and who asks."""

from typing import Any

from headrace.costmodel import CostModel
from headrace.values import Load, Role
from router.decisions.admission import (
    Admission,
    Entrant,
    Rules,
)
from router.decisions.quotas import Quotas
from router.decisions.room import WORKER_BACKLOG
from router.decisions.tenants import Tenancy, Tenant
from router.decisions.view import View, WorkerView
from tests.null_worker import worker_info

TOKEN_SECONDS = 1e-4

COST = CostModel(prefill_base_seconds=0.0, prefill_token_seconds=TOKEN_SECONDS)


def view(
    *running: int,
    role: Role = Role.UNIFIED,
    max_num_seqs: int = 4,
    draining: bool = False,
    waiting_tokens: int = 0,
    cost: CostModel = COST,
) -> View:
    """A worker for each number of sequences that it runs; WORKER_BACKLOG prompts of `waiting_tokens` are before each."""
    return View(
        tuple(
            WorkerView(
                worker_info(f"w{at}", role, max_num_seqs=max_num_seqs),
                role,
                Load(WORKER_BACKLOG if waiting_tokens else 0, number, waiting_tokens),
                cost,
                100,
                draining,
            )
            for at, number in enumerate(running)
        )
    )


FULL = view(4 + WORKER_BACKLOG)
ONE_FREE = view(4 + WORKER_BACKLOG - 1)


def bounded(max_queue: int, *tenants: Tenant) -> Admission:
    return Admission(Rules(max_queue), Tenancy({tenant.name: tenant for tenant in tenants}), Quotas(tenants))


def offer(admission: Admission, name: str, at: View, *, n: int = 1, now: float = 0.0, **fields: Any) -> object:
    return admission.offer(Entrant(name, num_sequences=n, **fields), at, now)
