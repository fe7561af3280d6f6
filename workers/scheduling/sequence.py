"""One request on this worker, and one sequence per sample of it: tokens, block table, and how far each has come.

Both are mutable and owned by the scheduler's parts (`scheduler`, `batch`): nobody else keeps them.
A request starts as one trunk sequence that computes the prompt; a request with n > 1 forks n of them from it.
"""

from collections.abc import Iterable
from enum import Enum

from headrace.blocks import ROOT, BlockHasher, BlockId
from headrace.values import FinishReason, Load, Request, RequestKey, SequenceOutput, Timeline, TokenLogprobs, Usage
from workers.scheduling.blocks import Holding


class Kind(Enum):
    """What this worker does for a request; see workers.scheduling.scheduler."""

    LOCAL = "local"
    EXPECTED = "expected"
    TICKET = "ticket"


class Stage(Enum):
    """Where a sequence is. ENDED and PREEMPTED ones may still be in a plan in flight."""

    WAITING = "waiting"
    ARRIVED = "arrived"
    RUNNING = "running"
    PREEMPTED = "preempted"
    PINNED = "pinned"
    ENDED = "ended"


class RequestState:
    """What all samples of a request share. `order` numbers arrivals; `rank` sorts those who wait."""

    __slots__ = (
        "ahead",
        "arrived_at",
        "asked",
        "began_at",
        "bypassed",
        "cached_tokens",
        "claimed_blocks",
        "deadline",
        "first_token_at",
        "hasher",
        "held_blocks",
        "key",
        "kind",
        "max_new_tokens",
        "min_tokens",
        "num_announced",
        "num_landed",
        "num_preemptions",
        "num_unfinished",
        "order",
        "peer",
        "pin_blocked",
        "prompt_chain",
        "rank",
        "request",
        "samples",
        "started_at",
        "stop_ids",
        "transfer",
    )

    def __init__(
        self,
        request: Request,
        kind: Kind,
        *,
        order: int,
        now: float,
        hasher: BlockHasher,
        eos_token_ids: frozenset[int],
        max_context_tokens: int,
        peer: str = "",
    ) -> None:
        sampling = request.sampling
        self.request = request
        self.key = request.key
        self.kind = kind
        self.order = order
        self.rank = (-request.priority, order)
        self.peer = peer
        self.ahead = False
        self.hasher = hasher
        self.prompt_chain: list[BlockId] = list(hasher.chain(request.prompt_token_ids))
        self.stop_ids = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else eos_token_ids)
        self.min_tokens = sampling.min_tokens
        self.max_new_tokens = min(sampling.max_tokens, max_context_tokens - request.num_prompt_tokens)
        self.samples: list[Sequence] = [Sequence(self, 0, self.prompt_chain)]
        self.num_unfinished = request.n
        self.cached_tokens = 0
        self.bypassed = 0
        self.asked = False
        self.pin_blocked = False
        # the hand-off
        self.held_blocks = 0
        self.num_announced = 0
        self.num_landed = 0
        self.claimed_blocks = 0
        # times, on the caller's clock
        self.arrived_at = now
        self.deadline = None if request.seconds_left is None else now + request.seconds_left
        self.began_at = now
        self.started_at: float | None = None
        self.first_token_at: float | None = None
        self.num_preemptions = 0
        self.transfer = Transfer()

    @property
    def trunk(self) -> "Sequence":
        return self.samples[0]

    def finish_of(self, token_id: int, num_generated: int) -> FinishReason | None:
        """Whether a sample ends with this token, its `num_generated`th. The one rule, wherever the token was drawn."""
        if token_id in self.stop_ids and num_generated >= self.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if num_generated >= self.max_new_tokens else None

    def end_sample(self) -> bool:
        """Notes that a sample ends; whether it is the last one."""
        self.num_unfinished -= 1
        return self.num_unfinished == 0

    def usage(self) -> Usage:
        num_generated = sum(len(sample.outputs) for sample in self.samples)
        return Usage(self.request.num_prompt_tokens, num_generated, self.cached_tokens)

    def timeline(self, now: float) -> Timeline:
        transfer = self.transfer
        first = now if self.first_token_at is None else self.first_token_at
        began, retry = self.began_at, self.began_at - self.arrived_at
        if not transfer.prefill_worker:
            started = first if self.started_at is None else self.started_at
            return Timeline(
                queue_seconds=started - began,
                prefill_seconds=first - started,
                decode_seconds=now - first,
                num_preemptions=self.num_preemptions,
                retry_seconds=retry,
            )
        asked = began if transfer.asked_at is None else transfer.asked_at
        landed = first if transfer.landed_at is None else transfer.landed_at
        return Timeline(
            queue_seconds=transfer.queue_seconds,
            prefill_seconds=transfer.prefill_seconds,
            transfer_exposed_seconds=landed - asked - transfer.queue_seconds - transfer.prefill_seconds,
            decode_seconds=now - first,
            prefill_worker=transfer.prefill_worker,
            blocks_moved=transfer.num_blocks,
            bytes_moved=transfer.num_bytes,
            num_preemptions=self.num_preemptions,
            claim_seconds=asked - began,
            join_seconds=first - landed,
            retry_seconds=retry,
        )


