"""The one YAML file of a cluster, frozen; `headrace.config_file` reads and validates it, once at the edge.

    model: models/smollm2-135m-instruct        # a local folder or a hub id
    pools:
      prefill: {role: prefill, replicas: 1}
      decode:  {role: decode, replicas: 1, tp: 1, pp: 1}
    router: {grpc_port: 50051, http_port: 8000}
    redis: {url: null}                         # null: an embedded Valkey is started
    ray: {address: null}                       # null: a Ray of this machine alone is started

An unknown key or an impossible value raises ConfigError with the key, the value and what is allowed.
"""

from typing import Annotated, Literal

from pydantic import Field

from headrace.config_rollouts import RolloutsConfig
from headrace.config_section import Name, Section
from headrace.config_tenants import AdmissionConfig, ServiceClassConfig, TenantConfig
from headrace.values import ParallelLayout, Role

Port = int
Origin = Annotated[str, Field(pattern=r"^(\*|[a-z][a-z0-9+.-]*://[^/\s*@A-Z]+)$")]
RankResources = dict[str, Annotated[float, Field(gt=0, le=4096, strict=False)]]


class PoolConfig(Section):
    """Workers of one kind. GPUs per replica = tp × pp, or none on CPU. `rank_resources`: what Ray sets aside for each rank
    of this pool, which ties it to nodes that have a resource of its own; null: what `ray.rank_resources` says. Where pools
    are scaled (`autoscaling.mode`), they begin with `replicas` and stay within `min_replicas` and `max_replicas`."""

    role: Literal["prefill", "decode", "unified"]
    replicas: int = Field(default=1, ge=0, le=4096)
    min_replicas: int | None = Field(default=None, ge=0, le=4096, description="null: `replicas`")
    max_replicas: int | None = Field(default=None, ge=0, le=4096, description="null: `replicas`")
    tp: int = Field(default=1, ge=1, le=64)
    pp: int = Field(default=1, ge=1, le=64)
    rank_resources: RankResources | None = Field(default=None, min_length=1)
    gpu_hour_price: float | None = Field(
        default=None,
        ge=0,
        le=10**6,
        description="of one of its GPUs, in whatever currency: what tokens cost is measured",
    )

    @property
    def layout(self) -> ParallelLayout:
        return ParallelLayout(self.tp, self.pp)

    @property
    def worker_role(self) -> Role:
        return Role(self.role)

    @property
    def bounds(self) -> tuple[int, int]:
        """The fewest and the most workers, where the pool is scaled."""
        least = self.replicas if self.min_replicas is None else self.min_replicas
        most = self.replicas if self.max_replicas is None else self.max_replicas
        return least, most


class EngineConfig(Section):
    """One worker's engine; the same for all pools."""

    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    block_size: int = Field(default=32, ge=1, le=1024)
    num_blocks: int | None = Field(default=None, ge=2, description="null: from kv_bytes, or what the device has left")
    kv_bytes: int = Field(default=512 * 2**20, ge=2**16)
    max_num_seqs: int = Field(default=64, ge=1, le=4096)
    max_step_tokens: int = Field(default=512, ge=1, le=2**20)
    max_context_tokens: int | None = Field(default=None, ge=1, description="null: the model's own")
    max_waiting: int = Field(default=256, ge=1)
    overlap: bool = True
    late_launch: bool | None = Field(
        default=None,
        description="behind a step of decodes the next is launched shortly before its end, not one step ahead: what "
        "becomes runnable meanwhile joins it. null: on GPUs, while in a decode pool. Of no effect with several stages",
    )
    micro_batches: int | None = Field(
        default=None,
        ge=1,
        le=64,
        description="plans at once over a worker's pipeline stages, of different sequences, which share max_step_tokens; "
        "null, and at most: as many as stages",
    )
    stall_seconds: float = Field(
        default=30.0, gt=0, le=3600, description="work without a finished step for so long makes a worker NOT_SERVING"
    )
    torch_threads: int = Field(default=1, ge=1, le=256)
    nvtx: bool = Field(default=False, description="names stretches of time for Nsight Systems; device cuda")
    deterministic: bool = Field(
        default=False,
        description="an answer and its log-probabilities are the same to the bit in any batch, chunking or cache, on "
        "workers of one kind and layout; slower: libraries' products and dense attention are off",
    )


