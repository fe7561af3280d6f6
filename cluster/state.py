"""The control plane's keys in Redis: who leads, what is desired, what is observed (design 5.4).

`leader` is a lease on Redis time that only its holder renews. `desired` is written by whoever wants another cluster (an
operator, the autoscaler), read by the leader, and rebuilt by it when it is lost; `configured` is what a configuration last
made of it. `observed` is written by the leader alone. Every call raises StoreUnavailable within the store's budget when
Redis is away.
"""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

from redis.exceptions import ResponseError

from cluster.lifecycle import Desired, DesiredPool, History, ObservedWorker, Phase
from headrace.config import ClusterConfig
from headrace.keys import Keys
from headrace.store import Store, connect
from headrace.values import STABLE, ParallelLayout, Role
from router.decisions import codec

MOST = 2**20  # of workers, or of ranks of one
MOST_FAILURES = 2**63
LEADER_SECONDS = 5.0
BUDGET_SECONDS = 2.0  # of a call to Redis, where nobody waits for it but who started or keeps the cluster

# Takes the lease when it is free or ours already, in one step; 1 when we lead afterwards.
_LEAD = """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""
_CONFIGURE = """
if redis.call('GET', KEYS[1]) == ARGV[1] and redis.call('EXISTS', KEYS[2]) == 1 then return 0 end
redis.call('SET', KEYS[1], ARGV[1])
redis.call('SET', KEYS[2], ARGV[1])
return 1
"""
# What json.loads and our own constructors say of what somebody else wrote.
_FOREIGN = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
_RESIGN = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """One worker in `observed`: what the controller knows of it. `in_phase_seconds` is a duration."""

    worker_id: str
    pool: str
    generation: int
    role: str
    layout: str
    phase: str
    in_phase_seconds: float
    address: str = ""
    metrics_address: str = ""
    reason: str = ""
    revision: str = STABLE

    @classmethod
    def of(cls, seen: ObservedWorker, now: float, address: str, metrics_address: str = "") -> "WorkerRecord":
        return cls(
            seen.worker_id,
            seen.pool,
            seen.generation,
            seen.role.value,
            str(seen.layout),
            seen.phase.value,
            now - seen.since,
            address,
            metrics_address,
            seen.reason,
            seen.revision,
        )


@dataclass(frozen=True, slots=True)
class ObservedState:
    """The whole of `observed`. `history` is what survives a controller: (generation, failures in a row, why it last
    failed) by worker id. `trouble`: what hinders the controller, empty where nothing does."""

    controller: str
    workers: tuple[WorkerRecord, ...] = ()
    desired: Mapping[str, int] | None = None
    history: Mapping[str, tuple[int, int, str]] | None = None
    trouble: str = ""

    def generations(self) -> dict[str, History]:
        """The histories a new controller starts from; its clock is another one, so delays start over."""
        return {
            worker: History(generation, reason=reason)
            for worker, (generation, _, reason) in (self.history or {}).items()
        }


async def text(store: Store, key: str) -> bytes | None:
    """What stands under the key; None where there is nothing, or something of another type, which a SET replaces."""
    try:
        found: bytes | None = await store.call(lambda redis: redis.get(key))
    except ResponseError as error:
        if not str(error).startswith("WRONGTYPE"):
            raise
        return None
    return found


class ControlState:
    """One process's view of these keys, over its Store."""

    def __init__(self, store: Store, cluster: str) -> None:
        self._store = store
        self._keys = Keys(cluster)

    @property
    def store(self) -> Store:
        return self._store

    @property
    def cluster(self) -> str:
        return self._keys.cluster

    async def lead(self, token: str) -> bool:
        """Takes or renews the leader's lease; whether `token` leads now."""
        milliseconds = int(LEADER_SECONDS * 1000)
        return bool(await self._store.call(lambda redis: redis.eval(_LEAD, 1, self._keys.leader, token, milliseconds)))

    async def has_leader(self) -> bool:
        """Whether any controller holds the lease."""
        return bool(await self._store.call(lambda redis: redis.exists(self._keys.leader)))

    async def resign(self, token: str) -> None:
        """Gives the lease back if it is ours, so that another controller need not wait for its end."""
        await self._store.call(lambda redis: redis.eval(_RESIGN, 1, self._keys.leader, token))

    async def desired(self) -> Desired | None:
        """What is desired, or None when Redis has nothing (or nothing readable) under the key."""
        raw = await text(self._store, self._keys.desired)
        return None if raw is None else decode_desired(raw)

    async def write_desired(self, desired: Desired) -> None:
        await self._store.call(lambda redis: redis.set(self._keys.desired, encode_desired(desired)))

    async def configure(self, desired: Desired) -> None:
        """What a configuration asks for becomes what is desired, where it asks for something else than it last did: who
        starts again with the same one takes back nothing that was scaled meanwhile."""
        keys, asked = (self._keys.configured, self._keys.desired), encode_desired(desired)
        await self._store.call(lambda redis: redis.eval(_CONFIGURE, 2, *keys, asked))

    async def observed(self) -> ObservedState | None:
        raw = await text(self._store, self._keys.observed)
        return None if raw is None else decode_observed(raw)

    async def write_observed(self, observed: ObservedState) -> None:
        await self._store.call(lambda redis: redis.set(self._keys.observed, json.dumps(asdict(observed))))

    async def forget(self) -> None:
        """The cluster is no more: its desired and observed state go. Worker keys end with their leases; what arrived on
        earlier days, and how it was scaled for, is there for the next one of that name."""
        keys = self._keys
        gone = (keys.desired, keys.configured, keys.observed, keys.leader, keys.scaling_now)
        canary = (keys.canary, keys.canary_evidence, keys.revisions)
        await self._store.call(lambda redis: redis.delete(*gone, *canary))


