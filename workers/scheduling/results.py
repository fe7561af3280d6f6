"""What the result of a plan means: tokens for who decodes, blocks that have become final, samples that go on in rows of
their own, and who is over.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import replace

from headrace.errors import InternalError
from headrace.values import SequenceOutput, TokenLogprobs
from workers.scheduling.blocks import BlockLedger
from workers.scheduling.outcomes import ChunkDone, FirstToken, SchedulerLimits, StepEvents
from workers.scheduling.plan import RowWork, StepResult
from workers.scheduling.running import Running, held
from workers.scheduling.sequence import Kind, RequestState, Sequence, Stage


class Results:
    """Takes the results of one Scheduler's plans, on what its Running owns. `over` collects requests whose last token came,
    for the scheduler to take."""

    def __init__(self, limits: SchedulerLimits, running: Running) -> None:
        self.over: list[RequestState] = []
        self._limits = limits
        self._running = running
        self._ledger = running.ledger

    def apply(self, result: StepResult, now: float, events: StepEvents) -> None:
        """Takes the result of the oldest plan in flight."""
        if not self._running.flights or self._running.flights[0].number != result.number:
            raise InternalError(f"the result of plan {result.number} is not the next")
        flight = self._running.flights.popleft()
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
            self._ledger.close(guard)

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
                self._running.landed(seq)

    def _advance(
        self, seq: Sequence, token_id: int, logprobs: TokenLogprobs | None, now: float, outputs: list[SequenceOutput]
    ) -> None:
        """A decode row's token, with all that may come of it."""
        output = seq.accept(token_id, logprobs, now)
        outputs.append(output)
        if output.num_generated >= seq.event_at:
            seq.num_computed = seq.num_tokens - 1
            self._running.publish(seq)
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
            self._running.landed(seq)
            return
        seq.num_computed += work.num_tokens
        self._running.publish(seq)
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
            self._running.landed(seq)

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
        chunk = final_chunk(self._ledger, seq, seq.num_computed, last=last)
        if not last:
            if chunk is not None:
                events.chunks.append(chunk)
            return
        started = state.arrived_at if state.started_at is None else state.started_at
        events.chunks.append(
            replace(
                chunk or ChunkDone(seq.key, state.num_announced, ()),
                last=True,
                first_tokens=tuple(
                    FirstToken(i, token, found) for i, (token, found) in enumerate(zip(drawn, logprobs, strict=True))
                ),
                cached_tokens=state.cached_tokens,
                queue_seconds=started - state.arrived_at,
                prefill_seconds=now - started,
            )
        )
        self._running.leave(seq, Stage.PINNED)
        self._ledger.pin(held(seq), now + self._limits.pin_seconds)

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
        self._running.num_forking -= 1
        self._running.decoding.append(trunk)
        first = trunk.accept(drawn[0], logprobs[0], now)
        events.outputs.append(first)
        for index, row in enumerate(rows, 1):
            sample = Sequence(state, index, state.prompt_chain)
            state.samples.append(sample)
            output = sample.accept(drawn[index], logprobs[index], now)
            events.outputs.append(output)
            if output.finish is not None:
                sample.stage = Stage.ENDED
            elif self._running.branch(trunk, sample):
                sample.row = row
                sample.stage = Stage.RUNNING
                self._running.decoding.append(sample)
                continue
            self._running.free_rows.append(row)
        if first.finish is not None:
            self._end(trunk)

    def _end(self, seq: Sequence) -> None:
        """Its last token is in. (One that was preempted meanwhile only has its blocks to give back.)"""
        if seq.stage is Stage.PREEMPTED:
            seq.stage = Stage.ENDED
        else:
            self._running.leave(seq, Stage.ENDED)
        if seq.state.num_unfinished == 0:
            self.over.append(seq.state)


def final_chunk(ledger: BlockLedger, seq: Sequence, num_tokens: int, *, last: bool) -> ChunkDone | None:
    """The blocks that hold their final content with so many tokens of the ticket computed, and were not announced
    before. They count as announced from here on."""
    state = seq.state
    first = max(state.num_announced, state.held_blocks)
    end = len(seq.blocks) if last else num_tokens // ledger.block_size
    state.num_announced = max(first, end)
    if end <= first:
        return None
    epoch = ledger.epoch
    return ChunkDone(seq.key, first, tuple((block, epoch(block)) for block in seq.blocks[first:end]))