class HandoffConfig(Section):
    """Times in seconds. A pin lives `pin_seconds` beyond the last sign of progress; a peer may be silent so long."""

    pin_seconds: float = Field(default=10.0, gt=0, le=3600)
    transfer_seconds: float = Field(default=10.0, gt=0, le=3600)
    max_pinned_fraction: float = Field(default=0.5, gt=0, le=1)
    claim_fraction: float = Field(default=0.9, gt=0, le=1)
    local_prefill_max_tokens: int = Field(default=64, ge=0)
    rdma: bool = Field(
        default=False,
        description="read over NIXL (the extra rdma) where both workers are asked to and no GPU memory can be mapped",
    )
    digests: bool = Field(
        default=False,
        description="to find faults: a digest of every block handed over is announced with it, and a read that gives "
        "another fails; slow, since blocks are digested on the host",
    )


class LimitsConfig(Section):
    max_queue: int = Field(default=1024, ge=1)
    max_body_bytes: int = Field(
        default=2 * 2**20,
        ge=1024,
        le=2**31 - 1,
        description="of an HTTP body or gRPC message; JSON is parsed in one piece, which holds up all of the router's "
        "streams for 0.05 s a MiB at worst (0.1 s at this default, near 1 s at 8 MiB)",
    )
    default_max_tokens: int = Field(default=512, ge=1)
    request_seconds: float = Field(default=600.0, gt=0)


class DecisionLogConfig(Section):
    """A sample of a router's placements, each with its whole input, as JSON lines. One file for each router; it and the
    older ones beside it take `num_files` × `max_bytes` of disk."""

    path: str | None = Field(default=None, min_length=1, description="null: no log; relative: from where the file is")
    fraction: float = Field(default=0.01, gt=0, le=1, description="of the requests")
    max_bytes: int = Field(default=64 * 2**20, ge=2**20)
    num_files: int = Field(default=4, ge=2, le=1000)


class AutoscalingConfig(Section):
    """Who sizes pools, and flips the roles of their workers: nobody (`fixed`), the controller (`controller`), or others by
    what it advises, while it flips roles alone (`external`). `dry-run` decides and records, and changes nothing. Times in
    seconds; docs/autoscaling.md has the model."""

    mode: Literal["fixed", "dry-run", "external", "controller"] = "fixed"
    budget_gpus: int | None = Field(
        default=None,
        ge=1,
        le=2**20,
        description="of all pools together, tp × pp each worker; null: what `max_replicas` give",
    )
    service_class: Name | None = Field(
        default=None, description="whose targets pools are sized for; null: that of `admission.service_class`"
    )
    attainment: float = Field(default=0.99, ge=0.5, lt=1, description="of requests that are to meet those targets")
    interval_seconds: float = Field(default=15.0, ge=0.1, le=3600, description="between decisions")
    window_seconds: float = Field(default=120.0, ge=1, le=3600, description="what counts as the load of now")
    lead_seconds: float = Field(
        default=300.0, ge=0, le=7200, description="how far ahead of the load workers are started"
    )
    hold_seconds: float = Field(
        default=600.0, ge=1, le=86400, description="how long fewer must have sufficed before any is taken away"
    )
    pending_seconds: float = Field(
        default=120.0, ge=1, le=3600, description="that a new worker may wait for room before it is given up"
    )
    idle_seconds: float = Field(
        default=900.0, ge=1, le=86400, description="without a request before a pool with `min_replicas: 0` goes to zero"
    )
    standby_workers: int = Field(default=0, ge=0, le=4096, description="ready ones beyond what the load needs")
    drain_seconds: float = Field(
        default=600.0, ge=0, le=86400, description="that a worker which is taken away has for the requests that it has"
    )

    @property
    def scales(self) -> bool:
        """Whether sizes change by themselves."""
        return self.mode == "controller"


