from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RequestKey(_message.Message):
    __slots__ = ("request_id", "attempt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ...) -> None: ...

class Layout(_message.Message):
    __slots__ = ("tp", "pp")
    TP_FIELD_NUMBER: _ClassVar[int]
    PP_FIELD_NUMBER: _ClassVar[int]
    tp: int
    pp: int
    def __init__(self, tp: _Optional[int] = ..., pp: _Optional[int] = ...) -> None: ...

class Compatibility(_message.Message):
    __slots__ = ("model", "revision", "tokenizer", "chat_template", "dtype", "kv_dtype", "kv_scale", "block_size", "slab_version", "hash_version", "protocol_version")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    KV_SCALE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    SLAB_VERSION_FIELD_NUMBER: _ClassVar[int]
    HASH_VERSION_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    model: str
    revision: str
    tokenizer: str
    chat_template: str
    dtype: str
    kv_dtype: str
    kv_scale: str
    block_size: int
    slab_version: int
    hash_version: int
    protocol_version: int
    def __init__(self, model: _Optional[str] = ..., revision: _Optional[str] = ..., tokenizer: _Optional[str] = ..., chat_template: _Optional[str] = ..., dtype: _Optional[str] = ..., kv_dtype: _Optional[str] = ..., kv_scale: _Optional[str] = ..., block_size: _Optional[int] = ..., slab_version: _Optional[int] = ..., hash_version: _Optional[int] = ..., protocol_version: _Optional[int] = ...) -> None: ...

class Capacity(_message.Message):
    __slots__ = ("num_blocks", "block_bytes", "max_num_seqs", "max_context_tokens", "max_step_tokens", "vocab_size")
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    block_bytes: int
    max_num_seqs: int
    max_context_tokens: int
    max_step_tokens: int
    vocab_size: int
    def __init__(self, num_blocks: _Optional[int] = ..., block_bytes: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., max_context_tokens: _Optional[int] = ..., max_step_tokens: _Optional[int] = ..., vocab_size: _Optional[int] = ...) -> None: ...

class CostModel(_message.Message):
    __slots__ = ("prefill_base_seconds", "prefill_token_seconds", "prefill_token_context_seconds", "decode_base_seconds", "decode_sequence_seconds", "decode_context_token_seconds", "transfer_base_seconds", "transfer_bytes_per_second")
    PREFILL_BASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKEN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKEN_CONTEXT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DECODE_BASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DECODE_SEQUENCE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DECODE_CONTEXT_TOKEN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_BASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    prefill_base_seconds: float
    prefill_token_seconds: float
    prefill_token_context_seconds: float
    decode_base_seconds: float
    decode_sequence_seconds: float
    decode_context_token_seconds: float
    transfer_base_seconds: float
    transfer_bytes_per_second: float
    def __init__(self, prefill_base_seconds: _Optional[float] = ..., prefill_token_seconds: _Optional[float] = ..., prefill_token_context_seconds: _Optional[float] = ..., decode_base_seconds: _Optional[float] = ..., decode_sequence_seconds: _Optional[float] = ..., decode_context_token_seconds: _Optional[float] = ..., transfer_base_seconds: _Optional[float] = ..., transfer_bytes_per_second: _Optional[float] = ...) -> None: ...

class WorkerInfo(_message.Message):
    __slots__ = ("worker_id", "generation", "role", "address", "compatibility", "layout", "capacity", "cost", "model_path", "node", "probe", "revision")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    COMPATIBILITY_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    COST_FIELD_NUMBER: _ClassVar[int]
    MODEL_PATH_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    generation: int
    role: str
    address: str
    compatibility: Compatibility
    layout: Layout
    capacity: Capacity
    cost: CostModel
    model_path: str
    node: str
    probe: bytes
    revision: str
    def __init__(self, worker_id: _Optional[str] = ..., generation: _Optional[int] = ..., role: _Optional[str] = ..., address: _Optional[str] = ..., compatibility: _Optional[_Union[Compatibility, _Mapping]] = ..., layout: _Optional[_Union[Layout, _Mapping]] = ..., capacity: _Optional[_Union[Capacity, _Mapping]] = ..., cost: _Optional[_Union[CostModel, _Mapping]] = ..., model_path: _Optional[str] = ..., node: _Optional[str] = ..., probe: _Optional[bytes] = ..., revision: _Optional[str] = ...) -> None: ...

class WorkerSampling(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "bias_token_ids", "bias_values", "seed", "max_tokens", "min_tokens", "ignore_eos", "stop_token_ids", "num_logprobs")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    BIAS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BIAS_VALUES_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    bias_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bias_values: _containers.RepeatedScalarFieldContainer[float]
    seed: int
    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_logprobs: int
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., bias_token_ids: _Optional[_Iterable[int]] = ..., bias_values: _Optional[_Iterable[float]] = ..., seed: _Optional[int] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., ignore_eos: _Optional[bool] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., num_logprobs: _Optional[int] = ...) -> None: ...

