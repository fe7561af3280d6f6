"""What a worker is started with, and what is known of one that an earlier controller started."""

import secrets

from cluster.canary.control import Canary
from cluster.lifecycle import ObservedWorker, Phase, Start
from cluster.pools import Adopted
from cluster.worker_client import WorkerReport
from headrace.config import ClusterConfig
from headrace.values import STABLE, Role
from workers.spec import WorkerSpec


def spec_of(action: Start, config: ClusterConfig, canary: Canary | None, redis_url: str, host: str) -> WorkerSpec:
    """The worker that a start asks for."""
    model, engine, pool = config.model, config.engine, config.pools.get(action.pool)
    if canary is not None:
        model, engine, pool = canary.settings(action.pool, action.revision)
    return WorkerSpec(
        worker_id=action.worker_id,
        generation=action.generation,
        role=action.role,
        model_path=model,
        layout=action.layout,
        engine=engine,
        revision=action.revision,
        handoff=config.handoff,
        cluster=config.name,
        redis_url=redis_url,
        redis_budget_seconds=config.redis.budget_seconds,
        lease_seconds=config.redis.lease_seconds,
        host=host,
        fault_hooks=config.fault_hooks,
        gpu_hour_price=pool.gpu_hour_price if pool is not None else None,
        otlp_endpoint=config.tracing.otlp_endpoint,
        log_format=config.logs.format,
        rendezvous_token=secrets.token_hex(16),
    )


def observed_worker(adopted: Adopted, report: WorkerReport | None, now: float) -> ObservedWorker:
    """In the role that it says of itself, where it does."""
    spec = adopted.spec
    pool, _, index = spec.worker_id.rpartition("-")
    role = Role(report.role) if report is not None else spec.role
    phase = Phase.READY if adopted.addresses.service else Phase.STARTING
    revision = getattr(spec, "revision", STABLE)  # an older version's worker has none
    return ObservedWorker(pool, int(index), spec.generation, role, spec.layout, phase, now, revision=revision)
