"""What a worker is started with: one frozen value, the same for `python -m workers` and for a Ray actor."""

from dataclasses import dataclass, field

from headrace.config import EngineConfig, HandoffConfig
from headrace.values import STABLE, ParallelLayout, Role


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """`generation` grows with every start of the same worker id. `redis_url` None: the worker publishes nothing.

    `host` is where the service binds and how peers reach it; port 0 takes any free one. `rendezvous_token` is the shared
    secret by which the other ranks join rank 0. `gpu_hour_price`: of one GPU, as whoever pays counts it. `revision`: the
    name of these settings among others that serve the same model.
    """

    worker_id: str
    generation: int
    role: Role
    model_path: str
    layout: ParallelLayout = field(default_factory=ParallelLayout)
    engine: EngineConfig = field(default_factory=EngineConfig)
    handoff: HandoffConfig = field(default_factory=HandoffConfig)
    cluster: str = "headrace"
    redis_url: str | None = None
    redis_budget_seconds: float = 0.25
    lease_seconds: float = 5.0
    host: str = "127.0.0.1"
    port: int = 0
    node: str = ""
    fault_hooks: bool = False
    gpu_hour_price: float | None = None
    otlp_endpoint: str | None = None
    log_format: str = "text"
    rendezvous_token: str = ""
    revision: str = STABLE

    @property
    def num_micro_batches(self) -> int:
        """Plans at once beside the one ahead."""
        asked = self.engine.micro_batches if self.engine.overlap else 1
        return min(asked or self.layout.pp, self.layout.pp)

    def launches_late(self, role: Role) -> bool:
        """Whether steps are launched late in this role: not with several stages, which two steps in flight keep busy."""
        asked = self.engine.late_launch
        wanted = asked if asked is not None else role is Role.DECODE and self.engine.device == "cuda"
        return wanted and self.layout.pp == 1