class PrefillTarget(_message.Message):
    __slots__ = ("worker_id", "generation", "address")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    generation: int
    address: str
    def __init__(self, worker_id: _Optional[str] = ..., generation: _Optional[int] = ..., address: _Optional[str] = ...) -> None: ...

class RouterHello(_message.Message):
    __slots__ = ("router_id", "protocol_version")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    protocol_version: int
    def __init__(self, router_id: _Optional[str] = ..., protocol_version: _Optional[int] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("key", "prompt_token_ids", "sampling", "n", "adapter", "cache_salt", "priority", "seconds_left", "local_prefill_max_tokens", "prefill", "traceparent", "offer_held", "first_sample")
    KEY_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    SECONDS_LEFT_FIELD_NUMBER: _ClassVar[int]
    LOCAL_PREFILL_MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    OFFER_HELD_FIELD_NUMBER: _ClassVar[int]
    FIRST_SAMPLE_FIELD_NUMBER: _ClassVar[int]
    key: RequestKey
    prompt_token_ids: bytes
    sampling: WorkerSampling
    n: int
    adapter: str
    cache_salt: str
    priority: int
    seconds_left: float
    local_prefill_max_tokens: int
    prefill: PrefillTarget
    traceparent: str
    offer_held: bool
    first_sample: int
    def __init__(self, key: _Optional[_Union[RequestKey, _Mapping]] = ..., prompt_token_ids: _Optional[bytes] = ..., sampling: _Optional[_Union[WorkerSampling, _Mapping]] = ..., n: _Optional[int] = ..., adapter: _Optional[str] = ..., cache_salt: _Optional[str] = ..., priority: _Optional[int] = ..., seconds_left: _Optional[float] = ..., local_prefill_max_tokens: _Optional[int] = ..., prefill: _Optional[_Union[PrefillTarget, _Mapping]] = ..., traceparent: _Optional[str] = ..., offer_held: _Optional[bool] = ..., first_sample: _Optional[int] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("key",)
    KEY_FIELD_NUMBER: _ClassVar[int]
    key: RequestKey
    def __init__(self, key: _Optional[_Union[RequestKey, _Mapping]] = ...) -> None: ...

class StopSample(_message.Message):
    __slots__ = ("key", "index")
    KEY_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    key: RequestKey
    index: int
    def __init__(self, key: _Optional[_Union[RequestKey, _Mapping]] = ..., index: _Optional[int] = ...) -> None: ...

class Place(_message.Message):
    __slots__ = ("key", "prefill")
    KEY_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    key: RequestKey
    prefill: PrefillTarget
    def __init__(self, key: _Optional[_Union[RequestKey, _Mapping]] = ..., prefill: _Optional[_Union[PrefillTarget, _Mapping]] = ...) -> None: ...

class Ping(_message.Message):
    __slots__ = ("nonce",)
    NONCE_FIELD_NUMBER: _ClassVar[int]
    nonce: int
    def __init__(self, nonce: _Optional[int] = ...) -> None: ...

class RouterMessage(_message.Message):
    __slots__ = ("hello", "submit", "cancel", "place", "ping", "stop_sample")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    STOP_SAMPLE_FIELD_NUMBER: _ClassVar[int]
    hello: RouterHello
    submit: Submit
    cancel: Cancel
    place: Place
    ping: Ping
    stop_sample: StopSample
    def __init__(self, hello: _Optional[_Union[RouterHello, _Mapping]] = ..., submit: _Optional[_Union[Submit, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., place: _Optional[_Union[Place, _Mapping]] = ..., ping: _Optional[_Union[Ping, _Mapping]] = ..., stop_sample: _Optional[_Union[StopSample, _Mapping]] = ...) -> None: ...

class Logprobs(_message.Message):
    __slots__ = ("token_ids", "values")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    values: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., values: _Optional[_Iterable[float]] = ...) -> None: ...

class WorkerUsage(_message.Message):
    __slots__ = ("prompt_tokens", "cached_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    cached_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class WorkerTimeline(_message.Message):
    __slots__ = ("queue_seconds", "prefill_seconds", "transfer_exposed_seconds", "decode_seconds", "prefill_worker", "blocks_moved", "bytes_moved", "num_preemptions", "claim_seconds", "join_seconds", "retry_seconds")
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_EXPOSED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DECODE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_WORKER_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_MOVED_FIELD_NUMBER: _ClassVar[int]
    BYTES_MOVED_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    CLAIM_SECONDS_FIELD_NUMBER: _ClassVar[int]
    JOIN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    RETRY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    queue_seconds: float
    prefill_seconds: float
    transfer_exposed_seconds: float
    decode_seconds: float
    prefill_worker: str
    blocks_moved: int
    bytes_moved: int
    num_preemptions: int
    claim_seconds: float
    join_seconds: float
    retry_seconds: float
    def __init__(self, queue_seconds: _Optional[float] = ..., prefill_seconds: _Optional[float] = ..., transfer_exposed_seconds: _Optional[float] = ..., decode_seconds: _Optional[float] = ..., prefill_worker: _Optional[str] = ..., blocks_moved: _Optional[int] = ..., bytes_moved: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., claim_seconds: _Optional[float] = ..., join_seconds: _Optional[float] = ..., retry_seconds: _Optional[float] = ...) -> None: ...

class SequenceOutput(_message.Message):
    __slots__ = ("key", "index", "token_ids", "logprobs", "num_generated", "finish", "usage", "timeline")
    KEY_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NUM_GENERATED_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    key: RequestKey
    index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[Logprobs]
    num_generated: int
    finish: str
    usage: WorkerUsage
    timeline: WorkerTimeline
    def __init__(self, key: _Optional[_Union[RequestKey, _Mapping]] = ..., index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[Logprobs, _Mapping]]] = ..., num_generated: _Optional[int] = ..., finish: _Optional[str] = ..., usage: _Optional[_Union[WorkerUsage, _Mapping]] = ..., timeline: _Optional[_Union[WorkerTimeline, _Mapping]] = ...) -> None: ...

class StepOutputs(_message.Message):
    __slots__ = ("outputs", "samples", "token_ids", "num_generated")
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_GENERATED_FIELD_NUMBER: _ClassVar[int]
    outputs: _containers.RepeatedCompositeFieldContainer[SequenceOutput]
    samples: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_generated: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, outputs: _Optional[_Iterable[_Union[SequenceOutput, _Mapping]]] = ..., samples: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., num_generated: _Optional[_Iterable[int]] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("num_waiting", "num_running", "waiting_prefill_tokens", "context_tokens", "used_blocks", "pinned_blocks", "claimed_tokens", "num_prefilling", "prefilling_tokens")
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    USED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PINNED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CLAIMED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFILLING_FIELD_NUMBER: _ClassVar[int]
    PREFILLING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_waiting: int
    num_running: int
    waiting_prefill_tokens: int
    context_tokens: int
    used_blocks: int
    pinned_blocks: int
    claimed_tokens: int
    num_prefilling: int
    prefilling_tokens: int
    def __init__(self, num_waiting: _Optional[int] = ..., num_running: _Optional[int] = ..., waiting_prefill_tokens: _Optional[int] = ..., context_tokens: _Optional[int] = ..., used_blocks: _Optional[int] = ..., pinned_blocks: _Optional[int] = ..., claimed_tokens: _Optional[int] = ..., num_prefilling: _Optional[int] = ..., prefilling_tokens: _Optional[int] = ...) -> None: ...

class LoadReport(_message.Message):
    __slots__ = ("total", "yours", "cost", "role", "draining", "free_blocks", "unhealthy_reason")
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    YOURS_FIELD_NUMBER: _ClassVar[int]
    COST_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    UNHEALTHY_REASON_FIELD_NUMBER: _ClassVar[int]
    total: Load
    yours: Load
    cost: CostModel
    role: str
    draining: bool
    free_blocks: int
    unhealthy_reason: str
    def __init__(self, total: _Optional[_Union[Load, _Mapping]] = ..., yours: _Optional[_Union[Load, _Mapping]] = ..., cost: _Optional[_Union[CostModel, _Mapping]] = ..., role: _Optional[str] = ..., draining: _Optional[bool] = ..., free_blocks: _Optional[int] = ..., unhealthy_reason: _Optional[str] = ...) -> None: ...

class ErrorInfo(_message.Message):
    __slots__ = ("type", "message", "numbers")
    class NumbersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    TYPE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    type: str
    message: str
    numbers: _containers.ScalarMap[str, str]
    def __init__(self, type: _Optional[str] = ..., message: _Optional[str] = ..., numbers: _Optional[_Mapping[str, str]] = ...) -> None: ...

class PeerLost(_message.Message):
    __slots__ = ("key", "worker_id", "generation", "error")
    KEY_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    key: RequestKey
    worker_id: str
    generation: int
    error: ErrorInfo
    def __init__(self, key: _Optional[_Union[RequestKey, _Mapping]] = ..., worker_id: _Optional[str] = ..., generation: _Optional[int] = ..., error: _Optional[_Union[ErrorInfo, _Mapping]] = ...) -> None: ...

class Rejected(_message.Message):
    __slots__ = ("key", "error")
    KEY_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    key: RequestKey
    error: ErrorInfo
    def __init__(self, key: _Optional[_Union[RequestKey, _Mapping]] = ..., error: _Optional[_Union[ErrorInfo, _Mapping]] = ...) -> None: ...

class Pong(_message.Message):
    __slots__ = ("nonce",)
    NONCE_FIELD_NUMBER: _ClassVar[int]
    nonce: int
    def __init__(self, nonce: _Optional[int] = ...) -> None: ...

class Leaving(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerMessage(_message.Message):
    __slots__ = ("hello", "outputs", "load", "peer_lost", "rejected", "pong", "leaving")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    PEER_LOST_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    PONG_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    hello: WorkerInfo
    outputs: StepOutputs
    load: LoadReport
    peer_lost: PeerLost
    rejected: Rejected
    pong: Pong
    leaving: Leaving
    def __init__(self, hello: _Optional[_Union[WorkerInfo, _Mapping]] = ..., outputs: _Optional[_Union[StepOutputs, _Mapping]] = ..., load: _Optional[_Union[LoadReport, _Mapping]] = ..., peer_lost: _Optional[_Union[PeerLost, _Mapping]] = ..., rejected: _Optional[_Union[Rejected, _Mapping]] = ..., pong: _Optional[_Union[Pong, _Mapping]] = ..., leaving: _Optional[_Union[Leaving, _Mapping]] = ...) -> None: ...
