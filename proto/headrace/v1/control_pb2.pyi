from headrace.v1 import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class BlockCounts(_message.Message):
    __slots__ = ("free", "cached", "active", "pinned", "quarantined", "stranded")
    FREE_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    STRANDED_FIELD_NUMBER: _ClassVar[int]
    free: int
    cached: int
    active: int
    pinned: int
    quarantined: int
    stranded: int
    def __init__(self, free: _Optional[int] = ..., cached: _Optional[int] = ..., active: _Optional[int] = ..., pinned: _Optional[int] = ..., quarantined: _Optional[int] = ..., stranded: _Optional[int] = ...) -> None: ...

class PeerLink(_message.Message):
    __slots__ = ("worker_id", "generation", "kind", "reason", "state", "bytes")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    generation: int
    kind: str
    reason: str
    state: str
    bytes: int
    def __init__(self, worker_id: _Optional[str] = ..., generation: _Optional[int] = ..., kind: _Optional[str] = ..., reason: _Optional[str] = ..., state: _Optional[str] = ..., bytes: _Optional[int] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("info", "blocks", "load", "draining", "links", "num_steps", "num_preemptions", "num_handoffs_in", "num_handoffs_out", "seconds_since_progress", "unhealthy_reason", "requests", "tickets")
    INFO_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_HANDOFFS_IN_FIELD_NUMBER: _ClassVar[int]
    NUM_HANDOFFS_OUT_FIELD_NUMBER: _ClassVar[int]
    SECONDS_SINCE_PROGRESS_FIELD_NUMBER: _ClassVar[int]
    UNHEALTHY_REASON_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    TICKETS_FIELD_NUMBER: _ClassVar[int]
    info: _worker_pb2.WorkerInfo
    blocks: BlockCounts
    load: _worker_pb2.Load
    draining: bool
    links: _containers.RepeatedCompositeFieldContainer[PeerLink]
    num_steps: int
    num_preemptions: int
    num_handoffs_in: int
    num_handoffs_out: int
    seconds_since_progress: float
    unhealthy_reason: str
    requests: _containers.RepeatedCompositeFieldContainer[_worker_pb2.RequestKey]
    tickets: _containers.RepeatedCompositeFieldContainer[_worker_pb2.RequestKey]
    def __init__(self, info: _Optional[_Union[_worker_pb2.WorkerInfo, _Mapping]] = ..., blocks: _Optional[_Union[BlockCounts, _Mapping]] = ..., load: _Optional[_Union[_worker_pb2.Load, _Mapping]] = ..., draining: _Optional[bool] = ..., links: _Optional[_Iterable[_Union[PeerLink, _Mapping]]] = ..., num_steps: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., num_handoffs_in: _Optional[int] = ..., num_handoffs_out: _Optional[int] = ..., seconds_since_progress: _Optional[float] = ..., unhealthy_reason: _Optional[str] = ..., requests: _Optional[_Iterable[_Union[_worker_pb2.RequestKey, _Mapping]]] = ..., tickets: _Optional[_Iterable[_Union[_worker_pb2.RequestKey, _Mapping]]] = ...) -> None: ...

class SetRoleRequest(_message.Message):
    __slots__ = ("role",)
    ROLE_FIELD_NUMBER: _ClassVar[int]
    role: str
    def __init__(self, role: _Optional[str] = ...) -> None: ...

class SetRoleResponse(_message.Message):
    __slots__ = ("previous",)
    PREVIOUS_FIELD_NUMBER: _ClassVar[int]
    previous: str
    def __init__(self, previous: _Optional[str] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("grace_seconds",)
    GRACE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    grace_seconds: float
    def __init__(self, grace_seconds: _Optional[float] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("drained", "num_cut")
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    NUM_CUT_FIELD_NUMBER: _ClassVar[int]
    drained: bool
    num_cut: int
    def __init__(self, drained: _Optional[bool] = ..., num_cut: _Optional[int] = ...) -> None: ...

class CacheResetRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CacheResetResponse(_message.Message):
    __slots__ = ("num_blocks",)
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    def __init__(self, num_blocks: _Optional[int] = ...) -> None: ...

class ProfileRequest(_message.Message):
    __slots__ = ("num_steps", "seconds")
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    num_steps: int
    seconds: float
    def __init__(self, num_steps: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class ProfileResponse(_message.Message):
    __slots__ = ("ranks",)
    RANKS_FIELD_NUMBER: _ClassVar[int]
    ranks: _containers.RepeatedCompositeFieldContainer[RankProfile]
    def __init__(self, ranks: _Optional[_Iterable[_Union[RankProfile, _Mapping]]] = ...) -> None: ...

class RankProfile(_message.Message):
    __slots__ = ("rank", "steps", "trace")
    RANK_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    rank: int
    steps: _containers.RepeatedCompositeFieldContainer[ProfiledStep]
    trace: bytes
    def __init__(self, rank: _Optional[int] = ..., steps: _Optional[_Iterable[_Union[ProfiledStep, _Mapping]]] = ..., trace: _Optional[bytes] = ...) -> None: ...

class ProfiledStep(_message.Message):
    __slots__ = ("number", "num_prefill_tokens", "num_decode_tokens", "cpu_seconds", "gpu_seconds", "idle_seconds")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_DECODE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CPU_SECONDS_FIELD_NUMBER: _ClassVar[int]
    GPU_SECONDS_FIELD_NUMBER: _ClassVar[int]
    IDLE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    number: int
    num_prefill_tokens: int
    num_decode_tokens: int
    cpu_seconds: float
    gpu_seconds: float
    idle_seconds: float
    def __init__(self, number: _Optional[int] = ..., num_prefill_tokens: _Optional[int] = ..., num_decode_tokens: _Optional[int] = ..., cpu_seconds: _Optional[float] = ..., gpu_seconds: _Optional[float] = ..., idle_seconds: _Optional[float] = ...) -> None: ...

class FaultsRequest(_message.Message):
    __slots__ = ("faults",)
    FAULTS_FIELD_NUMBER: _ClassVar[int]
    faults: _containers.RepeatedCompositeFieldContainer[Fault]
    def __init__(self, faults: _Optional[_Iterable[_Union[Fault, _Mapping]]] = ...) -> None: ...

class Fault(_message.Message):
    __slots__ = ("point", "at", "action", "seconds", "times")
    POINT_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    point: str
    at: int
    action: str
    seconds: float
    times: int
    def __init__(self, point: _Optional[str] = ..., at: _Optional[int] = ..., action: _Optional[str] = ..., seconds: _Optional[float] = ..., times: _Optional[int] = ...) -> None: ...

class FaultsResponse(_message.Message):
    __slots__ = ("num_active",)
    NUM_ACTIVE_FIELD_NUMBER: _ClassVar[int]
    num_active: int
    def __init__(self, num_active: _Optional[int] = ...) -> None: ...
