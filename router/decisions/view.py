"""What placement sees of the workers: values that nobody changes, made by `views`. Pure.

Placement looks at every worker for every request, and of a thousand workers a handful changed since the last one. So what
it compares all of them by lies in columns, a Pool for each side; a view that follows another takes them over.
"""

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import compress
from math import ceil
from typing import NamedTuple

from headrace.blocks import BlockHasher
from headrace.costmodel import CostModel
from headrace.values import Compatibility, Load, PrefillTarget, Role, WorkerInfo
from router.decisions.ledger import NOTHING_BESIDE, Beside

NUM_FIGURES = 4


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
        # A sequence's last token is never written: blocks hold one less than its context has.
        held = min(capacity.max_context_tokens, capacity.num_blocks * same.block_size + 1)
        self.worker_id = info.worker_id
        self.prefills = role.prefills
        self.decodes = role.decodes
        self.decode_limit = held if self.decodes and not self.draining else -1
        self.prefill_limit = capacity.max_context_tokens if self.prefills and not self.draining else -1
        self.max_num_seqs = capacity.max_num_seqs
        self.max_step_tokens = capacity.max_step_tokens
        self.max_context_tokens = held
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


class Side(NamedTuple):
    """What a worker may serve: the longest prompt and output that it takes there (below 0: none), and by which figures it
    is compared with others."""

    limit: Callable[[WorkerView], int]
    figures: Callable[[WorkerView], tuple[float, float, float, float]]


def _decode_figures(worker: WorkerView) -> tuple[float, float, float, float]:
    return worker.step_seconds, worker.context_seconds, worker.free_slots, worker.free_tokens


def _prefill_figures(worker: WorkerView) -> tuple[float, float, float, float]:
    cost = worker.cost
    token, context = cost.prefill_token_seconds, cost.prefill_token_context_seconds
    return worker.begin_seconds, token, context, worker.load.num_waiting


DECODES = Side(lambda worker: worker.decode_limit, _decode_figures)
PREFILLS = Side(lambda worker: worker.prefill_limit, _prefill_figures)


class Members:
    """Who is in a pool, in the order of the view, and what of them seldom changes. Pools share it."""

    __slots__ = ("ejected_until", "ids", "last_ejection", "least_limit", "limits", "places")

    def __init__(self, ids: Sequence[str], limits: Sequence[int], ejected_until: Sequence[float]) -> None:
        self.ids = ids
        self.limits = limits
        self.ejected_until = ejected_until
        self.places = {worker_id: at for at, worker_id in enumerate(ids)}
        self.least_limit = min(limits, default=0)
        self.last_ejection = max(ejected_until, default=0.0)


@dataclass(slots=True, eq=False)
class Pool:
    """The workers that one side may choose among, and their figures: `columns` in the order of the side's, each of plain
    numbers in a row, for reading an attribute of a thousand scattered objects takes longer than the sums. Nobody changes
    one."""

    side: Side
    members: Members
    workers: Sequence[WorkerView]
    columns: "Sequence[array[float]]"

    @classmethod
    def of(cls, side: Side, workers: Sequence[WorkerView]) -> "Pool":
        members = Members(
            [worker.worker_id for worker in workers],
            [side.limit(worker) for worker in workers],
            [worker.ejected_until for worker in workers],
        )
        rows = [side.figures(worker) for worker in workers]
        return cls(side, members, workers, [array("d", [row[at] for row in rows]) for at in range(NUM_FIGURES)])

    def only(self, chosen: Sequence[bool]) -> "Pool":
        """Those of its workers."""
        members = Members(
            list(compress(self.members.ids, chosen)),
            list(compress(self.members.limits, chosen)),
            list(compress(self.members.ejected_until, chosen)),
        )
        columns = [array("d", compress(column, chosen)) for column in self.columns]
        return Pool(self.side, members, list(compress(self.workers, chosen)), columns)

    def after(self, changed: Sequence[WorkerView]) -> "Pool":
        """The pool with these as they are now; those that are not of it do not count."""
        places, figures_of = self.members.places, self.side.figures
        workers, columns = list(self.workers), [column[:] for column in self.columns]
        first, second, third, fourth = columns
        for worker in changed:
            at = places.get(worker.worker_id)
            if at is not None:
                workers[at] = worker
                first[at], second[at], third[at], fourth[at] = figures_of(worker)
        return Pool(self.side, self.members, workers, columns)


@dataclass(slots=True)
class View:
    """All workers. Nobody changes one: it is not frozen because its pools are made when the first one asks."""

    workers: tuple[WorkerView, ...] = ()
    _decodes: Pool | None = field(default=None, init=False, repr=False, compare=False)
    _prefills: Pool | None = field(default=None, init=False, repr=False, compare=False)

    def find(self, worker_id: str) -> WorkerView | None:
        return next((worker for worker in self.workers if worker.worker_id == worker_id), None)

    @property
    def decodes(self) -> Pool:
        """Who takes requests to decode."""
        if self._decodes is None:
            self._decodes = Pool.of(DECODES, [worker for worker in self.workers if worker.decode_limit >= 0])
        return self._decodes

    @property
    def prefills(self) -> Pool:
        """Who takes prompts to compute."""
        if self._prefills is None:
            self._prefills = Pool.of(PREFILLS, [worker for worker in self.workers if worker.prefill_limit >= 0])
        return self._prefills

    def after(self, workers: tuple[WorkerView, ...], changed: Sequence[WorkerView]) -> "View":
        """The view of these, of whom `changed` alone are not as they are here, and may serve what they did."""
        view = View(workers)
        if self._decodes is not None:
            view._decodes = self._decodes.after(changed)
        if self._prefills is not None:
            view._prefills = self._prefills.after(changed)
        return view

    def only(self, chosen: Callable[[WorkerView], bool]) -> "View":
        """The view of some."""
        view = View(tuple([worker for worker in self.workers if chosen(worker)]))
        for pool in (self.decodes, self.prefills):
            its = pool.only([chosen(worker) for worker in pool.workers])
            if pool.side is DECODES:
                view._decodes = its
            else:
                view._prefills = its
        return view
