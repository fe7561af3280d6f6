"""The plans: what computes in the next step.

A plan is made in named passes (see Scheduler.schedule): begin, decode, join_arrived, resume, Running.start for each new
prompt, prefill, finish.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import replace

from headrace.errors import InternalError
from workers.scheduling.outcomes import ChunkDone, SchedulerLimits
from workers.scheduling.plan import RowStart, RowWork, StepPlan
from workers.scheduling.results import final_chunk
from workers.scheduling.running import Fit, Flight, Running, age, held
from workers.scheduling.sequence import Kind, Sequence, Stage, num_blocks_for
from workers.scheduling.turns import num_groups, prompt_share, whose_turn

# One a row and step: past the field-by-field constructor of a named tuple.
_row_work = tuple.__new__


class Batch:
    """Makes the plans of one Scheduler, on what its Running owns. `ahead` collects what they will make final, for the
    scheduler to take."""

    def __init__(self, limits: SchedulerLimits, running: Running) -> None:
        self.ahead: list[ChunkDone] = []
        self._limits = limits
        self._running = running
        self._ledger = running.ledger
        self._block_size = running.ledger.block_size
        self._plans_in_flight, self._plan_tokens = limits.plans_in_flight, limits.plan_tokens
        # the plan being made
        self._number = 0
        self._budget = 0
        self._work: list[RowWork] = []
        self._sequences: list[Sequence] = []
        self._starts: list[RowStart] = []
        self._num_decodes = 0
        self._num_turns = 1

    # -- a plan, pass by pass

    def begin(self) -> None:
        if len(self._running.flights) >= self._plans_in_flight:
            raise InternalError(f"{self._plans_in_flight} plans are in flight, and no more may be")
        self._budget = self._plan_tokens
        self._work = []
        self._sequences = []
        self._starts = []
        self._num_decodes = 0

    def decode(self) -> None:
        """One token of every running sequence whose next token is not sure to be its last."""
        work, sequences = self._work, self._sequences
        running = Stage.RUNNING
        for seq in self._turn():
            position = seq.num_scheduled
            if position >= seq.end_position or seq.stage is not running:
                continue
            new_blocks: tuple[int, ...] = ()
            if position >= seq.fill_at:
                if not self._running.fill(seq, sequences):
                    continue
                new_blocks = self._unsent(seq)
            outputs = seq.outputs
            known = (outputs[-1],) if position + 1 == seq.num_prompt + len(outputs) else None
            seq.num_scheduled = position + 1
            work.append(_row_work(RowWork, (seq.row, position, 1, known, new_blocks, 1)))
            sequences.append(seq)
        self._num_decodes = len(work)
        self._budget -= len(work)

    def _turn(self) -> SequenceOf[Sequence]:
        decoding, flights, number = self._running.decoding, self._running.flights, self._number + 1
        if self._limits.num_micro_batches == 1:
            return tuple(decoding)
        num_sequences = len(decoding) + len(self._running.prefilling) + len(self._running.arrived)
        self._num_turns = num_groups(self._limits.num_micro_batches, num_sequences)
        return whose_turn(decoding, number, flights[0].number if flights else number, self._num_turns)

    def join_arrived(self) -> None:
        """Sequences whose blocks came from a peer, before any prompt."""
        for seq in tuple(self._running.arrived):
            if not self._running.free_rows or self._budget == 0:
                break
            if seq.stage is not Stage.ARRIVED or not self._running.fill(seq, self._sequences):
                continue
            self._running.arrived.remove(seq)
            self._running.take_row(seq)
            self._running.decoding.append(seq)
            new_blocks = self._unsent(seq)
            position = seq.num_scheduled
            seq.num_scheduled = position + 1
            self._add(seq, RowWork(seq.row, position, 1, (seq.outputs[-1],), new_blocks, 1))
            self._num_decodes += 1

    def resume(self, now: float) -> bool:
        """Preempted sequences, oldest first. Whether none is left: nothing new starts before."""
        if not self._running.preempted:
            return True
        for seq in sorted(self._running.preempted, key=age):
            match self._running.fit(seq):
                case Fit() as fit if (
                    len(self._running.free_rows) >= self._running.rows_needed(seq)
                    and seq.num_tokens - len(fit.hits) * self._block_size <= self.prompt_budget
                ):
                    self._running.preempted.remove(seq)
                    self._running.start(seq, fit, now)
                case _:
                    return False
        return True

    @property
    def prompt_budget(self) -> int:
        """The most tokens that a prompt may have to compute to be taken into this step; 0 or less: none is taken.

        Any prompt may take what running ones leave of the budget. While the first of these needs several steps, prompts
        that fit whole into what others leave of half of it pass beside it."""
        queue = self._running.prefilling
        if not queue or not self._is_long(queue[0]):
            left = self._budget - sum(seq.num_tokens - seq.num_scheduled for seq in queue)
            return self._limits.max_context_tokens if left > 0 else 0
        return self._budget // 2 - sum(seq.num_tokens - seq.num_scheduled for seq in queue[1:])

    def prefill(self, *, others_wait: bool) -> None:
        """Chunks of prompts, oldest first. While the first needs several steps, prompts that fit whole into half of the
        budget pass beside it. With several stages prompts are shared out over plans, where no `others_wait` behind them."""
        if not self._running.prefilling:
            return
        queue = tuple(self._running.prefilling)
        if self._limits.num_micro_batches > 1 and not others_wait:
            left = sum(seq.num_tokens - seq.num_scheduled for seq in queue)
            self._budget = min(self._budget, prompt_share(left, self._limits.num_micro_batches))
        head = queue[0] if queue and self._is_long(queue[0]) else None
        if head is not None and len(queue) > 1:
            room = self._budget // 2
            for seq in queue[1:]:
                num_tokens = seq.num_tokens - seq.num_scheduled
                if num_tokens <= room and seq.stage is Stage.RUNNING:
                    before = self._budget
                    self._chunk(seq, num_tokens)
                    room -= before - self._budget
            queue = (head,)
        for seq in queue:
            if self._budget == 0:
                break
            if seq.stage is Stage.RUNNING:
                self._chunk(seq, self._budget)

    def finish(self) -> StepPlan | None:
        """The plan, now in flight; None when nothing can be computed."""
        if not self._work:
            return None
        self._number += 1
        if self._limits.num_micro_batches > 1:
            for seq in self._sequences:
                seq.planned = self._number
        running, copies = self._running, tuple(self._running.copies.values())
        guards = [guard for _, _, guard in copies]
        running.flights.append(Flight(self._number, self._sequences, self._work, self._num_decodes, guards))
        plan = StepPlan(
            self._number,
            tuple(self._work),
            self._num_decodes,
            tuple(self._starts),
            tuple(running.ends),
            self._ledger.drain_fresh(),
            tuple([(source, target) for source, target, _ in copies]) if copies else (),
            self._num_turns,
        )
        if running.ends:
            running.ends = []
        if copies:
            running.copies = {}
        return plan

    def _chunk(self, seq: Sequence, limit: int) -> None:
        start, total = seq.num_scheduled, seq.num_tokens
        end = min(start + limit, total)
        num_held = len(seq.blocks)
        needed = num_blocks_for(end, self._block_size) - num_held
        if needed > self._ledger.available and not self._running.make_room(seq, needed, self._sequences):
            if seq.stage is not Stage.RUNNING:
                return
            end = min(end, (num_held + self._ledger.available) * self._block_size)
            if end <= start:
                return
            needed = num_blocks_for(end, self._block_size) - num_held
        if needed > 0:
            self._ledger.allocate(held(seq), needed)
            seq.reserved -= needed
            self._running.reserved_blocks -= needed
        num_samples = seq.num_samples if end == total else 0
        new_blocks = self._unsent(seq)
        seq.num_scheduled = end
        self._add(seq, RowWork(seq.row, start, end - start, seq.tokens(start, end), new_blocks, num_samples))
        if seq.state.ahead and (chunk := final_chunk(self._ledger, seq, end, last=bool(num_samples))) is not None:
            self.ahead.append(replace(chunk, after_step=self._number + 1))
        if num_samples:
            self._running.prefilling.remove(seq)
            if num_samples == 1 and seq.state.kind is not Kind.TICKET:
                self._running.decoding.append(seq)
            else:
                self._running.num_forking += 1

    def _add(self, seq: Sequence, work: RowWork) -> None:
        self._work.append(work)
        self._sequences.append(seq)
        self._budget -= work.num_tokens

    def _unsent(self, seq: Sequence) -> tuple[int, ...]:
        """Blocks that the row does not know yet; begins the row with its first work."""
        if not seq.row_started:
            seq.row_started = True
            request = seq.state.request
            self._starts.append(
                RowStart(seq.row, request.prompt_token_ids, tuple(seq.outputs), request.sampling, seq.index)
            )
        blocks = seq.blocks
        new_blocks = tuple(blocks[seq.num_sent :])
        seq.num_sent = len(blocks)
        seq.fill_at = len(blocks) * self._block_size
        return new_blocks

    def _is_long(self, seq: Sequence) -> bool:
        return seq.num_tokens - seq.num_scheduled > self._budget
