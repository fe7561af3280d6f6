"""Who may come in, and who starts next: checks at intake, the backlog, and the bounds of what tickets may pin."""

from collections import OrderedDict
from collections.abc import Callable

from headrace.blocks import BlockHasher
from headrace.errors import ContextLengthExceeded, InvalidRequest, Overloaded
from headrace.values import Request
from workers.scheduling.backlog import Backlog
from workers.scheduling.batch import Batch
from workers.scheduling.blocks import BlockLedger
from workers.scheduling.outcomes import SchedulerLimits
from workers.scheduling.running import Fit, NoRoom, Running
from workers.scheduling.sequence import Kind, RequestState, Stage, num_blocks_for

MAX_HASHERS = 256


class Admission:
    """Owns the backlog, and knows which tickets run or are pinned. One per Scheduler."""

    def __init__(
        self,
        limits: SchedulerLimits,
        running: Running,
        make_hasher: Callable[[str, str], BlockHasher],
        eos_token_ids: frozenset[int],
        vocab_size: int | None,
    ) -> None:
        self.backlog = Backlog(limits.max_bypass)
        self._limits = limits
        self._running = running
        self._ledger: BlockLedger = running.ledger
        self._make_hasher = make_hasher
        self._hashers: OrderedDict[tuple[str, str], BlockHasher] = OrderedDict()
        self._eos_token_ids = eos_token_ids
        self._vocab_size = vocab_size
        self._tickets: dict[RequestState, int] = {}
        self._num_seen = 0

    def take(self, request: Request, kind: Kind, now: float, peer: str = "") -> RequestState:
        """The request, now in the backlog. InvalidRequest or Overloaded, with numbers, when it cannot be taken."""
        self._check(request, kind)
        if len(self.backlog) >= self._limits.max_waiting:
            raise Overloaded(
                f"{len(self.backlog)} requests wait, at most {self._limits.max_waiting} may",
                limit=self._limits.max_waiting,
                actual=len(self.backlog),
            )
        self._num_seen += 1
        state = RequestState(
            request,
            kind,
            order=self._num_seen,
            now=now,
            hasher=self.hasher(request.adapter, request.cache_salt),
            eos_token_ids=self._eos_token_ids,
            max_context_tokens=self._limits.max_context_tokens,
            peer=peer,
        )
        self.backlog.add(state)
        return state

    def _check(self, request: Request, kind: Kind) -> None:
        num_prompt, limits = request.num_prompt_tokens, self._limits
        if num_prompt >= limits.max_context_tokens:
            raise ContextLengthExceeded(
                f"prompt must leave room for a token in {limits.max_context_tokens}, got {num_prompt} tokens",
                field="prompt",
                limit=limits.max_context_tokens - 1,
                actual=num_prompt,
            )
        if request.n > self._running.num_rows and kind is not Kind.TICKET:
            raise InvalidRequest.out_of_range("n", request.n, f"at most {self._running.num_rows}, as many as can run")
        longest = num_prompt
        if kind is not Kind.TICKET:
            longest = min(num_prompt + request.sampling.max_tokens - 1, limits.max_context_tokens)
        num_blocks = num_blocks_for(longest, self._ledger.block_size)
        if num_blocks > self._ledger.num_blocks:
            raise InvalidRequest(
                f"prompt and max_tokens must fit {self._ledger.num_blocks} blocks of {self._ledger.block_size} tokens, "
                f"got {num_prompt} + {request.sampling.max_tokens} tokens, which need {num_blocks}",
                field="max_tokens",
                limit=self._ledger.num_blocks,
                actual=num_blocks,
            )
        if self._vocab_size is not None:
            if not 0 <= min(request.prompt_token_ids) <= max(request.prompt_token_ids) < self._vocab_size:
                bad = next(token for token in request.prompt_token_ids if not 0 <= token < self._vocab_size)
                raise InvalidRequest.out_of_range("prompt token id", bad, f"from 0 to {self._vocab_size - 1}")
            request.sampling.check_vocabulary(self._vocab_size)

    def hasher(self, adapter: str, cache_salt: str) -> BlockHasher:
        """That of one cache domain; the last used are kept."""
        domain = (adapter, cache_salt)
        hasher = self._hashers.get(domain)
        if hasher is None:
            hasher = self._hashers[domain] = self._make_hasher(adapter, cache_salt)
            if len(self._hashers) > MAX_HASHERS:
                self._hashers.popitem(last=False)
        else:
            self._hashers.move_to_end(domain)
        return hasher

    def admit(self, batch: Batch, now: float) -> None:
        """Starts new prompts, by bounded bypass: who does not fit is passed by those behind it, but only so often."""
        if not len(self.backlog):
            return
        tries = pin_tries = self._limits.max_bypass + 1
        for state in self.backlog.candidates():
            if not self._running.free_rows or tries == 0 or batch.prompt_budget <= 0:
                return
            if state.kind is Kind.TICKET:
                state.pin_blocked = pin_tries == 0 or not self.backlog.may_pin(state) or not self._may_pin(state)
                if state.pin_blocked:
                    pin_tries = max(pin_tries - 1, 0)
                    continue
            tries -= not self._try_to_start(state, batch.prompt_budget, now)

    def _try_to_start(self, state: RequestState, prompt_budget: int, now: float) -> bool:
        running, trunk = self._running, state.trunk
        if not self.backlog.may_start(state) or running.rows_needed(trunk) > len(running.free_rows):
            return False
        match running.fit(trunk):
            case NoRoom():
                return False
            case Fit() as fit:
                if trunk.num_tokens - len(fit.hits) * self._ledger.block_size > prompt_budget:
                    return False
                running.start(trunk, fit, now)
                self.backlog.started(state)
                if state.kind is Kind.TICKET:
                    self._tickets[state] = num_blocks_for(trunk.num_prompt, self._ledger.block_size)
                return True

    def _may_pin(self, ticket: RequestState) -> bool:
        """Whether the blocks of tickets, running and pinned, stay within their bounds with this one: of all, and of its
        peer. The first always may."""
        limits, num_blocks = self._limits, self._ledger.num_blocks
        needed = num_blocks_for(ticket.request.num_prompt_tokens, self._ledger.block_size)
        of_all = self._ledger.num_pinned
        of_peer = 0
        for state, blocks in self._tickets.items():
            if state.trunk.stage is Stage.RUNNING:
                of_all += blocks
            if state.peer == ticket.peer:
                of_peer += blocks
        if of_all and of_all + needed > limits.max_pinned_fraction * num_blocks:
            return False
        if limits.max_peer_pinned_fraction >= limits.max_pinned_fraction:
            return True
        return not of_peer or of_peer + needed <= limits.max_peer_pinned_fraction * num_blocks

    def ended(self, state: RequestState) -> None:
        """It waits, runs or is pinned no more."""
        self.backlog.discard(state)
        self._tickets.pop(state, None)
