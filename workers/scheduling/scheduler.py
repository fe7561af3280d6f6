"""Who computes what in the next step. Pure: no torch, no clock, no I/O; runs under virtual time in the simulator.

`num_computed` chases a sequence's total: chunked prefill, prefix hits, resumption after preemption and decode are the
same arithmetic. Running comes before waiting, preempted before new. One token budget a step.

A request is one of three things here:
  local    submit():  this worker computes the prompt and decodes.
  expected expect():  decode side of a hand-off. Its blocks are allocated as the peer announces them (allocate()); once
                      all are in, arrive() joins it. Until then it takes no row and no budget, and never counts as stuck.
  ticket   ticket():  prefill side. Computed like any prompt; every finished chunk comes out of apply() as a ChunkDone,
                      the last with the first tokens. Its blocks are then pinned until release(), or until expire()
                      finds the pin's deadline passed.

Every way out ends in the ledger's release, once. What is in flight (one step ahead) is freed only after its step.

The parts: `sequence` (one request, one sample), `admission` and `backlog` (who comes in, who waits, who starts),
`running` (rows and blocks of what runs), `batch` (plans and their results), `outcomes` (what comes out), `blocks` (the
ledger).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from headrace.blocks import BlockHasher
from headrace.errors import InternalError, InvalidRequest
from headrace.values import BlockCounts, Load, Request, RequestKey, SequenceOutput
from workers.scheduling.admission import Admission
from workers.scheduling.batch import Batch
from workers.scheduling.blocks import BlockLedger, Holding
from workers.scheduling.outcomes import ChunkDone, Expected, FirstToken, SchedulerLimits, StepEvents
from workers.scheduling.plan import StepPlan, StepResult
from workers.scheduling.running import Running, held
from workers.scheduling.sequence import Kind, RequestState, Stage, Transfer, load_of, num_blocks_for
from workers.scheduling.sequence import Sequence as Sample

__all__ = ["ChunkDone", "Expected", "FirstToken", "Scheduler", "SchedulerLimits", "StepEvents"]


class Scheduler:
    """Owns all requests, and their sequences and rows through its Batch; holds blocks through the ledger it was given.

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
        self._admission = Admission(limits, self._running, make_hasher, frozenset(eos_token_ids), vocab_size)
        self._backlog = self._admission.backlog
        self._requests: dict[RequestKey, RequestState] = {}
        self._next_deadline = float("inf")

    # -- intake: each raises Overloaded (backlog full) or InvalidRequest (would not fit an empty pool), changing nothing

    def submit(self, request: Request, now: float) -> None:
        self._take(request, Kind.LOCAL, now)

    def expect(self, request: Request, now: float) -> Expected:
        return self._outlook(self._take(request, Kind.EXPECTED, now))

    def ticket(self, request: Request, held_blocks: int, now: float, peer: str = "") -> None:
        """`held_blocks` leading full blocks need not be announced. `peer` names who pulls, so that one slow puller does
        not take all of what may be pinned."""
        most = (request.num_prompt_tokens - 1) // self.ledger.block_size
        if not 0 <= held_blocks <= most:
            raise InvalidRequest.out_of_range("held_blocks", held_blocks, f"from 0 to {most}")
        self._take(request, Kind.TICKET, now, peer).held_blocks = held_blocks

    def _take(self, request: Request, kind: Kind, now: float, peer: str = "") -> RequestState:
        key = request.key
        if key in self._requests:
            raise InvalidRequest(f"request {key.request_id}, attempt {key.attempt}, is here already", field="key")
        state = self._requests[key] = self._admission.take(request, kind, now, peer)
        self._watch(state.deadline)
        return state

    # -- the decode side of a hand-off

    def may_claim(self, key: RequestKey) -> bool:
        """Whether the claim budget has room for this expected request's ticket (tokens promised, not yet allocated)."""
        state = self._expected(key)
        state.asked = True
        if self._running.preempted or not self._backlog.may_start(state):
            return False
        hits = self._hits(state)
        needed = num_blocks_for(state.request.num_prompt_tokens, self.ledger.block_size) - len(hits)
        taken = self.ledger.num_blocks - self.ledger.available + self._running.reserved_blocks
        taken += self._running.claimed_blocks
        room = int(self.limits.claim_fraction * self.ledger.num_blocks) - taken - self.ledger.num_idle(hits)
        return needed <= room or taken == 0

    def claim(self, key: RequestKey) -> Expected:
        """Holds what the cache has of its prompt, and counts the rest as promised until it is allocated or ends. What it
        returns goes into the ticket: the cache may have changed since expect()."""
        state = self._expected(key)
        if state.trunk.holding is not None:
            raise InternalError(f"{key} has a claim already")
        outlook = self._outlook(state)
        holding = state.trunk.holding = self.ledger.open((key, 0))
        self.ledger.share(holding, self._hits(state))
        state.held_blocks = state.num_landed = outlook.held_blocks
        state.trunk.set_published(outlook.held_blocks)
        state.claimed_blocks = outlook.num_prompt_blocks - outlook.held_blocks
        self._running.claimed_blocks += state.claimed_blocks
        self._backlog.started(state)
        return outlook

    def allocate(self, key: RequestKey, num_blocks: int) -> tuple[tuple[int, int], ...] | None:
        """Blocks for an announcement, as (block, epoch); None when the pool has none just now (ask again later)."""
        state = self._claimed(key)
        if num_blocks > state.claimed_blocks:
            raise InternalError(f"{key} has {state.claimed_blocks} blocks to come, {num_blocks} asked for")
        if num_blocks > self.ledger.available:
            return None
        blocks = self.ledger.allocate(held(state.trunk), num_blocks)
        self._unclaim(state, num_blocks)
        return tuple((block, self.ledger.epoch(block)) for block in blocks)

    def begin_pull(self, blocks: Iterable[tuple[int, int]]) -> Holding:
        """A pull will write these blocks of allocate(): whatever becomes of the request, they go to nobody else before
        end_pull(). Call it before the pull, once a pull."""
        pull = self.ledger.open("pull")
        self.ledger.share(pull, (block for block, _ in blocks))
        self.ledger.quarantine(pull)
        return pull

    def end_pull(self, pull: Holding) -> None:
        """Nothing writes these blocks any more, whether the pull succeeded or not."""
        self.ledger.close(pull)

    def landed(self, key: RequestKey, num_blocks: int) -> None:
        """The next `num_blocks` blocks of its table hold their final content (optional; arrive() says it of all). Others
        can share them from now on, and a hand-off that fails later keeps them."""
        state = self._claimed(key)
        state.num_landed = min(state.num_landed + num_blocks, len(state.trunk.blocks))
        self._publish_landed(state)

    def note_transfer(
        self,
        key: RequestKey,
        worker: str,
        *,
        blocks: int = 0,
        num_bytes: int = 0,
        exposed_seconds: float = 0.0,
        queue_seconds: float = 0.0,
        prefill_seconds: float = 0.0,
    ) -> None:
        """Adds to the hand-off's part of the request's timeline. Unknown keys are ignored (it may just have ended)."""
        state = self._requests.get(key)
        if state is not None:
            transfer = state.transfer
            transfer.prefill_worker = worker
            transfer.num_blocks += blocks
            transfer.num_bytes += num_bytes
            transfer.exposed_seconds += exposed_seconds
            transfer.queue_seconds += queue_seconds
            transfer.prefill_seconds += prefill_seconds

    def arrive(
        self, key: RequestKey, first_tokens: Sequence[FirstToken], cached_tokens: int, now: float
    ) -> list[SequenceOutput]:
        """All blocks are in: the request joins the running at the next step (before new prompts). Returns the outputs of
        its first tokens; a sample that ends with its first token is finished here."""
        state = self._claimed(key)
        if state.claimed_blocks:
            raise InternalError(f"{key} has {state.claimed_blocks} blocks to come and cannot run")
        trunk = state.trunk
        outputs = self._accept_first(state, first_tokens, cached_tokens, now)
        trunk.num_computed = trunk.num_scheduled = trunk.num_prompt
        self._running.publish(trunk)
        for output, sample in zip(outputs, state.samples, strict=True):
            if output.finish is not None:
                sample.stage = Stage.ENDED
            elif sample is trunk or self._running.branch(trunk, sample):
                sample.stage = Stage.ARRIVED
                self._running.arrived.append(sample)
        if outputs[0].finish is not None:
            self.ledger.close(held(trunk))
            trunk.holding = None
        if state.num_unfinished == 0:
            del self._requests[key]
        return outputs

    def finish_early(
        self, key: RequestKey, first_tokens: Sequence[FirstToken], cached_tokens: int, now: float
    ) -> list[SequenceOutput] | None:
        """When every sample ends with its first token: its outputs, and the request is over with nothing more pulled.
        None when any sample goes on (then pull, and arrive())."""
        state = self._claimed(key)
        if any(state.finish_of(first.token_id, 1) is None for first in first_tokens):
            return None
        outputs = self._accept_first(state, first_tokens, cached_tokens, now)
        self._end(state)
        return outputs

    def fall_back(self, key: RequestKey, new_key: RequestKey, now: float) -> None:
        """The hand-off failed, or was not worth it: the request is computed here, under its new attempt. Blocks whose
        content is known to be right (held, or landed) stay in the cache; the rest are freed."""
        self._begin_again(key, new_key).kind = Kind.LOCAL

    def restart(self, key: RequestKey, new_key: RequestKey, now: float) -> Expected:
        """The hand-off failed and another prefill worker will be asked: as expect(), for what is already here."""
        return self._outlook(self._begin_again(key, new_key))

    def _begin_again(self, key: RequestKey, new_key: RequestKey) -> RequestState:
        state = self._expected(key)
        if new_key != key and new_key in self._requests:
            raise InternalError(f"{new_key} is here already")
        trunk = state.trunk
        if trunk.holding is not None:
            self.ledger.close(trunk.holding)
            trunk.holding = None
            trunk.rewind()
        self._unclaim(state, state.claimed_blocks)
        del self._requests[key]
        state.key = trunk.key = new_key
        state.request = replace(state.request, key=new_key)
        state.transfer = Transfer()
        state.asked = False
        state.held_blocks = state.num_landed = 0
        self._requests[new_key] = state
        if state not in self._backlog:
            self._backlog.add(state)
        return state

    def _accept_first(
        self, state: RequestState, first_tokens: Sequence[FirstToken], cached_tokens: int, now: float
    ) -> list[SequenceOutput]:
        ordered = sorted(first_tokens, key=lambda first: first.index)
        if [first.index for first in ordered] != list(range(state.request.n)):
            raise InternalError(f"{state.key} needs a first token for each of {state.request.n} samples")
        state.cached_tokens = cached_tokens
        state.started_at = state.first_token_at = now
        state.samples += [Sample(state, index, state.prompt_chain) for index in range(1, state.request.n)]
        return [
            sample.accept(first.token_id, first.logprobs, now)
            for sample, first in zip(state.samples, ordered, strict=True)
        ]

    def _publish_landed(self, state: RequestState) -> None:
        trunk = state.trunk
        trunk.num_computed = min(state.num_landed * self.ledger.block_size, trunk.num_prompt)
        self._running.publish(trunk)

    def _hits(self, state: RequestState) -> list[int]:
        num_full = (state.request.num_prompt_tokens - 1) // self.ledger.block_size
        return self.ledger.match(state.prompt_chain[:num_full])

    def _outlook(self, state: RequestState) -> Expected:
        num_held = len(self._hits(state))
        num_prompt = state.request.num_prompt_tokens
        size = self.ledger.block_size
        return Expected(num_held, num_prompt - num_held * size, num_blocks_for(num_prompt, size))

    def _expected(self, key: RequestKey) -> RequestState:
        state = self._requests.get(key)
        if state is None or state.kind is not Kind.EXPECTED or state.trunk.stage is not Stage.WAITING:
            raise InternalError(f"{key} is not expected here")
        return state

    def _claimed(self, key: RequestKey) -> RequestState:
        state = self._expected(key)
        if state.trunk.holding is None:
            raise InternalError(f"{key} has no claim")
        return state

    def _unclaim(self, state: RequestState, num_blocks: int) -> None:
        state.claimed_blocks -= num_blocks
        self._running.claimed_blocks -= num_blocks

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
        """Ends a request in any state; False when it is not here. Its blocks are free after the step in flight."""
        state = self._requests.get(key)
        if state is None:
            return False
        self._end(state)
        return True

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
        self._unclaim(state, state.claimed_blocks)
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
        release, an arrival, a deadline). May be called while one earlier plan is in flight."""
        batch = self._batch
        while True:
            batch.begin()
            batch.decode()
            batch.join_arrived()
            if batch.resume(now):
                self._admission.admit(batch, now)
            batch.prefill()
            plan = batch.finish()
            if plan is not None or not self._running.break_deadlock():
                return plan

    def apply(self, result: StepResult, now: float) -> StepEvents:
        """Takes the result of the oldest plan in flight."""
        events = StepEvents()
        batch = self._batch
        batch.apply(result, now, events)
        for chunk in events.chunks:
            if chunk.last:
                self._watch(held(self._requests[chunk.key].trunk).deadline)
        for state in batch.over:
            del self._requests[state.key]
        batch.over.clear()
        return events

    # -- views

    @property
    def has_work(self) -> bool:
        """Whether anything runs or waits to run here (expected requests that have not arrived do not)."""
        return self._running.has_work or any(state.kind is not Kind.EXPECTED for state in self._backlog)

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
