"""What placement sees of the workers: values that nobody changes, of their reports and the router's own ledger. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import ceil
from typing import NamedTuple, Protocol

from headrace.blocks import BlockHasher
from headrace.costmodel import CostModel
from headrace.values import Compatibility, Load, LoadReport, PrefillTarget, Role, WorkerInfo
from router.decisions.costs import Costs, is_idle
from router.decisions.health import Health
from router.decisions.ledger import NOTHING, NOTHING_BESIDE, Beside, Ledger, plus
from router.decisions.told import Told, ToldLoads


class HashClass(NamedTuple):
    """Workers of one class give the same ids to the same tokens."""

    revision: str
    kv_format: str
    block_size: int

    def hasher(self, cache_salt: str = "") -> BlockHasher:
        return BlockHasher(
            revision=self.revision, kv_format=self.kv_format, block_size=self.block_size, cache_salt=cache_salt
        )


def class_of(compatibility: Compatibility) -> HashClass:
    return HashClass(compatibility.revision, compatibility.kv_format, compatibility.block_size)


@lru_cache(maxsize=256)
def _kind(compatibility: Compatibility) -> tuple[Compatibility, HashClass]:
    """Equal ones as the same objects, so that comparing them is cheap."""
    return compatibility, class_of(compatibility)


@dataclass(slots=True)
class WorkerView:
    """One worker as it is believed to be now. `load` is net of double counting; `free_blocks` is as reported.
    `unlinked`: prefill workers whose hand-offs to this one fail, each until when it is not paired with.

    Nobody changes one; it is not frozen because freezing doubles what it costs to make one, and a decision makes several.
    The other fields follow from these; they are worked out once a change, and read once a request.

    free_tokens      tokens of KV that are neither held nor promised; below 0 when more is promised than there is
    num_sequences    running and waiting ones
    free_slots       how many more sequences the worker runs at once; below 0 when some already wait
    queue_seconds    how long the prompts that wait on the worker take to compute, step by step
    begin_seconds    that, and the base of one step more
    step_seconds     a decode step with one sequence more, without that one's tokens; each is `context_seconds`
    decode_limit     the longest prompt and output that it may decode; below 0: it takes none to decode
    prefill_limit    the same of what it may prefill
    """

    info: WorkerInfo
    role: Role
    load: Load
    cost: CostModel
    free_blocks: int
    draining: bool = False
    ejected_until: float = 0.0
    unlinked: Mapping[str, float] | None = None
    beside: Beside = NOTHING_BESIDE
    worker_id: str = field(init=False, repr=False, compare=False)
    prefills: bool = field(init=False, repr=False, compare=False)
    decodes: bool = field(init=False, repr=False, compare=False)
    free_tokens: int = field(init=False, repr=False, compare=False)
    num_sequences: int = field(init=False, repr=False, compare=False)
    free_slots: int = field(init=False, repr=False, compare=False)
    queue_seconds: float = field(init=False, repr=False, compare=False)
    begin_seconds: float = field(init=False, repr=False, compare=False)
    step_seconds: float = field(init=False, repr=False, compare=False)
    context_seconds: float = field(init=False, repr=False, compare=False)
    decode_limit: int = field(init=False, repr=False, compare=False)
    prefill_limit: int = field(init=False, repr=False, compare=False)
    max_num_seqs: int = field(init=False, repr=False, compare=False)
    max_step_tokens: int = field(init=False, repr=False, compare=False)
    max_context_tokens: int = field(init=False, repr=False, compare=False)
    compatibility: Compatibility = field(init=False, repr=False, compare=False)
    hash_class: HashClass = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        info, load, cost, role = self.info, self.load, self.cost, self.role
        same, capacity = info.compatibility, info.capacity
        waiting_tokens, num_sequences = load.waiting_prefill_tokens, load.num_running + load.num_waiting
        limit = -1 if self.draining else capacity.max_context_tokens
        self.worker_id = info.worker_id
        self.prefills = role.prefills
        self.decodes = role.decodes
        self.decode_limit = limit if self.decodes else -1
        self.prefill_limit = limit if self.prefills else -1
        self.max_num_seqs = capacity.max_num_seqs
        self.max_step_tokens = capacity.max_step_tokens
        self.max_context_tokens = capacity.max_context_tokens
        self.compatibility, self.hash_class = _kind(same)
        self.free_tokens = self.free_blocks * same.block_size - load.claimed_tokens
        self.num_sequences = max(num_sequences, 0)
        self.free_slots = capacity.max_num_seqs - num_sequences
        num_steps = ceil(waiting_tokens / capacity.max_step_tokens)
        self.queue_seconds = num_steps * cost.prefill_base_seconds + waiting_tokens * cost.prefill_token_seconds
        self.begin_seconds = self.queue_seconds + cost.prefill_base_seconds
        self.step_seconds = cost.decode_step_seconds(self._running_with(1), load.context_tokens)
        self.context_seconds = cost.decode_context_token_seconds

    def tpot_seconds(self, n: int, num_prompt_tokens: int) -> float:
        """A step's seconds once `n` samples of such a prompt have joined."""
        more = (self._running_with(n) - self._running_with(1)) * self.cost.decode_sequence_seconds if n > 1 else 0.0
        return self.step_seconds + self.context_seconds * num_prompt_tokens + more

    def _running_with(self, n: int) -> int:
        """How many sequences run at once when `n` more are here."""
        return min(self.num_sequences + n, self.info.capacity.max_num_seqs)

    @property
    def target(self) -> PrefillTarget:
        return PrefillTarget(self.info.worker_id, self.info.generation, self.info.address)


