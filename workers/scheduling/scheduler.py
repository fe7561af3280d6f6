"""Who computes what in the next step. Pure: no torch, no clock, no I/O; runs under virtual time in the simulator.

`num_computed` chases a sequence's total: chunked prefill, prefix hits, resumption after preemption and decode are the
same arithmetic. Running comes before waiting, preempted before new. One token budget a step.

A request is one of three things here:
  local    submit():  this worker computes the prompt and decodes.
  expected expect():  decode side of a hand-off. What becomes of it until it joins, or is computed here, is asked of
                      `incoming`. Until then it takes no row and no budget, and never counts as stuck.
  ticket   ticket():  prefill side. Computed like any prompt; every finished chunk comes out of apply() as a ChunkDone,
                      the last with the first tokens. Of one that is announced ahead, blocks come out of take_ahead()
                      with the plan that fills them, and apply() tells the end alone. Its blocks are then pinned until
                      release(), or until expire() finds the pin's deadline passed.

Every way out ends in the ledger's release, once. What is in flight is freed only after the last plan that has it.

The parts: `sequence` (one request, one sample), `admission` and `backlog` (who comes in, who waits, who starts),
`incoming` (hand-offs to here), `adopting` (blocks offered with a ticket), `running` (rows and blocks of what runs),
`batch` (plans; `turns`: whose rows, in a pipeline) and `results`, `outcomes` (what comes out), `blocks` (the ledger).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

from headrace.blocks import BlockHasher
from headrace.errors import InvalidRequest
from headrace.values import BlockCounts, Load, Request, RequestKey, SequenceOutput
from workers.scheduling.admission import Admission
from workers.scheduling.adopting import Adopting
from workers.scheduling.batch import Batch
from workers.scheduling.blocks import BlockLedger
from workers.scheduling.incoming import Incoming
from workers.scheduling.outcomes import ChunkDone, Expected, FirstToken, SchedulerLimits, StepEvents
from workers.scheduling.plan import StepPlan, StepResult
from workers.scheduling.results import Results
from workers.scheduling.running import Running, held
from workers.scheduling.sequence import Kind, RequestState, Stage, load_of

__all__ = ["ChunkDone", "Expected", "FirstToken", "Scheduler", "SchedulerLimits", "StepEvents"]


class Scheduler:
    """Owns all requests, and their sequences and rows through its Batch; holds blocks through the ledger it was given.
    `incoming` answers for requests that are expected, `adopting` for blocks that are offered with a ticket.

    `make_hasher(adapter, cache_salt)` makes the hasher of one cache domain. `max_context_tokens` of the limits counts
    prompt and output together.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        ledger: BlockLedger,
        make_hasher: Callable[[str, str], BlockHasher],
        *,
        eos_token_ids: Iterable[int] = (),
        vocab_size: int | None = None,
    ) -> None:
        self.limits = limits
        self.ledger = ledger
        self._running = Running(limits, ledger)
        self._batch = Batch(limits, self._running)
        self._results = Results(limits, self._running)
        self._admission = Admission(limits, self._running, make_hasher, frozenset(eos_token_ids), vocab_size)
        self._backlog = self._admission.backlog
        self._requests: dict[RequestKey, RequestState] = {}
        self.incoming = Incoming(limits, self._requests, self._running, self._backlog, self._end)
        self.adopting = Adopting(self._running, self._admission.hasher)
        self._next_deadline = float("inf")

    # -- intake: each raises Overloaded (backlog full) or InvalidRequest (would not fit an empty pool), changing nothing

    def submit(self, request: Request, now: float) -> None:
        self._take(request, Kind.LOCAL, now)

    def expect(self, request: Request, now: float) -> Expected:
        return self.incoming.outlook(self._take(request, Kind.EXPECTED, now))

    def ticket(self, request: Request, held_blocks: int, now: float, peer: str = "", *, ahead: bool = False) -> None:
        """`held_blocks` leading full blocks need not be announced. `peer` names who pulls, so that one slow puller does
        not take all of what may be pinned. `ahead`: it can wait for a step, so blocks are announced with their plan."""
        most = (request.num_prompt_tokens - 1) // self.ledger.block_size
        if not 0 <= held_blocks <= most:
            raise InvalidRequest.out_of_range("held_blocks", held_blocks, f"from 0 to {most}")
        state = self._take(request, Kind.TICKET, now, peer)
        state.held_blocks, state.ahead = held_blocks, ahead

    def _take(self, request: Request, kind: Kind, now: float, peer: str = "") -> RequestState:
        key = request.key
        if key in self._requests:
            raise InvalidRequest(f"request {key.request_id}, attempt {key.attempt}, is here already", field="key")
        state = self._requests[key] = self._admission.take(request, kind, now, peer)
        self._watch(state.deadline)
        return state

    # -- the prefill side of a hand-off

    def release(self, key: RequestKey, now: float) -> None:
        """The puller has what it needs (or gave up): unpin. Unknown keys are ignored (release is idempotent)."""
        self.cancel(key, now)

    def renew(self, key: RequestKey, now: float) -> None:
        """The pin's deadline moves to now + pin_seconds."""
        state = self._requests.get(key)
        if state is not None and state.trunk.stage is Stage.PINNED:
            self.ledger.pin(held(state.trunk), now + self.limits.pin_seconds)

    # -- ways out

    def cancel(self, key: RequestKey, now: float) -> bool:
        """Ends a request in any state; False when it is not here. Its blocks are free after the steps in flight."""
        state = self._requests.get(key)
        if state is None:
            return False
        self._end(state)
        return True

    def stop_sample(self, key: RequestKey, index: int, now: float) -> SequenceOutput | None:
        """Ends one sample that has tokens already, the others go on; its last output, without a token. None when there is
        no such sample, or it has ended."""
        state = self._requests.get(key)
        sample = next((s for s in state.samples if s.index == index), None) if state is not None else None
        if state is None or sample is None or not sample.outputs or sample.stage is Stage.ENDED:
            return None
        output = sample.stop(now)
        if state.num_unfinished == 0:
            self._end(state)
        else:
            self._running.leave(sample, Stage.ENDED)
        return output

    def expire(self, now: float) -> tuple[list[RequestKey], list[RequestKey]]:
        """(requests whose deadline passed, tickets whose pin ended), all of them ended here."""
        late: list[RequestKey] = []
        unpinned: list[RequestKey] = []
        if now < self._next_deadline:
            return late, unpinned
        self._next_deadline = float("inf")
        for key, state in list(self._requests.items()):
            pin = state.trunk.holding.deadline if state.trunk.stage is Stage.PINNED and state.trunk.holding else None
            if pin is not None and pin <= now:
                unpinned.append(key)
            elif pin is None and state.deadline is not None and state.deadline <= now:
                late.append(key)
            else:
                self._watch(state.deadline if pin is None else pin)
                continue
            self._end(state)
        return late, unpinned

    def _end(self, state: RequestState) -> None:
        del self._requests[state.key]
        self._admission.ended(state)
        self.incoming.unclaim(state, state.claimed_blocks)
        for sample in state.samples:
            if sample.stage is Stage.WAITING:
                if sample.holding is not None:
                    self.ledger.close(sample.holding)
                    sample.holding = None
                sample.stage = Stage.ENDED
            elif sample.stage is not Stage.ENDED:
                self._running.leave(sample, Stage.ENDED)

    def _watch(self, deadline: float | None) -> None:
        if deadline is not None and deadline < self._next_deadline:
            self._next_deadline = deadline

    # -- steps

    def schedule(self, now: float) -> StepPlan | None:
        """The next plan, or None when nothing can be computed until something changes (a result, a new request, a
        release, an arrival, a deadline). May be called while fewer than limits.plans_in_flight earlier ones are in
        flight."""
        batch = self._batch
        while True:
            batch.begin()
            batch.decode()
            batch.join_arrived()
            if batch.resume(now):
                self._admission.admit(batch, now)
            batch.prefill(others_wait=self.limits.num_micro_batches > 1 and self._waits)
            plan = batch.finish()
            if plan is not None or not self._running.break_deadlock():
                return plan

    def take_ahead(self) -> list[ChunkDone]:
        """What the plans made since the last call will make final: to be announced once the ranks have been given them."""
        ahead, self._batch.ahead = self._batch.ahead, []
        return ahead

    def apply(self, result: StepResult, now: float) -> StepEvents:
        """Takes the result of the oldest plan in flight."""
        events = StepEvents()
        self._results.apply(result, now, events)
        for chunk in events.chunks:
            if chunk.last:
                self._watch(held(self._requests[chunk.key].trunk).deadline)
        for state in self._results.over:
            del self._requests[state.key]
        self._results.over.clear()
        return events

    def preempt_at(self, position: int) -> bool:
        """Preempts the oldest that has come to this position of prompt and output; whether one has. For tests."""
        return self._running.preempt_at(position)

    # -- views

    @property
    def has_work(self) -> bool:
        """Whether anything runs or waits to run here (expected requests that have not arrived do not)."""
        return self._running.has_work or self._waits

    @property
    def starting(self) -> bool:
        """Whether the next plan may have rows that the last one had not."""
        running = self._running
        return bool(running.arrived or running.prefilling or running.preempted or running.num_forking) or self._waits

    @property
    def _waits(self) -> bool:
        return any(state.kind is not Kind.EXPECTED for state in self._backlog)

    def load(self) -> Load:
        return load_of(self._requests.values())

    def load_of(self, keys: Sequence[RequestKey]) -> Load:
        """The part of the load that these requests are."""
        return load_of(self._requests[key] for key in keys if key in self._requests)

    def filled_positions(self) -> Iterator[int]:
        """For every sequence that holds blocks: positions whose KV is there or is being written. One that has ended and
        not yet given its blocks back has none."""
        size = self.ledger.block_size
        for state in self._requests.values():
            for sample in state.samples:
                if sample.stage is Stage.WAITING:
                    yield min(len(sample.blocks) * size, sample.num_prompt)
                elif sample.stage is not Stage.ENDED:
                    yield sample.num_scheduled

    @property
    def num_preemptions(self) -> int:
        """Since the start."""
        return self._running.num_preemptions

    def counts(self) -> BlockCounts:
        return self.ledger.counts()

    def reset_cache(self) -> int:
        """Forgets all cached blocks that nobody holds, and the identity of those that are held; how many were dropped."""
        return self.ledger.clear()
