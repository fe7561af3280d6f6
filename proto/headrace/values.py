"""Frozen values that all processes agree on. They decide nothing and touch no wire; `headrace.wire` translates them."""

import math
from dataclasses import dataclass, field, fields
from enum import StrEnum

from headrace.costmodel import CostModel
from headrace.errors import Amount, InvalidRequest

PROTOCOL_VERSION = 2
SLAB_VERSION = 1

DEFAULT_TENANT = "default"  # who has the keys of the router; everybody, where no keys are configured at all
STABLE = "stable"  # the revision of whatever no canary began

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 1024
MAX_LOGPROBS = 20
MAX_SAMPLES = 128


class Role(StrEnum):
    """What a worker does now; a value that changes at run time."""

    PREFILL = "prefill"
    DECODE = "decode"
    UNIFIED = "unified"

    @property
    def other(self) -> "Role":
        """What a worker that is lent to the other pool does; a unified one does both already."""
        return {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}.get(self, self)

    @property
    def prefills(self) -> bool:
        return self is not Role.DECODE

    @property
    def decodes(self) -> bool:
        return self is not Role.PREFILL


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """How a model is spread over ranks. rank = pp_stage · tp + tp_rank."""

    tp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        for name in ("tp", "pp"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def world_size(self) -> int:
        return self.tp * self.pp

    def __str__(self) -> str:
        return f"tp{self.tp}·pp{self.pp}"


@dataclass(frozen=True, slots=True)
class RequestKey:
    """A request's name between processes. Messages of an older attempt are dropped and answered with Abort."""

    request_id: str
    attempt: int = 1

    def next_attempt(self) -> "RequestKey":
        return RequestKey(self.request_id, self.attempt + 1)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn. Built only from valid values: a bad one raises InvalidRequest naming the field.

    Temperature 0 is greedy. top_k 0, top_p 1 and min_p 0 are off. `seed` is always set (the router draws one), and the
    randomness of a token depends on (seed, sample index, position) alone, so any worker can continue any request.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    num_logprobs: int | None = None

    def __post_init__(self) -> None:
        _check("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _check("temperature", self.temperature, 0.0, 100.0)
        _check("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check("top_k", self.top_k, 0, 2**31 - 1)
        _check("min_p", self.min_p, 0.0, 1.0)
        _check("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        _check("seed", self.seed, 0, 2**64 - 1)
        _check("min_tokens", self.min_tokens, 0, self.max_tokens)
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidRequest.out_of_range(
                "logit_bias", Amount(f"{len(self.logit_bias)} entries"), f"at most {MAX_LOGIT_BIAS} entries"
            )
        for token_id, bias in self.logit_bias:
            _check_token("logit_bias", token_id, 2**31)
            _check(f"logit_bias[{token_id}]", bias, -100.0, 100.0)
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequest.out_of_range(
                "stop_token_ids", Amount(f"{len(self.stop_token_ids)} ids"), f"at most {MAX_STOP_TOKEN_IDS} ids"
            )
        for token_id in self.stop_token_ids:
            _check_token("stop_token_ids", token_id, 2**31)
        if self.num_logprobs is not None:
            _check("logprobs", self.num_logprobs, 0, MAX_LOGPROBS)

    def check_vocabulary(self, vocab_size: int) -> None:
        """InvalidRequest when a token id that the parameters name is not in the vocabulary."""
        for token_id, _ in self.logit_bias:
            _check_token("logit_bias", token_id, vocab_size)
        for token_id in self.stop_token_ids:
            _check_token("stop_token_ids", token_id, vocab_size)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


def _check_token(name: str, token_id: int, vocab_size: int) -> None:
    if type(token_id) is not int or not 0 <= token_id < vocab_size:
        raise InvalidRequest.out_of_range(name, token_id, f"token ids from 0 to {vocab_size - 1}")


def _check(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    if isinstance(low, int) and (isinstance(value, bool) or not isinstance(value, int)):
        raise InvalidRequest.out_of_range(name, value, f"an integer from {low} to {high}")
    if not math.isfinite(value) or not (low < value if open_low else low <= value) or value > high:
        raise InvalidRequest.out_of_range(
            name, value, f"{'above' if open_low else 'from'} {low} {'and at most' if open_low else 'to'} {high}"
        )


@dataclass(frozen=True, slots=True)
class PrefillTarget:
    """The worker a decode worker sends its ticket to."""

    worker_id: str
    generation: int
    address: str


@dataclass(frozen=True, slots=True)
class Request:
    """A validated request on its way to, or on, a worker. Deadlines travel as time left, never as a time of day."""

    key: RequestKey
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    n: int = 1
    adapter: str = ""
    cache_salt: str = ""
    priority: int = 0
    seconds_left: float | None = None
    local_prefill_max_tokens: int = 0
    prefill: PrefillTarget | None = None
    traceparent: str = ""
    offer_held: bool = False

    def __post_init__(self) -> None:
        if not self.prompt_token_ids:
            raise InvalidRequest.out_of_range("prompt", Amount("no tokens"), "at least 1 token")
        _check("n", self.n, 1, MAX_SAMPLES)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)


@dataclass(frozen=True, slots=True)
class Ticket:
    """A request as its decode worker gives it to a prefill worker. The first `held_blocks` full blocks are not announced;
    `offered` are these, as (block, epoch) in the decode worker's pool, when the prefill worker may read them. `ahead`: its
    links wait for a step by themselves, so blocks may be announced before the step that fills them is done."""

    request: Request
    held_blocks: int
    router_id: str = ""
    offered: tuple[tuple[int, int], ...] = ()
    ahead: bool = False


@dataclass(frozen=True, slots=True)
class Compatibility:
    """What must be equal before two workers share KV, or a router's block ids mean anything to a worker."""

    model: str
    revision: str
    tokenizer: str
    chat_template: str
    dtype: str
    kv_dtype: str
    kv_scale: str = ""
    block_size: int = 32
    slab_version: int = SLAB_VERSION
    hash_version: int = 1
    protocol_version: int = PROTOCOL_VERSION

    def first_difference(self, other: "Compatibility") -> str | None:
        """The name of the first field that differs, or None when all are equal."""
        return next((f.name for f in fields(self) if getattr(self, f.name) != getattr(other, f.name)), None)

    @property
    def kv_format(self) -> str:
        """The part of a block's identity that is not its tokens (see headrace.blocks)."""
        return f"{self.kv_dtype}/{self.kv_scale}/{self.slab_version}"


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a worker can hold. `block_bytes` is one block over all layers and heads, summed over its ranks."""

    num_blocks: int
    block_bytes: int
    max_num_seqs: int
    max_context_tokens: int
    max_step_tokens: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """Who a worker is. `generation` grows with every start: nothing of an older one is ever credited. `probe` is its own
    answer to headrace.blocks.probe, empty when it did not say. `revision`: of the settings it was started with
    (headrace.revisions), where `compatibility.revision` is of its weights."""

    worker_id: str
    generation: int
    role: Role
    address: str
    compatibility: Compatibility
    layout: ParallelLayout
    capacity: Capacity
    model_path: str
    node: str = ""
    cost: CostModel = field(default_factory=CostModel)
    probe: bytes = b""
    revision: str = STABLE


@dataclass(slots=True)
class Load:
    """Work on a worker, or one router's part of it (design 5.6). Of the running ones `num_prefilling` compute their prompt
    still, in so many of the context's tokens.

    Nobody changes one; it is not frozen because a placement makes several, and freezing costs three times as much."""

    num_waiting: int = 0
    num_running: int = 0
    waiting_prefill_tokens: int = 0
    context_tokens: int = 0
    used_blocks: int = 0
    pinned_blocks: int = 0
    claimed_tokens: int = 0
    num_prefilling: int = 0
    prefilling_tokens: int = 0


@dataclass(frozen=True, slots=True)
class LoadReport:
    """`draining`: nothing is to be placed there, for whatever reason; `unhealthy_reason` says it where the worker is not
    well."""

    total: Load
    yours: Load
    cost: CostModel
    role: Role
    free_blocks: int
    draining: bool = False
    unhealthy_reason: str = ""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position, before temperature, penalties, bias and filters: the model's own."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts of one request. `cached_tokens`: prompt tokens that nobody computed, as the side that prefilled found."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timeline:
    """Where a request's time went on its workers, in seconds of duration, each by one process' clock.

    Alone: queue + prefill. Handed over: claim (on the decode worker, until its ticket went) + queue + prefill (both on the
    prefill worker) + transfer_exposed (what else there was until all blocks were in) + join (until it was in the batch).
    `retry`: spent before that on hand-offs that failed. All of these are the time until the first token."""

    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    transfer_exposed_seconds: float = 0.0
    decode_seconds: float = 0.0
    prefill_worker: str = ""
    blocks_moved: int = 0
    bytes_moved: int = 0
    num_preemptions: int = 0
    claim_seconds: float = 0.0
    join_seconds: float = 0.0
    retry_seconds: float = 0.0

    @property
    def ttft_seconds(self) -> float:
        """From the request's arrival on its decode worker to its first token there."""
        hand_off = self.claim_seconds + self.transfer_exposed_seconds + self.join_seconds
        return self.retry_seconds + self.queue_seconds + self.prefill_seconds + hand_off


@dataclass(slots=True)
class SequenceOutput:
    """New tokens of one sample. `num_generated` counts the sample's tokens after these; `finish` comes with its last.

    Nobody changes one; it is not frozen because one is made for every token, and freezing costs five times as much.
    """

    key: RequestKey
    index: int
    token_ids: tuple[int, ...]
    num_generated: int
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: FinishReason | None = None
    usage: Usage | None = None
    timeline: Timeline | None = None


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """How many of a pool's blocks are in which state; they sum to the pool's size."""

    free: int = 0
    cached: int = 0
    active: int = 0
    pinned: int = 0
    quarantined: int = 0
    stranded: int = 0

    @property
    def total(self) -> int:
        return self.free + self.cached + self.active + self.pinned + self.quarantined + self.stranded