@dataclass(frozen=True, slots=True)
class View:
    workers: tuple[WorkerView, ...] = ()

    def find(self, worker_id: str) -> WorkerView | None:
        return next((worker for worker in self.workers if worker.worker_id == worker_id), None)


class Live(Protocol):
    """A worker's session, as far as the view goes."""

    info: WorkerInfo
    report: LoadReport | None


class Views:
    """Keeps the view, and makes anew only what changed since: a worker that reported, or on which this router placed
    something, or whose health changed, or of which another router told. Owned by router.requests, which passes on what it
    hears of sessions and of other routers."""

    def __init__(self, ledger: Ledger, health: Health) -> None:
        self._ledger = ledger
        self._health = health
        self._sessions: dict[str, Live] = {}
        self._views: dict[str, WorkerView] = {}
        self._last: View | None = None
        self._stale: set[str] = set()
        self._health_version = health.version
        self._told = ToldLoads()
        self._costs = Costs()
        self._costs_version = self._costs.version

    def heard(self, worker_id: str, session: Live | None, now: float) -> None:
        """The worker's session began, reported, or (None) ended."""
        if session is None:
            self._sessions.pop(worker_id, None)
            self._views.pop(worker_id, None)
            self._last = None
            self._costs.forget(worker_id)
            self._told.forget(worker_id)
        else:
            self._sessions[worker_id] = session
            self._stale.add(worker_id)
            if session.report is not None:
                report = session.report
                self._told.expire(now)
                self._told.reported(worker_id, now)
                self._costs.heard(session.info, report.cost, now, idle=is_idle(report.total))

    def told(self, told: Told, now: float) -> None:
        """Another router placed something."""
        if (load := told.load) is None:
            return
        prefill, decode = self._sessions.get(told.worker_id), self._sessions.get(load.decode)
        if prefill is not None and decode is not None:
            self._told.hear(told, load.at_most(prefill.info.capacity, decode.info.capacity), now)

    def view(self) -> View:
        """The workers as they are believed to be now."""
        stale = self._stale | self._ledger.drain_changed() | self._told.drain_changed()
        versions = self._health.version, self._costs.version
        if versions != (self._health_version, self._costs_version):
            self._health_version, self._costs_version = versions
            stale.update(self._sessions)
        for worker_id in stale:
            session = self._sessions.get(worker_id)
            if session is not None:
                self._views[worker_id] = worker_view(
                    session.info, session.report, self._ledger, self._health, self._costs, self._told
                )
                self._last = None
        self._stale.clear()
        if self._last is None:
            self._last = View(tuple(self._views.values()))
        return self._last


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


def worker_view(
    info: WorkerInfo,
    report: LoadReport | None,
    ledger: Ledger,
    health: Health,
    costs: Costs,
    told: ToldLoads | None = None,
) -> WorkerView:
    """A worker that has not reported yet is taken to be empty but for what this router and those that tell it placed
    there."""
    own, beside = ledger.own(info.worker_id), ledger.beside(info.worker_id)
    if told is not None and (others := told.of(info.worker_id)) is not NOTHING:
        own = plus(own, others)
    cost = costs.of(info, report.cost, own, report.total) if report is not None else costs.of(info, info.cost, own)
    ejected_until, unlinked = health.ejected_until(info.worker_id), health.unlinked(info.worker_id)
    if report is None:
        free_blocks = info.capacity.num_blocks
        return WorkerView(info, info.role, own, cost, free_blocks, False, ejected_until, unlinked, beside)
    return WorkerView(
        info,
        report.role,
        net_load(report.total, report.yours, own),
        cost,
        report.free_blocks,
        report.draining,
        ejected_until,
        unlinked,
        beside,
    )