class Transfer:
    """What the hand-off of a request cost, as its owner noted it (Scheduler.note_transfer). `asked_at`: its ticket went;
    `landed_at`: the last block was in."""

    __slots__ = (
        "asked_at",
        "landed_at",
        "num_blocks",
        "num_bytes",
        "prefill_seconds",
        "prefill_worker",
        "queue_seconds",
    )

    def __init__(self) -> None:
        self.prefill_worker = ""
        self.num_blocks = 0
        self.num_bytes = 0
        self.asked_at: float | None = None
        self.landed_at: float | None = None
        self.queue_seconds = 0.0
        self.prefill_seconds = 0.0


class Sequence:
    """One sample. Positions below `num_scheduled` hold KV, or a plan in flight writes it.

    `num_computed`: those of the prompt (or of all that is computed again) whose KV is final; while it decodes it is
    brought up to date only when a block fills. `num_sent` blocks of the table are known to the row; `row` means
    something while RUNNING, and while a plan in flight may still use it. `reserved` blocks are promised to its known
    tokens and not yet allocated. `planned`: the last plan that it is in, noted where there are micro-batches.

    Three marks keep the decode loops short: at position `fill_at` the row needs a block (or is not begun), position
    `end_position` is never computed, and the `event_at`th token fills a block or is the last.
    """

    __slots__ = (
        "chain",
        "end_position",
        "event_at",
        "fill_at",
        "holding",
        "index",
        "key",
        "num_computed",
        "num_prompt",
        "num_published",
        "num_scheduled",
        "num_sent",
        "outputs",
        "planned",
        "reserved",
        "row",
        "row_started",
        "spare_rows",
        "stage",
        "state",
        "stop_ids",
    )

    def __init__(self, state: RequestState, index: int, chain: list[BlockId]) -> None:
        self.state = state
        self.key: RequestKey = state.key
        self.index = index
        self.chain = chain
        self.num_prompt = state.request.num_prompt_tokens
        self.outputs: list[int] = []
        self.stage = Stage.WAITING
        self.row = 0
        self.row_started = False
        self.spare_rows: list[int] = []
        self.holding: Holding | None = None
        self.reserved = 0
        self.planned = 0
        self.stop_ids = state.stop_ids
        self.end_position = self.num_prompt + state.max_new_tokens - 1
        self.rewind()

    def rewind(self) -> None:
        """Nothing is computed: the start, and what preemption goes back to."""
        self.num_computed = self.num_scheduled = self.num_sent = self.fill_at = 0
        self.set_published(0)

    def set_published(self, num_blocks: int) -> None:
        """Its first `num_blocks` blocks are in the cache, or came from it."""
        self.num_published = num_blocks
        fills_at = (num_blocks + 1) * self.state.hasher.block_size - self.num_prompt + 1
        self.event_at = min(fills_at, self.state.max_new_tokens)

    @property
    def num_tokens(self) -> int:
        """Tokens that are known."""
        return self.num_prompt + len(self.outputs)

    @property
    def is_prefilling(self) -> bool:
        """Its prompt is not computed yet. What is computed again after a preemption has been decoding."""
        return not self.outputs and self.num_computed < self.num_prompt

    @property
    def num_samples(self) -> int:
        """How many tokens are drawn when all known ones are computed."""
        return 1 if self.outputs else self.state.request.n

    @property
    def blocks(self) -> list[int]:
        return [] if self.holding is None else self.holding.blocks

    def tokens(self, start: int, end: int) -> tuple[int, ...]:
        """Known tokens at positions start to end - 1."""
        prompt = self.state.request.prompt_token_ids
        if end <= self.num_prompt:
            return prompt[start:end]
        shift = self.num_prompt
        return prompt[start:] + tuple(self.outputs[max(start - shift, 0) : end - shift])

    def extend_chain(self, num_blocks: int) -> list[BlockId]:
        """The ids of the first `num_blocks` blocks, and maybe more; the tokens of all of these are known."""
        chain = self.chain
        if len(chain) < num_blocks:
            if chain is self.state.prompt_chain:
                chain = self.chain = list(chain)
            hasher = self.state.hasher
            first = len(chain) * hasher.block_size
            parent = chain[-1] if chain else ROOT
            chain += hasher.chain(self.tokens(first, num_blocks * hasher.block_size), parent)
        return chain

    def accept(self, token_id: int, logprobs: TokenLogprobs | None, now: float) -> SequenceOutput:
        """Takes the sample's next token, wherever it was drawn. `finish` in the output: the sample is over."""
        state = self.state
        outputs = self.outputs
        outputs.append(token_id)
        num_generated = len(outputs)
        finish = state.finish_of(token_id, num_generated)
        usage = timeline = None
        if state.first_token_at is None:
            state.first_token_at = now
        if num_generated == 1 and self.index == 0:
            usage, timeline = state.usage(), state.timeline(now)
        if finish is not None and state.end_sample():
            usage, timeline = state.usage(), state.timeline(now)
        found = () if logprobs is None else (logprobs,)
        return SequenceOutput(self.key, self.index, (token_id,), num_generated, found, finish, usage, timeline)

    def stop(self, now: float) -> SequenceOutput:
        """Ends the sample where it is, without another token: who reads it met a stop of its own."""
        state, num_generated = self.state, len(self.outputs)
        ends = (state.usage(), state.timeline(now)) if state.end_sample() else (None, None)
        return SequenceOutput(self.key, self.index, (), num_generated, (), FinishReason.STOP, *ends)

    def __repr__(self) -> str:
        return (
            f"Sequence({self.key.request_id}/{self.key.attempt}#{self.index}, {self.stage.value}, "
            f"{self.num_computed} of {self.num_tokens} computed)"
        )


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


