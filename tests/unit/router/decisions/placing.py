"""Workers as placement sees them, of one price, and what is asked of them."""

from dataclasses import dataclass

from headrace.costmodel import CostModel
from headrace.values import Load, LoadReport, Role, WorkerInfo
from router.decisions.placement import Ask, Placed, place
from router.decisions.view import View, WorkerView
from tests.null_worker import worker_info

COST = CostModel(
    prefill_base_seconds=0.01,
    prefill_token_seconds=1e-3,
    prefill_token_context_seconds=0.0,
    decode_base_seconds=0.01,
    decode_sequence_seconds=1e-3,
    decode_context_token_seconds=1e-6,
    transfer_base_seconds=1e-3,
    transfer_bytes_per_second=1e9,
)


def worker(
    name: str,
    role: Role,
    load: Load | None = None,
    *,
    free_blocks: int = 1000,
    draining: bool = False,
    ejected_until: float = 0.0,
    revision: str = "r1",
    max_num_seqs: int = 64,
    cost: CostModel = COST,
) -> WorkerView:
    info = worker_info(name, role, block_size=32, revision=revision, max_num_seqs=max_num_seqs)
    return WorkerView(info, role, load or Load(), cost, free_blocks, draining, ejected_until)


def p(name: str, **fields: object) -> WorkerView:
    return worker(name, Role.PREFILL, **fields)  # type: ignore[arg-type]


def d(name: str, **fields: object) -> WorkerView:
    return worker(name, Role.DECODE, **fields)  # type: ignore[arg-type]


def u(name: str, **fields: object) -> WorkerView:
    return worker(name, Role.UNIFIED, **fields)  # type: ignore[arg-type]


ASK = Ask(num_prompt_tokens=1000, max_tokens=100)


def placed(ask: Ask, *workers: WorkerView, now: float = 0.0) -> tuple[str, str | None]:
    placement = place(ask, View(workers), now)
    assert isinstance(placement, Placed), placement
    return placement.decode.worker_id, placement.prefill.worker_id if placement.prefill else None


@dataclass
class Session:
    info: WorkerInfo
    report: LoadReport | None = None
    lost: str | None = None