@asynccontextmanager
async def control_state(cluster: str, url: str) -> AsyncIterator[ControlState]:
    """By a connection of its own, while the block lasts."""
    store = connect(url, BUDGET_SECONDS)
    try:
        yield ControlState(store, cluster)
    finally:
        await store.close()


def configured(config: ClusterConfig, *, trusted: bool) -> Desired:
    """The desired state that the configuration asks for."""
    pools = {name: DesiredPool(pool.worker_role, pool.replicas, pool.layout) for name, pool in config.pools.items()}
    return Desired(pools, trusted)


def rebuilt(config: ClusterConfig, workers: list[ObservedWorker]) -> Desired:
    """The desired state when Redis lost it and nobody remembers: what serves now, and what the configuration asks for
    beyond that, as far as the budget of GPUs goes."""
    pools: dict[str, DesiredPool] = {}
    left = config.autoscaling.budget_gpus if config.autoscaling.scales else None
    asked = configured(config, trusted=False).pools
    for name, pool in asked.items():
        serving = [
            worker for worker in workers if worker.pool == name and worker.phase in (Phase.READY, Phase.STARTING)
        ]
        lent = sum(worker.role is not pool.role and worker.role is pool.role.other for worker in serving)
        pools[name] = replace(pool, replicas=len(serving), lent=lent)
    if left is not None:
        left -= sum(pool.num_gpus for pool in pools.values())
        left -= sum(worker.layout.world_size for worker in workers if worker.pool not in asked)  # a canary's
    for name, pool in asked.items():
        more = max(pool.replicas - pools[name].replicas, 0)
        if left is not None:
            more = min(more, max(left, 0) // pool.layout.world_size)
            left -= more * pool.layout.world_size
        pools[name] = replace(pools[name], replicas=pools[name].replicas + more)
    return Desired(pools, trusted=False)


def encode_desired(desired: Desired) -> str:
    return json.dumps(
        {
            name: {"role": pool.role.value, "replicas": pool.replicas, "tp": pool.layout.tp, "pp": pool.layout.pp}
            | ({"lent": pool.lent} if pool.lent else {})
            for name, pool in desired.pools.items()
        }
    )


def decode_desired(raw: bytes | str) -> Desired | None:
    """None when it is not what encode_desired writes: unreadable counts as lost, and nothing is taken away for it."""
    try:
        data: dict[str, dict[str, Any]] = json.loads(raw)
        pools = {
            name: DesiredPool(
                Role(pool["role"]),
                _whole(pool["replicas"]),
                ParallelLayout(_whole(pool["tp"]), _whole(pool["pp"])),
                _whole(pool.get("lent", 0)),
            )
            for name, pool in data.items()
        }
    except _FOREIGN:
        return None
    if any(not 0 <= pool.lent <= pool.replicas for pool in pools.values()):
        return None
    return Desired(pools)


def decode_observed(raw: bytes | str) -> ObservedState | None:
    """None when it is not what write_observed writes."""
    try:
        data: dict[str, Any] = json.loads(raw)
        return ObservedState(
            controller=str(data["controller"]),
            workers=tuple(codec.decode(WorkerRecord, worker) for worker in data["workers"]),
            desired=None
            if data["desired"] is None
            else {name: _whole(number) for name, number in data["desired"].items()},
            history={
                worker: (_whole(g, MOST_FAILURES), _whole(f, MOST_FAILURES), str(why))
                for worker, (g, f, why) in (data["history"] or {}).items()
            },
            trouble=str(data.get("trouble", "")),
        )
    except _FOREIGN:
        return None


def _whole(value: object, most: int = MOST) -> int:
    """ValueError where it is no count that any cluster has."""
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"a whole number up to {most} was expected, got {value!r}")
    return value
