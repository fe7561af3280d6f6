"""What runs: rows, the growth of block tables, preemption, and the plans in flight.

A plan is made in named passes (see Scheduler.schedule): begin, decode, join_arrived, resume, start…, prefill, finish.
Blocks and rows of a sequence that leaves while a plan in flight still works on it are quarantined until that plan's
result is in. Tickets are never preempted: what they announced may be read by a peer.
"""

from collections import deque
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import islice

from headrace.errors import InternalError
from headrace.values import SequenceOutput, TokenLogprobs
from workers.blocks import BlockLedger, Holding
from workers.outcomes import ChunkDone, FirstToken, SchedulerLimits, StepEvents
from workers.plan import RowStart, RowWork, StepPlan, StepResult
from workers.sequence import Kind, RequestState, Sequence, Stage, num_blocks_for

_row_work = tuple.__new__


@dataclass(frozen=True, slots=True)
class Fit:
    """A sequence can start: these cached blocks are its prefix, so many more will be allocated for its known tokens."""

    hits: list[int]
    num_needed: int


@dataclass(frozen=True, slots=True)
class NoRoom:
    """It cannot start just now."""


class _Flight:
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


class Batch:
    """Owns the rows, the running sequences, and those that wait to run again; one per Scheduler.

    `claimed_blocks` is the scheduler's: blocks promised to hand-offs and not yet allocated. They count as taken when
    something is to start. `over` collects requests whose last token came, for the scheduler to take.
    """

    def __init__(self, limits: SchedulerLimits, ledger: BlockLedger) -> None:
        self.ledger = ledger
        self.block_size = ledger.block_size
        self.limits = limits
        self.num_rows = min(limits.max_num_seqs, limits.max_step_tokens)
        self.claimed_blocks = 0
        self.reserved_blocks = 0
        self.decoding: list[Sequence] = []
        self.prefilling: list[Sequence] = []
        self.arrived: list[Sequence] = []
        self.preempted: list[Sequence] = []
        self.num_forking = 0
        self.num_preemptions = 0
        self.over: list[RequestState] = []
        self._free_rows = list(range(self.num_rows - 1, -1, -1))
        self._flights: deque[_Flight] = deque()
        self._leaving: dict[Sequence, None] = {}
        self._ends: list[int] = []
        self._copies: dict[Sequence, tuple[int, int, Holding]] = {}
        # the plan being made
        self._number = 0
        self._budget = 0
        self._work: list[RowWork] = []
        self._sequences: list[Sequence] = []
        self._starts: list[RowStart] = []
        self._num_decodes = 0

    # -- views

    @property
    def num_running(self) -> int:
        return len(self.decoding) + len(self.prefilling) + self.num_forking

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    @property
    def has_work(self) -> bool:
        return bool(self.decoding or self.prefilling or self.arrived or self.preempted)

    @property
    def num_in_flight(self) -> int:
        return len(self._flights)

    def fit(self, seq: Sequence) -> Fit | NoRoom:
        """Whether its known tokens fit beside what is promised, with some headroom for the growth of what decodes.

        The last known token is always computed, whatever is cached."""
        ledger = self.ledger
        num_full = (seq.num_tokens - 1) // self.block_size
        hits = ledger.match(islice(seq.extend_chain(num_full), num_full))
        needed = num_blocks_for(seq.num_tokens, self.block_size) - len(hits)
        room = ledger.available - ledger.num_idle(hits) - self.reserved_blocks - self.claimed_blocks
        headroom = 1 + ledger.num_blocks // 100 if self.decoding else 0
        return Fit(hits, needed) if needed + headroom <= room else NoRoom()

    # -- a plan, pass by pass

    def begin(self) -> None:
        if len(self._flights) > 1:
            raise InternalError("at most one plan may be in flight when the next is made")
        self._budget = self.limits.max_step_tokens
        self._work = []
        self._sequences = []
        self._starts = []
        self._num_decodes = 0

    def decode(self) -> None:
        """One token of every running sequence whose next token is not sure to be its last."""
        work, sequences = self._work, self._sequences
        running = Stage.RUNNING
        for seq in tuple(self.decoding):
            position = seq.num_scheduled
            if position >= seq.end_position or seq.stage is not running:
                continue
            new_blocks: tuple[int, ...] = ()
            if position >= seq.fill_at:
                if not self._fill(seq):
                    continue
                new_blocks = self._unsent(seq)
            outputs = seq.outputs
            known = (outputs[-1],) if position + 1 == seq.num_prompt + len(outputs) else None
            seq.num_scheduled = position + 1
            work.append(_row_work(RowWork, (seq.row, position, 1, known, new_blocks, 1)))
            sequences.append(seq)
        self._num_decodes = len(work)
        self._budget -= len(work)

    def join_arrived(self) -> None:
        """Sequences whose blocks came from a peer, before any prompt."""
        for seq in tuple(self.arrived):
            if not self._free_rows or self._budget == 0:
                break
            if seq.stage is not Stage.ARRIVED or not self._fill(seq):
                continue
            self.arrived.remove(seq)
            self._take_row(seq)
            self.decoding.append(seq)
            new_blocks = self._unsent(seq)
            position = seq.num_scheduled
            seq.num_scheduled = position + 1
            self._add(seq, RowWork(seq.row, position, 1, (seq.outputs[-1],), new_blocks, 1))
            self._num_decodes += 1

    def resume(self, now: float) -> bool:
        """Preempted sequences, oldest first. Whether none is left: nothing new starts before."""
        for seq in sorted(self.preempted, key=_age):
            match self.fit(seq):
                case Fit() as fit if len(self._free_rows) >= self.rows_needed(seq) and self.prefill_room > 0:
                    self.preempted.remove(seq)
                    self.start(seq, fit, now)
                case _:
                    return False
        return True

    @property
    def prefill_room(self) -> int:
        """Tokens of this step's budget that no running prompt will use."""
        return self._budget - sum(seq.num_tokens - seq.num_scheduled for seq in self.prefilling)

    @property
    def short_room(self) -> int:
        """Tokens that a prompt may have to be computed whole in this step beside one that needs several."""
        if not self.prefilling or not self._is_long(self.prefilling[0]):
            return self.prefill_room
        others = sum(seq.num_tokens - seq.num_scheduled for seq in self.prefilling[1:])
        return self._budget // 2 - others

    def rows_needed(self, seq: Sequence) -> int:
        return 1 if seq.state.kind is Kind.TICKET else seq.num_samples

    def start(self, seq: Sequence, fit: Fit, now: float) -> None:
        """Takes rows and the cached prefix; the rest of its known tokens is reserved. Preempted or new alike."""
        holding = seq.holding = self.ledger.open((seq.key, seq.index))
        self.ledger.share(holding, fit.hits)
        num_cached = len(fit.hits) * self.block_size
        seq.num_computed = seq.num_scheduled = num_cached
        seq.set_published(len(fit.hits))
        seq.reserved = fit.num_needed
        self.reserved_blocks += fit.num_needed
        self._take_row(seq)
        seq.spare_rows = [self._free_rows.pop() for _ in range(self.rows_needed(seq) - 1)]
        self.prefilling.append(seq)
        if seq.state.started_at is None:
            seq.state.started_at = now
            seq.state.cached_tokens = num_cached

    def prefill(self) -> None:
        """Chunks of prompts, oldest first. While the first needs several steps, prompts that fit whole into half of the
        budget pass beside it."""
        queue = tuple(self.prefilling)
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
        guards = [guard for _, _, guard in self._copies.values()]
        flight = _Flight(self._number, self._sequences, self._work, self._num_decodes, guards)
        self._flights.append(flight)
        plan = StepPlan(
            self._number,
            tuple(self._work),
            self._num_decodes,
            tuple(self._starts),
            tuple(self._ends),
            self.ledger.drain_fresh(),
            tuple((source, target) for source, target, _ in self._copies.values()),
        )
        self._ends = []
        self._copies = {}
        return plan

    def break_deadlock(self) -> bool:
        """Nothing is planned and nothing in flight, yet something runs: preempts the youngest, so that the others (or
        a hand-off that waits for its blocks) can go on. Whether there was one."""
        if self._work or self._flights:
            return False
        victims = [seq for seq in (*self.decoding, *self.prefilling, *self.arrived) if _preemptible(seq)]
        if not victims:
            return False
        self.preempt(max(victims, key=_age))
        return True

    def _chunk(self, seq: Sequence, limit: int) -> None:
        start, total = seq.num_scheduled, seq.num_tokens
        end = min(start + limit, total)
        num_held = len(seq.blocks)
        needed = num_blocks_for(end, self.block_size) - num_held
        if needed > self.ledger.available and not self._make_room(seq, needed):
            if seq.stage is not Stage.RUNNING:
                return
            end = min(end, (num_held + self.ledger.available) * self.block_size)
            if end <= start:
                return
            needed = num_blocks_for(end, self.block_size) - num_held
        if needed > 0:
            self.ledger.allocate(held(seq), needed)
            seq.reserved -= needed
            self.reserved_blocks -= needed
        num_samples = seq.num_samples if end == total else 0
        new_blocks = self._unsent(seq)
        seq.num_scheduled = end
        self._add(seq, RowWork(seq.row, start, end - start, seq.tokens(start, end), new_blocks, num_samples))
        if num_samples:
            self.prefilling.remove(seq)
            if num_samples == 1 and seq.state.kind is not Kind.TICKET:
                self.decoding.append(seq)
            else:
                self.num_forking += 1

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
        seq.fill_at = len(blocks) * self.block_size
        return new_blocks

    def _is_long(self, seq: Sequence) -> bool:
        return seq.num_tokens - seq.num_scheduled > self._budget

    def _take_row(self, seq: Sequence) -> None:
        seq.row = self._free_rows.pop()
        seq.row_started = False
        seq.stage = Stage.RUNNING

    # -- room

    def _fill(self, seq: Sequence) -> bool:
        """Sees that it has a block for its next position; False when it has to wait a step for one."""
        if seq.num_scheduled == len(seq.blocks) * self.block_size:
            if not self._make_room(seq, 1):
                return False
            self.ledger.allocate(held(seq), 1)
        return True

    def _make_room(self, seq: Sequence, num_blocks: int) -> bool:
        """Whether so many blocks are available, after preempting younger sequences if need be. False: it waits a step
        (blocks are on their way, or others are ahead of it)."""
        while self.ledger.available < num_blocks:
            if self._leaving:
                return False
            planned = set(self._sequences)
            victims = [
                other
                for other in (*self.decoding, *self.prefilling, *self.arrived)
                if other not in planned and self._yields(other, seq)
            ]
            if not victims:
                return False
            self.preempt(max(victims, key=_age))
        return True

    def _yields(self, other: Sequence, seq: Sequence) -> bool:
        return (
            _preemptible(other)
            and (seq.state.kind is Kind.TICKET or _age(other) > _age(seq))
            and self.ledger.num_exclusive(held(other)) > 0
        )

    def preempt(self, seq: Sequence) -> None:
        """Takes its blocks and row away; it will be computed again, from what is then cached."""
        seq.state.num_preemptions += 1
        self.num_preemptions += 1
        self.leave(seq, Stage.PREEMPTED)

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
        return any(seq in flight.sequences for flight in self._flights)

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
                self._ends.append(seq.row)
            self._free_rows.append(seq.row)
            self._free_rows += seq.spare_rows
            seq.spare_rows = []
            seq.row_started = False
        if seq.stage is Stage.PINNED:
            return
        if seq in self._copies:
            _, _, guard = self._copies.pop(seq)
            self.ledger.close(guard)
        self.ledger.close(held(seq))
        seq.holding = None
        seq.rewind()
        if seq.stage is Stage.PREEMPTED:
            self.preempted.append(seq)

    # -- results

    def apply(self, result: StepResult, now: float, events: StepEvents) -> None:
        """Takes the result of the oldest plan in flight."""
        if not self._flights or self._flights[0].number != result.number:
            raise InternalError(f"the result of plan {result.number} is not the next")
        flight = self._flights.popleft()
        drawn, logprobs = result.token_ids, result.logprobs
        num_decodes = flight.num_decodes
        self._apply_decodes(flight.sequences[:num_decodes], result, now, events.outputs)
        at = num_decodes
        for seq, work in zip(flight.sequences[num_decodes:], flight.work[num_decodes:], strict=True):
            end = at + work.num_samples
            self._apply_chunk(seq, work, drawn[at:end], logprobs[at:end], now, events)
            at = end
        if at != len(drawn):
            raise InternalError(f"plan {result.number} draws {at} tokens, its result holds {len(drawn)}")
        for guard in flight.guards:
            self.ledger.close(guard)

    def _apply_decodes(
        self, sequences: SequenceOf[Sequence], result: StepResult, now: float, outputs: list[SequenceOutput]
    ) -> None:
        drawn, logprobs = result.token_ids, result.logprobs
        running, plain = Stage.RUNNING, not logprobs
        add = outputs.append
        for at, seq in enumerate(sequences):
            stage = seq.stage
            if stage is running and plain:
                token = drawn[at]
                num_generated = len(seq.outputs) + 1
                if num_generated < seq.event_at and token not in seq.stop_ids:
                    seq.outputs.append(token)
                    add(SequenceOutput(seq.key, seq.index, (token,), num_generated))
                    continue
            if stage is not Stage.ENDED:
                self._advance(seq, drawn[at], None if plain else logprobs[at], now, outputs)
            if seq.stage is not running:
                self._landed(seq)

    def _advance(
        self, seq: Sequence, token_id: int, logprobs: TokenLogprobs | None, now: float, outputs: list[SequenceOutput]
    ) -> None:
        """A decode row's token, with all that may come of it."""
        output = seq.accept(token_id, logprobs, now)
        outputs.append(output)
        if output.num_generated >= seq.event_at:
            seq.num_computed = seq.num_tokens - 1
            self.publish(seq)
        if output.finish is not None:
            self._end(seq)

    def _apply_chunk(
        self,
        seq: Sequence,
        work: RowWork,
        drawn: tuple[int, ...],
        logprobs: tuple[TokenLogprobs | None, ...],
        now: float,
        events: StepEvents,
    ) -> None:
        if seq.stage is Stage.ENDED:
            self._landed(seq)
            return
        seq.num_computed += work.num_tokens
        self.publish(seq)
        found = logprobs or (None,) * len(drawn)
        if seq.state.kind is Kind.TICKET:
            self._announce(seq, drawn, found, now, events)
            return
        if len(drawn) > 1:
            self._fork(seq, drawn, found, now, events)
        elif drawn:
            output = seq.accept(drawn[0], found[0], now)
            events.outputs.append(output)
            if output.finish is not None:
                self._end(seq)
        if seq.stage is not Stage.RUNNING:
            self._landed(seq)

    def _announce(
        self,
        seq: Sequence,
        drawn: tuple[int, ...],
        logprobs: tuple[TokenLogprobs | None, ...],
        now: float,
        events: StepEvents,
    ) -> None:
        """What of a ticket has become final; with its first tokens its blocks are pinned."""
        state = seq.state
        last = bool(drawn)
        first = max(state.num_announced, state.held_blocks)
        end = len(seq.blocks) if last else seq.num_computed // self.block_size
        if end <= first and not last:
            return
        state.num_announced = max(first, end)
        epoch = self.ledger.epoch
        started = state.arrived_at if state.started_at is None else state.started_at
        events.chunks.append(
            ChunkDone(
                seq.key,
                first,
                tuple((block, epoch(block)) for block in seq.blocks[first:end]),
                last,
                tuple(
                    FirstToken(i, token, found) for i, (token, found) in enumerate(zip(drawn, logprobs, strict=True))
                ),
                state.cached_tokens,
                started - state.arrived_at,
                now - started,
            )
        )
        if last:
            self.leave(seq, Stage.PINNED)
            self.ledger.pin(held(seq), now + self.limits.pin_seconds)

    def _fork(
        self,
        trunk: Sequence,
        drawn: tuple[int, ...],
        logprobs: tuple[TokenLogprobs | None, ...],
        now: float,
        events: StepEvents,
    ) -> None:
        """One prompt was computed, n tokens drawn: sample 0 goes on in the trunk, each other takes a row of its own."""
        state = trunk.state
        rows, trunk.spare_rows = trunk.spare_rows, []
        self.num_forking -= 1
        self.decoding.append(trunk)
        first = trunk.accept(drawn[0], logprobs[0], now)
        events.outputs.append(first)
        for index, row in enumerate(rows, 1):
            sample = Sequence(state, index, state.prompt_chain)
            state.samples.append(sample)
            output = sample.accept(drawn[index], logprobs[index], now)
            events.outputs.append(output)
            if output.finish is not None:
                sample.stage = Stage.ENDED
            elif self.branch(trunk, sample):
                sample.row = row
                sample.stage = Stage.RUNNING
                self.decoding.append(sample)
                continue
            self._free_rows.append(row)
        if first.finish is not None:
            self._end(trunk)

    def branch(self, trunk: Sequence, sample: Sequence) -> bool:
        """Gives a sample the prompt's blocks: full ones shared, the partly filled one copied by the next plan. False
        when there is no block for the copy: the sample is then preempted, and computes the prompt's end again."""
        num_full, partial = divmod(trunk.num_prompt, self.block_size)
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
            self._copies[sample] = (source, target, guard)
        sample.num_computed = sample.num_scheduled = trunk.num_prompt
        sample.set_published(num_full)
        return True

    def publish(self, seq: Sequence) -> None:
        """Its full blocks hold final content: others may share them."""
        num_full = seq.num_computed // self.block_size
        chain = seq.extend_chain(num_full)
        for index in range(seq.num_published, num_full):
            self.ledger.publish(held(seq), index, chain[index])
        seq.set_published(num_full)

    def _end(self, seq: Sequence) -> None:
        """Its last token is in. (One that was preempted meanwhile only has its blocks to give back.)"""
        if seq.stage is Stage.PREEMPTED:
            seq.stage = Stage.ENDED
        else:
            self.leave(seq, Stage.ENDED)
        if seq.state.num_unfinished == 0:
            self.over.append(seq.state)

    def _landed(self, seq: Sequence) -> None:
        """A plan that worked on it is over: if it has left and no other plan does, what it held is given back."""
        if seq in self._leaving and not self._is_in_flight(seq):
            del self._leaving[seq]
            self._vacate(seq, had_row=True)


def held(seq: Sequence) -> Holding:
    if seq.holding is None:
        raise InternalError(f"{seq!r} holds no blocks")
    return seq.holding


def _age(seq: Sequence) -> tuple[int, int, int]:
    """Sorts by priority, then arrival, then sample: the greatest yields first."""
    state = seq.state
    return (*state.rank, seq.index)


def _preemptible(seq: Sequence) -> bool:
    return seq.stage in (Stage.RUNNING, Stage.ARRIVED) and seq.state.kind is not Kind.TICKET