def load_of(states: Iterable[RequestState]) -> Load:
    """The part of a worker's load that these requests are. Parts sum to the whole: a block that several sequences share
    counts for each (BlockCounts say what the pool holds)."""
    waiting = running = prefill_tokens = context_tokens = used = pinned = claimed = prefilling = prefilling_tokens = 0
    for state in states:
        claimed += state.claimed_blocks * state.hasher.block_size
        for sample in state.samples:
            used += len(sample.blocks)
            match sample.stage:
                case Stage.RUNNING | Stage.ARRIVED:
                    running += 1
                    context_tokens += sample.num_tokens
                    if sample.is_prefilling:
                        prefilling += 1
                        prefilling_tokens += sample.num_tokens
                    prefill_tokens += max(
                        sample.num_prompt - sample.num_computed, sample.num_tokens - sample.num_scheduled - 1, 0
                    )
                case Stage.WAITING | Stage.PREEMPTED:
                    waiting += 1
                    if state.kind is not Kind.EXPECTED or sample.stage is Stage.PREEMPTED:
                        prefill_tokens += sample.num_tokens
                case Stage.PINNED:
                    pinned += len(sample.blocks)
                case Stage.ENDED:
                    pass
    return Load(waiting, running, prefill_tokens, context_tokens, used, pinned, claimed, prefilling, prefilling_tokens)
