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
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.values import BlockCounts, Load, Request, RequestKey, SequenceOutput, TokenLogprobs
from workers.plan import StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Counts, and times in seconds. `max_waiting` bounds the backlog (beyond it: Overloaded)."""

    max_num_seqs: int
    max_step_tokens: int
    max_context_tokens: int
    max_waiting: int
    pin_seconds: float
    max_pinned_fraction: float = 0.5
    claim_fraction: float = 0.9
    max_bypass: int = 16


@dataclass(frozen=True, slots=True)
class FirstToken:
    """What a ticket's last chunk drew for one sample."""

    index: int
    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class ChunkDone:
    """Blocks of a ticket that hold their final content: (block, epoch) from index `first_block` of its block table on.

    A partly filled block is announced once, with the last chunk. The first `held_blocks` of the ticket are skipped.
    """

    key: RequestKey
    first_block: int
    blocks: tuple[tuple[int, int], ...]
    last: bool = False
    first_tokens: tuple[FirstToken, ...] = ()
    cached_tokens: int = 0
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class StepEvents:
    """What a step's result means to the outside."""

    outputs: list[SequenceOutput] = field(default_factory=list)
    chunks: list[ChunkDone] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Expected:
    """An expected request was taken: its leading `held_blocks` full blocks are in our cache already and now held.

    `remaining` prompt tokens are not; the engine prefills alone when they are few (Request.local_prefill_max_tokens).
    """

    held_blocks: int
    remaining: int
    num_prompt_blocks: int


class Scheduler:
    """Owns all sequences and the rows; holds blocks through the ledger it was given."""

    # -- intake: each raises Overloaded (backlog full) or InvalidRequest (would not fit an empty pool), changing nothing

    def submit(self, request: Request, now: float) -> None:
        raise NotImplementedError

    def expect(self, request: Request, now: float) -> Expected:
        raise NotImplementedError

    def ticket(self, request: Request, held_blocks: int, now: float) -> None:
        raise NotImplementedError

    # -- the decode side of a hand-off

    def may_claim(self, key: RequestKey) -> bool:
        """Whether the claim budget has room for this expected request's ticket (tokens promised, not yet allocated)."""
        raise NotImplementedError

    def claim(self, key: RequestKey) -> None:
        """Counts its remaining prompt tokens as promised, until they are allocated or it ends."""

    def allocate(self, key: RequestKey, num_blocks: int) -> tuple[tuple[int, int], ...] | None:
        """Blocks for an announcement, as (block, epoch); None when the pool has none just now (ask again later)."""
        raise NotImplementedError

    def arrive(
        self, key: RequestKey, first_tokens: Sequence[FirstToken], cached_tokens: int, now: float
    ) -> list[SequenceOutput]:
        """All blocks are in: the request joins the running at the next step (before new prompts). Returns the outputs of
        its first tokens; a sample that ends with its first token is finished here."""
        raise NotImplementedError

    def finish_early(
        self, key: RequestKey, first_tokens: Sequence[FirstToken], cached_tokens: int, now: float
    ) -> list[SequenceOutput] | None:
        """When every sample ends with its first token: its outputs, and the request is over with nothing more pulled.
        None when any sample goes on (then pull, and arrive())."""
        raise NotImplementedError

    def fall_back(self, key: RequestKey, new_key: RequestKey, now: float) -> None:
        """The hand-off failed: the request is computed here, under its new attempt. Blocks whose content is known to be
        right (held, or arrived in order) are kept; the rest are freed."""

    def restart(self, key: RequestKey, new_key: RequestKey, now: float) -> Expected:
        """The hand-off failed and another prefill worker will be asked: as expect(), for what is already here."""
        raise NotImplementedError

    # -- the prefill side of a hand-off

    def release(self, key: RequestKey, now: float) -> None:
        """The puller has what it needs (or gave up): unpin. Unknown keys are ignored (release is idempotent)."""

    def renew(self, key: RequestKey, now: float) -> None:
        """The pin's deadline moves to now + pin_seconds."""

    # -- ways out

    def cancel(self, key: RequestKey, now: float) -> bool:
        """Ends a request in any state; False when it is not here. Its blocks are free after the step in flight."""
        raise NotImplementedError

    def expire(self, now: float) -> tuple[list[RequestKey], list[RequestKey]]:
        """(requests whose deadline passed, tickets whose pin ended), all of them ended here."""
        raise NotImplementedError

    # -- steps

    def schedule(self, now: float) -> StepPlan | None:
        """The next plan, or None when there is nothing to compute. May be called while one earlier plan is in flight."""
        raise NotImplementedError

    def apply(self, result: StepResult, now: float) -> StepEvents:
        """Takes the result of the oldest plan in flight."""
        raise NotImplementedError

    # -- views

    @property
    def has_work(self) -> bool:
        raise NotImplementedError

    def load(self) -> Load:
        raise NotImplementedError

    def load_of(self, keys: Sequence[RequestKey]) -> Load:
        """The part of the load that these requests are."""
        raise NotImplementedError

    def counts(self) -> BlockCounts:
        raise NotImplementedError

    def reset_cache(self) -> int:
        """Forgets all cached blocks that nobody holds, and the identity of those that are held; how many were dropped."""
        raise NotImplementedError
