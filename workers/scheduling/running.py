"""What runs here: its rows and its blocks, room for more by preemption, and leaving.

Blocks and rows of a sequence that leaves while a plan in flight still works on it are quarantined until that plan's
result is in. Tickets are never preempted: what they announced may be read by a peer.
"""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from itertools import islice

from headrace.errors import InternalError
from workers.scheduling.blocks import BlockLedger, Holding
from workers.scheduling.outcomes import SchedulerLimits
from workers.scheduling.plan import RowWork
from workers.scheduling.sequence import Kind, Sequence, Stage, num_blocks_for


@dataclass(frozen=True, slots=True)
class Fit:
    """A sequence can start: these cached blocks are its prefix, so many more will be allocated for its known tokens."""

    hits: list[int]
    num_needed: int


@dataclass(frozen=True, slots=True)
class NoRoom:
    """It cannot start just now."""


class Flight:
    """A plan whose result is not in yet, with the sequence of each of its rows."""

    __slots__ = ("guards", "num_decodes", "number", "sequences", "work")

    def __init__(
        self, number: int, sequences: list[Sequence], work: list[RowWork], num_decodes: int, guards: list[Holding]
    ) -> None:
        self.number = number
        self.sequences = sequences
        self.work = work
        self.num_decodes = num_decodes
        self.guards = guards


