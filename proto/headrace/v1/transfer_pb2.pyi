from headrace.v1 import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RankEndpoint(_message.Message):
    __slots__ = ("kind", "address")
    KIND_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    kind: str
    address: str
    def __init__(self, kind: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class LinkHello(_message.Message):
    __slots__ = ("worker_id", "generation", "compatibility", "layout", "num_kv_heads", "num_layers", "endpoints", "node")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    COMPATIBILITY_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    generation: int
    compatibility: _worker_pb2.Compatibility
    layout: _worker_pb2.Layout
    num_kv_heads: int
    num_layers: int
    endpoints: _containers.RepeatedCompositeFieldContainer[RankEndpoint]
    node: str
    def __init__(self, worker_id: _Optional[str] = ..., generation: _Optional[int] = ..., compatibility: _Optional[_Union[_worker_pb2.Compatibility, _Mapping]] = ..., layout: _Optional[_Union[_worker_pb2.Layout, _Mapping]] = ..., num_kv_heads: _Optional[int] = ..., num_layers: _Optional[int] = ..., endpoints: _Optional[_Iterable[_Union[RankEndpoint, _Mapping]]] = ..., node: _Optional[str] = ...) -> None: ...

class Ticket(_message.Message):
    __slots__ = ("key", "prompt_token_ids", "sampling", "n", "adapter", "cache_salt", "priority", "seconds_left", "held_blocks", "traceparent", "router_id", "offered_blocks", "offered_epochs", "ahead")
    KEY_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    SECONDS_LEFT_FIELD_NUMBER: _ClassVar[int]
    HELD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    OFFERED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    OFFERED_EPOCHS_FIELD_NUMBER: _ClassVar[int]
    AHEAD_FIELD_NUMBER: _ClassVar[int]
    key: _worker_pb2.RequestKey
    prompt_token_ids: bytes
    sampling: _worker_pb2.WorkerSampling
    n: int
    adapter: str
    cache_salt: str
    priority: int
    seconds_left: float
    held_blocks: int
    traceparent: str
    router_id: str
    offered_blocks: _containers.RepeatedScalarFieldContainer[int]
    offered_epochs: _containers.RepeatedScalarFieldContainer[int]
    ahead: bool
    def __init__(self, key: _Optional[_Union[_worker_pb2.RequestKey, _Mapping]] = ..., prompt_token_ids: _Optional[bytes] = ..., sampling: _Optional[_Union[_worker_pb2.WorkerSampling, _Mapping]] = ..., n: _Optional[int] = ..., adapter: _Optional[str] = ..., cache_salt: _Optional[str] = ..., priority: _Optional[int] = ..., seconds_left: _Optional[float] = ..., held_blocks: _Optional[int] = ..., traceparent: _Optional[str] = ..., router_id: _Optional[str] = ..., offered_blocks: _Optional[_Iterable[int]] = ..., offered_epochs: _Optional[_Iterable[int]] = ..., ahead: _Optional[bool] = ...) -> None: ...

class Release(_message.Message):
    __slots__ = ("key",)
    KEY_FIELD_NUMBER: _ClassVar[int]
    key: _worker_pb2.RequestKey
    def __init__(self, key: _Optional[_Union[_worker_pb2.RequestKey, _Mapping]] = ...) -> None: ...

class Renew(_message.Message):
    __slots__ = ("key", "unheard")
    KEY_FIELD_NUMBER: _ClassVar[int]
    UNHEARD_FIELD_NUMBER: _ClassVar[int]
    key: _worker_pb2.RequestKey
    unheard: bool
    def __init__(self, key: _Optional[_Union[_worker_pb2.RequestKey, _Mapping]] = ..., unheard: _Optional[bool] = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("key", "reason")
    KEY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    key: _worker_pb2.RequestKey
    reason: _worker_pb2.ErrorInfo
    def __init__(self, key: _Optional[_Union[_worker_pb2.RequestKey, _Mapping]] = ..., reason: _Optional[_Union[_worker_pb2.ErrorInfo, _Mapping]] = ...) -> None: ...

class Beat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PullerMessage(_message.Message):
    __slots__ = ("hello", "ticket", "release", "renew", "abort", "beat")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    RENEW_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    hello: LinkHello
    ticket: Ticket
    release: Release
    renew: Renew
    abort: Abort
    beat: Beat
    def __init__(self, hello: _Optional[_Union[LinkHello, _Mapping]] = ..., ticket: _Optional[_Union[Ticket, _Mapping]] = ..., release: _Optional[_Union[Release, _Mapping]] = ..., renew: _Optional[_Union[Renew, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ..., beat: _Optional[_Union[Beat, _Mapping]] = ...) -> None: ...

class FirstToken(_message.Message):
    __slots__ = ("index", "token_id", "logprobs")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    index: int
    token_id: int
    logprobs: _worker_pb2.Logprobs
    def __init__(self, index: _Optional[int] = ..., token_id: _Optional[int] = ..., logprobs: _Optional[_Union[_worker_pb2.Logprobs, _Mapping]] = ...) -> None: ...

class Announce(_message.Message):
    __slots__ = ("key", "first_block", "blocks", "epochs", "last", "first_tokens", "cached_tokens", "queue_seconds", "prefill_seconds", "after_step", "digests")
    KEY_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    AFTER_STEP_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    key: _worker_pb2.RequestKey
    first_block: int
    blocks: _containers.RepeatedScalarFieldContainer[int]
    epochs: _containers.RepeatedScalarFieldContainer[int]
    last: bool
    first_tokens: _containers.RepeatedCompositeFieldContainer[FirstToken]
    cached_tokens: int
    queue_seconds: float
    prefill_seconds: float
    after_step: int
    digests: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, key: _Optional[_Union[_worker_pb2.RequestKey, _Mapping]] = ..., first_block: _Optional[int] = ..., blocks: _Optional[_Iterable[int]] = ..., epochs: _Optional[_Iterable[int]] = ..., last: _Optional[bool] = ..., first_tokens: _Optional[_Iterable[_Union[FirstToken, _Mapping]]] = ..., cached_tokens: _Optional[int] = ..., queue_seconds: _Optional[float] = ..., prefill_seconds: _Optional[float] = ..., after_step: _Optional[int] = ..., digests: _Optional[_Iterable[bytes]] = ...) -> None: ...

class SourceMessage(_message.Message):
    __slots__ = ("hello", "announce", "abort", "beat")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCE_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    hello: LinkHello
    announce: Announce
    abort: Abort
    beat: Beat
    def __init__(self, hello: _Optional[_Union[LinkHello, _Mapping]] = ..., announce: _Optional[_Union[Announce, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ..., beat: _Optional[_Union[Beat, _Mapping]] = ...) -> None: ...
