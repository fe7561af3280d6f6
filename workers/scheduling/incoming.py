"""The decode side of a hand-off: from a request that is expected here to one that runs, is computed here, or is over.

may_claim, claim      its blocks are promised: the ticket may go
allocate, begin_pull  blocks for an announcement; nobody else gets them while they are written
landed, end_pull      they hold their content; nothing writes them any more
arrive                all are in: it joins the running at the next step
finish_early          it is over with its first tokens
restart, fall_back    the hand-off failed: another prefill worker is asked, or this worker computes it
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from headrace.errors import InternalError
from headrace.values import RequestKey, SequenceOutput
from workers.scheduling.backlog import Backlog
from workers.scheduling.blocks import Holding
from workers.scheduling.outcomes import Expected, FirstToken, SchedulerLimits
from workers.scheduling.running import Running, held
from workers.scheduling.sequence import Kind, RequestState, Stage, Transfer, num_blocks_for
from workers.scheduling.sequence import Sequence as Sample


class Incoming:
    """A part of one Scheduler. Owns nothing: changes the scheduler's requests, gives them another key, and takes out
    those that are over; `end` releases all that a request holds."""

    def __init__(
        self,
        limits: SchedulerLimits,
        requests: dict[RequestKey, RequestState],
        running: Running,
        backlog: Backlog,
        end: Callable[[RequestState], None],
    ) -> None:
        self._limits = limits
        self._requests = requests
        self._running = running
        self._ledger = running.ledger
        self._backlog = backlog
        self._end = end

    def outlook(self, state: RequestState) -> Expected:
        """What the cache has of its prompt now, and what is left to do."""
        num_held = len(self._hits(state))
        num_prompt = state.request.num_prompt_tokens
        size = self._ledger.block_size
        return Expected(num_held, num_prompt - num_held * size, num_blocks_for(num_prompt, size))

    def unclaim(self, state: RequestState, num_blocks: int) -> None:
        """So many of its promised blocks are no promise any more: allocated, or given up."""
        state.claimed_blocks -= num_blocks
        self._running.claimed_blocks -= num_blocks

    def may_claim(self, key: RequestKey) -> bool:
        """Whether the claim budget has room for this expected request's ticket (tokens promised, not yet allocated)."""
        state = self._expected(key)
        state.asked = True
        if self._running.preempted or not self._backlog.may_start(state):
            return False
        hits = self._hits(state)
        needed = num_blocks_for(state.request.num_prompt_tokens, self._ledger.block_size) - len(hits)
        taken = self._ledger.num_blocks - self._ledger.available + self._running.reserved_blocks
        taken += self._running.claimed_blocks
        room = int(self._limits.claim_fraction * self._ledger.num_blocks) - taken - self._ledger.num_idle(hits)
        return needed <= room or taken == 0

    def claim(self, key: RequestKey) -> Expected:
        """Holds what the cache has of its prompt, and counts the rest as promised until it is allocated or ends. What it
        returns goes into the ticket: the cache may have changed since expect()."""
        state = self._expected(key)
        if state.trunk.holding is not None:
            raise InternalError(f"{key} has a claim already")
        outlook = self.outlook(state)
        holding = state.trunk.holding = self._ledger.open((key, 0))
        self._ledger.share(holding, self._hits(state))
        state.held_blocks = state.num_landed = outlook.held_blocks
        state.trunk.set_published(outlook.held_blocks)
        state.claimed_blocks = outlook.num_prompt_blocks - outlook.held_blocks
        self._running.claimed_blocks += state.claimed_blocks
        self._backlog.started(state)
        return outlook

    def held_blocks(self, key: RequestKey) -> tuple[tuple[int, int], ...]:
        """What claim() found of its prompt here, as (block, epoch): held until the request runs, or begins again."""
        state = self._claimed(key)
        return tuple((block, self._ledger.epoch(block)) for block in state.trunk.blocks[: state.held_blocks])

    def allocate(self, key: RequestKey, num_blocks: int) -> tuple[tuple[int, int], ...] | None:
        """Blocks for an announcement, as (block, epoch); None when the pool has none just now (ask again later)."""
        state = self._claimed(key)
        if num_blocks > state.claimed_blocks:
            raise InternalError(f"{key} has {state.claimed_blocks} blocks to come, {num_blocks} asked for")
        if num_blocks > self._ledger.available:
            return None
        blocks = self._ledger.allocate(held(state.trunk), num_blocks)
        self.unclaim(state, num_blocks)
        return tuple((block, self._ledger.epoch(block)) for block in blocks)

    def begin_pull(self, blocks: Iterable[tuple[int, int]]) -> Holding:
        """A pull will write these blocks of allocate(): whatever becomes of the request, they go to nobody else before
        end_pull(). Call it before the pull, once a pull."""
        pull = self._ledger.open("pull")
        self._ledger.share(pull, (block for block, _ in blocks))
        self._ledger.quarantine(pull)
        return pull

    def end_pull(self, pull: Holding) -> None:
        """Nothing writes these blocks any more, whether the pull succeeded or not."""
        self._ledger.close(pull)

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
        queue_seconds: float = 0.0,
        prefill_seconds: float = 0.0,
        asked_at: float | None = None,
        landed_at: float | None = None,
    ) -> None:
        """Adds to the hand-off's part of the request's timeline. Unknown keys are ignored (it may just have ended)."""
        state = self._requests.get(key)
        if state is not None:
            transfer = state.transfer
            transfer.prefill_worker = worker
            transfer.num_blocks += blocks
            transfer.num_bytes += num_bytes
            transfer.queue_seconds += queue_seconds
            transfer.prefill_seconds += prefill_seconds
            transfer.asked_at = transfer.asked_at if asked_at is None else asked_at
            transfer.landed_at = transfer.landed_at if landed_at is None else landed_at

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
            self._ledger.close(held(trunk))
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
        self._begin_again(key, new_key, now).kind = Kind.LOCAL

    def restart(self, key: RequestKey, new_key: RequestKey, now: float) -> Expected:
        """The hand-off failed and another prefill worker will be asked: as expect(), for what is already here."""
        return self.outlook(self._begin_again(key, new_key, now))

    def _begin_again(self, key: RequestKey, new_key: RequestKey, now: float) -> RequestState:
        state = self._expected(key)
        if new_key != key and new_key in self._requests:
            raise InternalError(f"{new_key} is here already")
        trunk = state.trunk
        if trunk.holding is not None:
            self._ledger.close(trunk.holding)
            trunk.holding = None
            trunk.rewind()
        self.unclaim(state, state.claimed_blocks)
        del self._requests[key]
        state.key = trunk.key = new_key
        state.request = replace(state.request, key=new_key)
        state.transfer = Transfer()
        state.began_at = now
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
        trunk.num_computed = min(state.num_landed * self._ledger.block_size, trunk.num_prompt)
        self._running.publish(trunk)

    def _hits(self, state: RequestState) -> list[int]:
        num_full = (state.request.num_prompt_tokens - 1) // self._ledger.block_size
        return self._ledger.match(state.prompt_chain[:num_full])

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