class CanaryConfig(Section):
    """A second revision of the served model: other weights, precision or engine, on pools of its own, with a part of the
    requests. It goes back to nothing where it is worse than what serves, by these thresholds and beyond chance
    (docs/canary.md); sizes are fixed, and its GPUs are of `autoscaling.budget_gpus`."""

    revision: Name = Field(description="its name: clients, metrics and the console tell it apart by that")
    model: str | None = Field(default=None, min_length=1, description="null: `model`; same tokenizer and chat template")
    engine: EngineConfig = Field(default=EngineConfig(), description="of which what is absent is as in `engine`")
    pools: dict[Name, PoolConfig] = Field(min_length=1, description="of names of their own; at least one decodes")
    percent: float = Field(default=5.0, gt=0, le=100, description="of the conversations, once its workers are ready")
    min_requests: int = Field(default=100, ge=50, le=10**7, description="of each revision before anything is judged")
    confidence: float = Field(
        default=0.95, ge=0.8, lt=1, description="that one that is no worse is never rolled back for its figures"
    )
    max_error_increase: float = Field(default=0.01, ge=0, le=1, description="of the part of requests that fail")
    max_attainment_drop: float = Field(default=0.02, ge=0, le=1, description="of the part that keeps its targets")
    max_ttft_ratio: float = Field(default=1.25, ge=1, le=100, description="to what serves, at the median and at 90 %")
    max_tpot_ratio: float = Field(default=1.25, ge=1, le=100, description="the same")
    window_seconds: float = Field(
        default=1800.0, ge=10, le=86400, description="that are compared: a longer past hides what began lately"
    )
    good_after_seconds: float = Field(
        default=3600.0, ge=1, le=10**6, description="with a share and no worse before it counts as good"
    )
    max_failures: int = Field(default=3, ge=1, le=100, description="of its workers, starts among them: then it is over")
    start_seconds: float = Field(default=900.0, ge=1, le=86400, description="until its workers must be ready")

    @property
    def num_gpus(self) -> int:
        """Ranks, on CPUs."""
        return sum(pool.replicas * pool.layout.world_size for pool in self.pools.values())


class TlsConfig(Section):
    """TLS of both edges, by files in PEM, which are read again when they change. Relative: from where the file is."""

    cert_file: str = Field(min_length=1, description="the certificate, and those between it and its CA")
    key_file: str = Field(min_length=1, description="its key, without a password")
    client_ca_file: str | None = Field(
        default=None,
        min_length=1,
        description="mutual TLS: clients must show a certificate that one of these signed, but for /health and /ready",
    )
    ca_file: str | None = Field(
        default=None,
        min_length=1,
        description="who signed `cert_file`, for our own clients: chat, why, the console; null: whom the machine trusts",
    )
    server_name: str | None = Field(
        default=None,
        min_length=1,
        description="a name in the certificate, for our own clients; null: the address at which they find the router",
    )


class SelfCheckConfig(Section):
    """A new generation of a worker is asked the same few blocks twice, after all other work: that its cache is found as the
    index says. Whoever fails is placed by load alone until a later check passes."""

    enabled: bool = True
    retry_seconds: float = Field(default=5.0, ge=0.1, le=3600, description="twice as long after each that fails")
    max_retry_seconds: float = Field(default=600.0, ge=0.1, le=86400)


class RouterConfig(Section):
    host: str = Field(default="127.0.0.1", min_length=1, description="0.0.0.0: all addresses of the machine")
    grpc_port: Port = Field(default=50051, ge=0, le=65535)
    http_port: Port = Field(default=8000, ge=0, le=65535)
    api_keys: tuple[str, ...] = Field(default=(), strict=False)
    allowed_origins: tuple[Origin, ...] = Field(
        default=(),
        strict=False,
        description="web pages that may ask /v1 from a browser (CORS), as https://chat.example.org; *: all; []: none",
    )
    keep_alive_seconds: int = Field(default=120, ge=1)
    coalesce_seconds: float = Field(default=0.05, ge=0, le=1)
    comment_seconds: float = Field(
        default=15.0, ge=0, description="an SSE stream that is silent so long says a comment; 0: never"
    )
    heartbeat_seconds: float = Field(default=1.0, gt=0)
    silent_seconds: float = Field(default=5.0, gt=0, description="a worker whose session is silent so long is out")
    decision_log: DecisionLogConfig = DecisionLogConfig()
    self_check: SelfCheckConfig = SelfCheckConfig()
    tls: TlsConfig | None = Field(default=None, description="null: plain HTTP and gRPC")

    def http_url(self, host: str | None = None) -> str:
        """Of what listens at `http_port`; `host` where it is reached by another name."""
        return f"{'https' if self.tls is not None else 'http'}://{host or self.host}:{self.http_port}"

    def grpc_address(self, host: str | None = None) -> str:
        """As headrace.client takes it."""
        return f"{'grpcs://' if self.tls is not None else ''}{host or self.host}:{self.grpc_port}"


