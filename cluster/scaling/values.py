"""What the autoscaler knows, and what it answers: frozen values that are recorded as JSON and decided on again.

Times are seconds of Redis's clock, so that they outlive a controller. Everything by pool or by role; nothing here grows
with the number of workers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from cluster.planning.load import Target, Worker
from headrace.config import ClusterConfig
from headrace.values import ParallelLayout, Role

ROLES = (Role.PREFILL, Role.DECODE, Role.UNIFIED)
NO_LIMIT_SECONDS = 3600.0  # of a target that a service class does not have


@dataclass(frozen=True, slots=True)
class PoolRules:
    role: Role
    layout: ParallelLayout
    least: int
    most: int

    @property
    def gpus(self) -> int:
        """Of each worker."""
        return self.layout.world_size


@dataclass(frozen=True, slots=True)
class Rules:
    """What the configuration says of scaling: headrace.config has the words."""

    pools: Mapping[str, PoolRules]
    target: Target
    mode: str = "controller"
    budget_gpus: int | None = None
    window_seconds: float = 120.0
    lead_seconds: float = 300.0
    hold_seconds: float = 600.0
    pending_seconds: float = 120.0
    idle_seconds: float = 900.0
    standby_workers: int = 0

    @classmethod
    def of(cls, config: ClusterConfig) -> "Rules":
        its = config.autoscaling
        owed = config.service_classes[its.service_class or config.admission.service_class or ""]
        pools = {
            name: PoolRules(pool.worker_role, pool.layout, *pool.bounds) for name, pool in sorted(config.pools.items())
        }
        ttft, tpot = owed.ttft_seconds or NO_LIMIT_SECONDS, owed.tpot_seconds or NO_LIMIT_SECONDS
        return cls(
            pools,
            Target(ttft, tpot, its.attainment),
            its.mode,
            its.budget_gpus,
            its.window_seconds,
            its.lead_seconds,
            its.hold_seconds,
            its.pending_seconds,
            its.idle_seconds,
            its.standby_workers,
        )


@dataclass(frozen=True, slots=True)
class Size:
    """Of a pool: how many workers, and how many of them are lent to the other role."""

    replicas: int
    lent: int = 0

    def __str__(self) -> str:
        return f"{self.replicas}" + (f" ({self.lent} lent)" if self.lent else "")


@dataclass(frozen=True, slots=True)
class Decoding:
    """What decodes on a pool's workers, those that leave and those that are lent among them: sequences, their tokens, and
    the KV that they hold, in that of so many workers."""

    sequences: int = 0
    context_tokens: int = 0
    kv_workers: float = 0.0


@dataclass(frozen=True, slots=True)
class PoolSeen:
    """A pool as it is. `staying` workers start or serve, `leaving` ones drain and hold their GPUs meanwhile; of those that
    stay `pending` have no room yet, the longest for `pending_seconds`, `failing` start again after they failed to several
    times, and `warming` became ready only lately; of those that leave `evicted` do because their nodes go. `worker` is one
    of them by its own measured cost, warm-up left out. Of what nobody of any pool has done yet, prefill or decode, its cost
    is a guess (`prefill_known`, `decode_known`), and says nothing of how many are needed."""

    desired: Size
    worker: Worker
    ready: int = 0
    ready_lent: int = 0
    starting: int = 0
    pending: int = 0
    pending_seconds: float = 0.0
    leaving: int = 0
    warming: int = 0
    kv_used: float = 0.0
    waiting_tokens: int = 0
    prefill_known: bool = True
    decode_known: bool = True
    evicted: int = 0
    failing: int = 0
    decoding: Decoding = field(default_factory=Decoding)

    @property
    def staying(self) -> int:
        return self.ready + self.starting + self.pending

    @property
    def settled(self) -> bool:
        return self.staying == self.ready == self.desired.replicas and self.ready_lent == self.desired.lent


@dataclass(frozen=True, slots=True)
class Traffic:
    """What routers say. Rates and shares over the last window, lengths over some, burstiness over an hour. `routers` 0:
    nobody says anything, which is not the same as nothing coming. `idle_seconds`: since the last arrival, or anything that
    was still in flight. `unburst_per_second`: without what single looks of the window had beyond the others; None: so few
    came that no look stands out. `unheard`: routers that had requests in flight when they were last heard, lately."""

    routers: int = 0
    per_second: float = 0.0
    input_tokens: float = 0.0
    output_tokens: float = 0.0
    hit_rate: float = 0.0
    gap_scv: float = 1.0
    queued: int = 0
    queued_tokens: int = 0
    oldest_queued_seconds: float = 0.0
    in_flight: int = 0
    idle_seconds: float = 0.0
    judged: int = 0
    attainment: float = 1.0
    missed_ttft: float = 0.0
    missed_tpot: float = 0.0
    unburst_per_second: float | None = None
    unheard: int = 0

    @property
    def level(self) -> float:
        """Arrivals a second that workers are started for: what was over in seconds comes again before none of them."""
        return self.per_second if self.unburst_per_second is None else self.unburst_per_second


@dataclass(frozen=True, slots=True)
class Forecast:
    """Arrivals a second: the most that is expected within the lead time, and what says so. `days`: how many earlier days
    the season is of; 0: none yet."""

    peak: float = 0.0
    level: float = 0.0
    trend: float = 0.0
    season: float = 0.0
    days: int = 0


@dataclass(frozen=True, slots=True)
class InFlight:
    """Workers that what decodes now would need if as much came again, in those of the role's first pool."""

    workers: float
    reason: str


