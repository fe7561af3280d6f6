"""What rank 0's process and the other ranks say to each other, pickled; rank 0 itself is told and answers alike."""

from dataclasses import dataclass

from headrace.errors import HeadraceError
from workers.kv.layout import ModelShape
from workers.kv.links.base import BlockPull, PeerRanks, PullReceipt
from workers.ranks.profiles import RankProfile
from workers.ranks.rank_runner import MakeRunner
from workers.scheduling.plan import StepPlan, StepResult
from workers.spec import WorkerSpec


@dataclass(frozen=True, slots=True)
class Join:
    """A rank's first word."""

    rank: int


@dataclass(frozen=True, slots=True)
class Build:
    """Rank 0's answer to Join: what to become. The store is at `store_host`:`store_port`."""

    spec: WorkerSpec
    make_runner: MakeRunner
    store_host: str
    store_port: int


@dataclass(frozen=True, slots=True)
class Step:
    plan: StepPlan


@dataclass(frozen=True, slots=True)
class Digest:
    """Carried out between steps, in order with them."""

    task: int
    blocks: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Pull:
    task: int
    peer: PeerRanks
    blocks: tuple[BlockPull, ...]
    after_step: int = 0


@dataclass(frozen=True, slots=True)
class Profile:
    """From the next step on, for so many, or until EndProfile."""

    task: int
    num_steps: int


@dataclass(frozen=True, slots=True)
class EndProfile:
    pass


@dataclass(frozen=True, slots=True)
class CloseLinks:
    peer: tuple[str, int]


@dataclass(frozen=True, slots=True)
class Ping:
    pass


@dataclass(frozen=True, slots=True)
class End:
    pass


Command = Step | Digest | Profile | EndProfile | Pull | CloseLinks | Ping | End


@dataclass(frozen=True, slots=True)
class Ready:
    """Loaded and warm. `block_bytes` is this rank's part of a block."""

    shape: ModelShape
    num_blocks: int
    block_bytes: int
    endpoint: str


@dataclass(frozen=True, slots=True)
class Stepped:
    """Times as in StepResult, on this rank."""

    number: int
    result: StepResult | None
    seconds: float
    ahead_seconds: float = 0.0
    launch_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Digested:
    """`share`: the first KV head and layer that the rank holds, which replicas have in common."""

    task: int
    share: tuple[int, int]
    digests: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Pulled:
    """The pull is over on this rank: nothing writes its target blocks any more."""

    task: int
    outcome: PullReceipt | HeadraceError


@dataclass(frozen=True, slots=True)
class Profiled:
    task: int
    outcome: RankProfile | HeadraceError


@dataclass(frozen=True, slots=True)
class Failed:
    """The rank is of no more use."""

    error: HeadraceError


@dataclass(frozen=True, slots=True)
class Pong:
    pass


Reply = Ready | Stepped | Digested | Profiled | Pulled | Failed | Pong