class TracingConfig(Section):
    """Spans of requests, by OpenTelemetry (the extra `tracing`). A caller's own traceparent says whether his request is
    traced; of the others it is `sample_fraction`."""

    otlp_endpoint: str | None = Field(
        default=None,
        pattern=r"^(grpc|http|https)://[^/\s]+(/\S*)?$",
        description="null: off; grpc://HOST:4317, or http(s)://HOST:4318 (protobuf, at /v1/traces)",
    )
    sample_fraction: float = Field(default=0.01, ge=0, le=1)


class LogsConfig(Section):
    """What processes write to stderr."""

    format: Literal["text", "json"] = Field(default="text", description="json: an object a line, with the request's id")
    requests: bool = Field(default=False, description="routers say a line for each request that ended")


class RedisConfig(Section):
    """`url`: redis(s)://host:port/db, or redis(s)+sentinel://host:port,…/SERVICE/db. `embedded_port`: where the embedded
    Valkey listens when `url` is null; when it is taken, a free one is chosen."""

    url: str | None = None
    embedded_port: Port = Field(default=16379, ge=0, le=65535)
    lease_seconds: float = Field(default=5.0, gt=0)
    budget_seconds: float = Field(default=0.25, gt=0)


class RayConfig(Section):
    """Where ranks run. `rank_resources`: what Ray sets aside for each rank, such as {GPU: 1}, {CPU: 0.5} or a resource of
    your own; null: one GPU on cuda, one CPU on cpu."""

    address: str | None = Field(default=None, min_length=1)
    rank_resources: RankResources | None = Field(default=None, min_length=1)
    object_store_bytes: int = Field(default=100 * 2**20, ge=80 * 2**20, description="of a Ray that we start")


class ConsoleConfig(Section):
    """The operator's page, as `headrace up` serves it. Whoever has a key of `router.api_keys` may look from wherever `host`
    lets them; without keys it answers to its own machine alone."""

    enabled: bool = True
    host: str = Field(default="127.0.0.1", min_length=1)
    port: Port = Field(default=8002, ge=0, le=65535, description="when it is taken, a free one is chosen; 0: any")
    plan: str | None = Field(
        default=None,
        min_length=1,
        description="of `headrace plan --json`, to be laid beside reality; relative: from where the file is",
    )


class ClusterConfig(Section):
    """The whole file. `name` separates clusters that share a Redis."""

    name: str = Field(default="headrace", pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")
    model: str = Field(min_length=1)
    served_model_name: str | None = Field(default=None, min_length=1)
    pools: dict[Name, PoolConfig] = Field(min_length=1)
    engine: EngineConfig = EngineConfig()
    handoff: HandoffConfig = HandoffConfig()
    router: RouterConfig = RouterConfig()
    redis: RedisConfig = RedisConfig()
    ray: RayConfig = RayConfig()
    limits: LimitsConfig = LimitsConfig()
    service_classes: dict[Name, ServiceClassConfig] = Field(default={})
    tenants: dict[Name, TenantConfig] = Field(default={})
    admission: AdmissionConfig = AdmissionConfig()
    autoscaling: AutoscalingConfig = AutoscalingConfig()
    rollouts: RolloutsConfig = RolloutsConfig()
    canary: CanaryConfig | None = Field(default=None, description="null: none")
    console: ConsoleConfig = ConsoleConfig()
    tracing: TracingConfig = TracingConfig()
    logs: LogsConfig = LogsConfig()
    fault_hooks: bool = False

    @property
    def starts_from_zero(self) -> bool:
        """Whether workers may come because requests wait for them: no worker at all is then no reason to refuse any."""
        return self.autoscaling.scales and all(pool.bounds[0] == 0 < pool.bounds[1] for pool in self.pools.values())

    @property
    def model_name(self) -> str:
        """The name clients use: `served_model_name`, else the last part of `model`."""
        return self.served_model_name or self.model.rstrip("/").rsplit("/", 1)[-1]