class Running:
    """Owns the rows, the sequences that run, have arrived or were preempted, and the plans in flight; one per Scheduler,
    whose Batch makes the plans.

    `claimed_blocks` is the scheduler's: blocks promised to hand-offs and not yet allocated. They count as taken when
    something is to start, and so do `reserved_blocks`, promised to the prompts that run.
    `ends` and `copies` wait for the next plan; a copy's guard holds its two blocks until that plan's result is in.
    """

    def __init__(self, limits: SchedulerLimits, ledger: BlockLedger) -> None:
        self.ledger = ledger
        self.num_rows = min(limits.max_num_seqs, limits.max_step_tokens)
        self.claimed_blocks = 0
        self.reserved_blocks = 0
        self.decoding: list[Sequence] = []
        self.prefilling: list[Sequence] = []
        self.arrived: list[Sequence] = []
        self.preempted: list[Sequence] = []
        self.num_forking = 0
        self.num_preemptions = 0
        self.free_rows = list(range(self.num_rows - 1, -1, -1))
        self.flights: deque[Flight] = deque()
        self.ends: list[int] = []
        self.copies: dict[Sequence, tuple[int, int, Holding]] = {}
        self._block_size = ledger.block_size
        self._leaving: dict[Sequence, None] = {}

    @property
    def has_work(self) -> bool:
        return bool(self.decoding or self.prefilling or self.arrived or self.preempted or self.num_forking)

    # -- starting

    def fit(self, seq: Sequence) -> Fit | NoRoom:
        """Whether its known tokens fit beside what is promised, with some headroom for the growth of what decodes.

        The last known token is always computed, whatever is cached."""
        ledger = self.ledger
        num_full = (seq.num_tokens - 1) // self._block_size
        hits = ledger.match(islice(seq.extend_chain(num_full), num_full))
        needed = num_blocks_for(seq.num_tokens, self._block_size) - len(hits)
        room = ledger.available - ledger.num_idle(hits) - self.reserved_blocks - self.claimed_blocks
        headroom = 1 + ledger.num_blocks // 100 if self.decoding else 0
        return Fit(hits, needed) if needed + headroom <= room else NoRoom()

    def rows_needed(self, seq: Sequence) -> int:
        return 1 if seq.state.kind is Kind.TICKET else seq.num_samples

    def start(self, seq: Sequence, fit: Fit, now: float) -> None:
        """Takes rows and the cached prefix; the rest of its known tokens is reserved. Preempted or new alike."""
        holding = seq.holding = self.ledger.open((seq.key, seq.index))
        self.ledger.share(holding, fit.hits)
        num_cached = len(fit.hits) * self._block_size
        seq.num_computed = seq.num_scheduled = num_cached
        seq.set_published(len(fit.hits))
        seq.reserved = fit.num_needed
        self.reserved_blocks += fit.num_needed
        self.take_row(seq)
        seq.spare_rows = [self.free_rows.pop() for _ in range(self.rows_needed(seq) - 1)]
        self.prefilling.append(seq)
        if seq.state.started_at is None:
            seq.state.started_at = now
            seq.state.cached_tokens = num_cached

    def take_row(self, seq: Sequence) -> None:
        seq.row = self.free_rows.pop()
        seq.row_started = False
        seq.stage = Stage.RUNNING

    def branch(self, trunk: Sequence, sample: Sequence) -> bool:
        """Gives a sample the prompt's blocks: full ones shared, the partly filled one copied by the next plan. False
        when there is no block for the copy: the sample is then preempted, and computes the prompt's end again."""
        num_full, partial = divmod(trunk.num_prompt, self._block_size)
        ledger = self.ledger
        if partial and ledger.available == 0:
            sample.stage = Stage.PREEMPTED
            sample.state.num_preemptions += 1
            self.num_preemptions += 1
            self.preempted.append(sample)
            return False
        holding = sample.holding = ledger.open((sample.key, sample.index))
        ledger.share(holding, trunk.blocks[:num_full])
        if partial:
            source = trunk.blocks[num_full]
            (target,) = ledger.allocate(holding, 1)
            guard = ledger.open(("copy", sample.key, sample.index))
            ledger.share(guard, (source, target))
            ledger.quarantine(guard)
            self.copies[sample] = (source, target, guard)
        sample.num_computed = sample.num_scheduled = trunk.num_prompt
        sample.set_published(num_full)
        return True

    def publish(self, seq: Sequence) -> None:
        """Its full blocks hold final content: others may share them."""
        num_full = seq.num_computed // self._block_size
        chain = seq.extend_chain(num_full)
        for index in range(seq.num_published, num_full):
            self.ledger.publish(held(seq), index, chain[index])
        seq.set_published(num_full)

    # -- room

    def fill(self, seq: Sequence, planned: Collection[Sequence]) -> bool:
        """Sees that it has a block for its next position; False when it has to wait a step for one."""
        if seq.num_scheduled == len(seq.blocks) * self._block_size:
            if not self.make_room(seq, 1, planned):
                return False
            self.ledger.allocate(held(seq), 1)
        return True

    def make_room(self, seq: Sequence, num_blocks: int, planned: Collection[Sequence]) -> bool:
        """Whether so many blocks are available, after preempting younger sequences that are not `planned` in this step.
        False: it waits a step (blocks are on their way, or others are ahead of it)."""
        while self.ledger.available < num_blocks:
            if self._leaving:
                return False
            spared = set(planned)
            victims = [
                other
                for other in (*self.decoding, *self.prefilling, *self.arrived)
                if other not in spared and self._yields(other, seq)
            ]
            if not victims:
                return False
            self.preempt(max(victims, key=age))
        return True

    def _yields(self, other: Sequence, seq: Sequence) -> bool:
        return (
            _preemptible(other)
            and (seq.state.kind is Kind.TICKET or age(other) > age(seq))
            and self.ledger.num_exclusive(held(other)) > 0
        )

    def break_deadlock(self) -> bool:
        """Nothing can be planned. If nothing is in flight either, yet something runs: preempts the youngest, so that the
        others (or a hand-off that waits for its blocks) can go on. Whether there was one."""
        if self.flights:
            return False
        victims = [seq for seq in (*self.decoding, *self.prefilling, *self.arrived) if _preemptible(seq)]
        if not victims:
            return False
        self.preempt(max(victims, key=age))
        return True

    # -- leaving

    def preempt(self, seq: Sequence) -> None:
        """Takes its blocks and row away; it will be computed again, from what is then cached."""
        seq.state.num_preemptions += 1
        self.num_preemptions += 1
        self.leave(seq, Stage.PREEMPTED)

    def preempt_at(self, position: int) -> bool:
        """Preempts the oldest that runs, or has arrived, with so many positions scheduled; whether there was one."""
        reached = [
            seq
            for seq in (*self.decoding, *self.prefilling, *self.arrived)
            if _preemptible(seq) and seq.num_scheduled >= position
        ]
        if not reached:
            return False
        self.preempt(min(reached, key=age))
        return True

    def leave(self, seq: Sequence, stage: Stage) -> None:
        """A running, arrived or preempted sequence goes to `stage`: PREEMPTED, PINNED or ENDED. What it holds is given
        back once no plan in flight works on it (a pinned one keeps its blocks)."""
        before, seq.stage = seq.stage, stage
        if before is Stage.RUNNING:
            self._drop_running(seq)
        elif before is Stage.ARRIVED:
            self.arrived.remove(seq)
        elif before is Stage.PINNED:
            self.ledger.close(held(seq))
            seq.holding = None
            return
        elif before is Stage.PREEMPTED:
            if seq.holding is None:
                self.preempted.remove(seq)
            return
        self.reserved_blocks -= seq.reserved
        seq.reserved = 0
        if self._is_in_flight(seq):
            self.ledger.quarantine(held(seq))
            self._leaving[seq] = None
        else:
            self._vacate(seq, had_row=before is Stage.RUNNING)

    def _is_in_flight(self, seq: Sequence) -> bool:
        return any(seq in flight.sequences for flight in self.flights)

    def _drop_running(self, seq: Sequence) -> None:
        if seq in self.decoding:
            self.decoding.remove(seq)
        elif seq in self.prefilling:
            self.prefilling.remove(seq)
        else:
            self.num_forking -= 1

    def _vacate(self, seq: Sequence, had_row: bool) -> None:
        if had_row:
            if seq.row_started:
                self.ends.append(seq.row)
            self.free_rows.append(seq.row)
            self.free_rows += seq.spare_rows
            seq.spare_rows = []
            seq.row_started = False
        if seq.stage is Stage.PINNED:
            return
        if seq in self.copies:
            _, _, guard = self.copies.pop(seq)
            self.ledger.close(guard)
        self.ledger.close(held(seq))
        seq.holding = None
        seq.rewind()
        if seq.stage is Stage.PREEMPTED:
            self.preempted.append(seq)

    def landed(self, seq: Sequence) -> None:
        """A plan that worked on it is over: if it has left and no other plan does, what it held is given back."""
        if seq in self._leaving and not self._is_in_flight(seq):
            del self._leaving[seq]
            self._vacate(seq, had_row=True)


def held(seq: Sequence) -> Holding:
    if seq.holding is None:
        raise InternalError(f"{seq!r} holds no blocks")
    return seq.holding


def age(seq: Sequence) -> tuple[int, int, int]:
    """Sorts by priority, then arrival, then sample: the greatest yields first."""
    state = seq.state
    return (*state.rank, seq.index)


def _preemptible(seq: Sequence) -> bool:
    return seq.stage in (Stage.RUNNING, Stage.ARRIVED) and seq.state.kind is not Kind.TICKET