@dataclass(frozen=True, slots=True)
class Needs:
    """Workers of each role, in those of its first pool; fractions, where pools differ. `with_margin`: if a little more
    came. `in_flight`: below which none is taken away or lent. `unreachable`: why no size meets the targets; then sizes are
    such that nothing piles up."""

    workers: Mapping[str, float] = field(default_factory=dict)
    with_margin: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""
    unreachable: str = ""
    in_flight: Mapping[str, InFlight] = field(default_factory=dict)

    def of(self, role: Role) -> float:
        return self.workers.get(role.value, 0.0)

    def running(self, role: Role) -> float:
        return self.in_flight[role.value].workers if role.value in self.in_flight else 0.0


@dataclass(frozen=True, slots=True)
class Past:
    """The most that was needed within a stretch of time, from `since` on; by role."""

    since: float
    workers: Mapping[str, float]
    with_margin: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Blocked:
    """A pool that could not grow is not grown again before."""

    until: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Account:
    """Requests of the last day, older ones counted less, and of them those that missed the one target or the other."""

    judged: float = 0.0
    missed_ttft: float = 0.0
    missed_tpot: float = 0.0
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class Memory:
    """What one decision hands to the next. `boost`: by role, what the cost model underrates, by what requests got.
    `flipped_at`: by the role that a worker was flipped to. `missing_since`: since when targets are missed at every turn
    though nothing is short; None: they are not. `advised`: where others set sizes, replicas by pool."""

    past: tuple[Past, ...] = ()
    grown_at: Mapping[str, float] = field(default_factory=dict)
    shrunk_at: Mapping[str, float] = field(default_factory=dict)
    flipped_at: Mapping[str, float] = field(default_factory=dict)
    blocked: Mapping[str, Blocked] = field(default_factory=dict)
    boost: Mapping[str, float] = field(default_factory=dict)
    boosted_at: float = 0.0
    missing_since: float | None = None
    account: Account = field(default_factory=Account)
    advised: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Inputs:
    """All that a decision rests on. `trusted`: what is desired stood in Redis, and was not rebuilt just now. `other_gpus`:
    that workers of pools hold which are not in the configuration any more."""

    now: float
    rules: Rules
    pools: Mapping[str, PoolSeen]
    traffic: Traffic
    forecast: Forecast = field(default_factory=Forecast)
    memory: Memory = field(default_factory=Memory)
    trusted: bool = True
    other_gpus: int = 0


@dataclass(frozen=True, slots=True)
class Alternative:
    """What else could have been done. `attainment`: of the targets by the cost model at the load that is sized for; None
    where queues would grow without end."""

    what: str
    gpus: int
    attainment: float | None
    why_not: str


@dataclass(frozen=True, slots=True)
class Decision:
    """`pools` are to be; `advised` what the sizes would be where others set them. `kind`: hold, grow, shrink, flip,
    rollback, or several joined by +."""

    kind: str
    reason: str
    pools: Mapping[str, Size]
    advised: Mapping[str, Size]
    needs: Needs
    memory: Memory
    notes: tuple[str, ...] = ()
    alternatives: tuple[Alternative, ...] = ()


@dataclass(frozen=True, slots=True)
class Recorded:
    """A decision with all it rests on, under its number, and what came of it."""

    number: int
    inputs: Inputs
    decision: Decision
    outcome: str = ""
