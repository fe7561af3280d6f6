"""What goes into the scheduler and comes out of it, as values (re-exported by workers.scheduling.scheduler)."""

from dataclasses import dataclass, field

from headrace.errors import ConfigError
from headrace.values import RequestKey, SequenceOutput, TokenLogprobs


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Counts, and times in seconds. `max_waiting` bounds the backlog (beyond it: Overloaded).

    No more than min(max_num_seqs, max_step_tokens) sequences run: each gets its token in every step, or in its turn.
    `num_micro_batches` plans at once fill the stages of a pipeline: rows take turns in them, and share `max_step_tokens`.
    `max_pinned_fraction` bounds the blocks of running and pinned tickets, `max_peer_pinned_fraction` those of one peer;
    `claim_fraction` what hand-offs may be promised beside what is held. `max_bypass`: so many later requests may start
    before one that waits, then it is next.
    """

    max_num_seqs: int
    max_step_tokens: int
    max_context_tokens: int
    max_waiting: int
    pin_seconds: float
    max_pinned_fraction: float = 0.5
    max_peer_pinned_fraction: float = 0.5
    claim_fraction: float = 0.9
    max_bypass: int = 16
    num_micro_batches: int = 1

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_step_tokens", "max_waiting", "max_bypass", "num_micro_batches"):
            if getattr(self, name) < 1:
                raise ConfigError.out_of_range(name, getattr(self, name), "at least 1")
        if self.max_context_tokens < 2:
            raise ConfigError.out_of_range("max_context_tokens", self.max_context_tokens, "at least 2")
        for name in ("max_pinned_fraction", "max_peer_pinned_fraction", "claim_fraction"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError.out_of_range(name, getattr(self, name), "above 0 and at most 1")

    @property
    def plans_in_flight(self) -> int:
        """The most: one for each stage, and one ahead."""
        return self.num_micro_batches + 1

    @property
    def plan_tokens(self) -> int:
        """The most of one plan."""
        return -(-self.max_step_tokens // self.num_micro_batches)


@dataclass(frozen=True, slots=True)
class FirstToken:
    """What a ticket's last chunk drew for one sample."""

    index: int
    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class ChunkDone:
    """Blocks of a ticket that hold their final content: (block, epoch) from index `first_block` of its block table on.
    With `after_step` they do once the plan of that number is done; who reads them waits for it, at the source's ranks.

    A partly filled block is announced once, with the last chunk. The first `held_blocks` of the ticket are skipped.
    `digests`: of each block what Executor.digests says, where these are asked for; the scheduler knows none.
    """

    key: RequestKey
    first_block: int
    blocks: tuple[tuple[int, int], ...]
    last: bool = False
    first_tokens: tuple[FirstToken, ...] = ()
    cached_tokens: int = 0
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    after_step: int = 0
    digests: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class StepEvents:
    """What a step's result means to the outside."""

    outputs: list[SequenceOutput] = field(default_factory=list)
    chunks: list[ChunkDone] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Expected:
    """What of an expected request's prompt is here: its leading `held_blocks` full blocks. `remaining` prompt tokens are
    not; the engine prefills alone when they are few (Request.local_prefill_max_tokens).

    From expect() and restart() it is what the cache has just now; from claim() on the blocks are held.
    """

    held_blocks: int
    remaining: int
    num_prompt_blocks: int
