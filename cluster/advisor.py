"""The controller where others start workers and set sizes: StatefulSets, scaled by an HPA or by KEDA.

    lead → look → decide → flip → publish

It flips roles, and says how many workers each pool should have; whoever scales may follow that. It starts, drains and
removes nothing: it holds nothing by which it could. A worker is there while it holds a lease or answers, so that Redis may
be flushed without any being forgotten; how many there are is what is desired of their number, whatever that is.
"""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from cluster.autoscaler import Autoscaler, Seen
from cluster.leased import Leased, leased_workers
from cluster.lifecycle import Desired, DesiredPool, ObservedWorker, Phase, SetRole
from cluster.reconcile import flips
from cluster.state import ControlState, ObservedState, WorkerRecord
from cluster.worker_client import WorkerClient, WorkerReport
from headrace.clock import Clock
from headrace.config import ClusterConfig
from headrace.errors import InternalError, WorkerLost
from headrace.store import StoreUnavailable
from headrace.values import Role, WorkerInfo

log = logging.getLogger(__name__)

ROUND_SECONDS = 2.0  # at most: the lead's lease is longer


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """What is known of workers that others start. `prefix`: what their ids begin with before POOL-INDEX, as a StatefulSet
    names its pods; `metrics_ports`: where those of a pool have their metrics."""

    prefix: str = ""
    metrics_ports: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Worker:
    """A worker of a pool of the configuration, as of the last look; `since`, by the advisor's clock, it is known."""

    info: WorkerInfo
    pool: str
    index: int
    since: float
    draining: bool
    report: WorkerReport | None = None

    @property
    def seen(self) -> ObservedWorker:
        role = Role(self.report.role) if self.report is not None else self.info.role
        leaves = self.draining or (self.report is not None and self.report.draining)
        reason = self.report.unhealthy_reason if self.report is not None else "it does not answer"
        phase = Phase.DRAINING if leaves else Phase.READY
        return ObservedWorker(
            *(self.pool, self.index, self.info.generation, role, self.info.layout, phase, self.since, reason),
            failing=bool(reason),
            held=self.report.held if self.report is not None else None,
        )


class Advisor:
    """Owns the table of workers, and what was last desired. `autoscaler` is of the same prefix."""

    def __init__(
        self, config: ClusterConfig, state: ControlState, clock: Clock, autoscaler: Autoscaler, workers: Elsewhere
    ) -> None:
        self._config = config
        self._state = state
        self._clock = clock
        self._autoscaler = autoscaler
        self._prefix = workers.prefix
        self._metrics_ports = workers.metrics_ports
        self._token = secrets.token_hex(8)
        self._workers: dict[str, _Worker] = {}
        self._clients: dict[str, WorkerClient] = {}
        self._desired: Desired | None = None
        self._strangers: frozenset[str] = frozenset()

    async def run(self) -> None:
        """Until it is cancelled; then the lead is given back, and all serves on."""
        seconds = min(ROUND_SECONDS, self._config.autoscaling.interval_seconds)
        try:
            while True:
                with contextlib.suppress(StoreUnavailable):
                    await self.round()
                await asyncio.sleep(seconds)
        finally:
            await self.close()

    async def close(self) -> None:
        """Gives the lead back, where it is ours."""
        await self._close(self._clients)
        with contextlib.suppress(StoreUnavailable):
            await self._state.resign(self._token)

    async def round(self) -> None:
        """Nothing while another one leads. StoreUnavailable when Redis does not answer: nobody's role changes then."""
        if not await self._state.lead(self._token):
            return
        await self._look(await leased_workers(self._state.store, self._state.cluster))
        desired = await self._decided(await self._read_desired())
        await self._flip(desired)
        await self._publish(desired)

    # -- see

    async def _look(self, leases: Sequence[Leased]) -> None:
        known: dict[str, _Worker] = {}
        for leased in leases:
            place = self._place(leased.info.worker_id)
            if place is not None:
                known[leased.info.worker_id] = self._met(leased, *place)
        others = [worker for name, worker in self._workers.items() if name not in known]
        # All at once: who does not answer takes its two seconds beside the others, within the lead's lease.
        found = await asyncio.gather(*(self._asked(worker) for worker in [*known.values(), *others]))
        self._workers = {
            worker.info.worker_id: worker
            for worker in found
            if worker.info.worker_id in known or worker.report is not None
        }
        await self._close(self._clients.keys() - {worker.info.address for worker in self._workers.values()})
        self._note_strangers(leases)

    async def _asked(self, worker: _Worker) -> _Worker:
        """With its own words, if it is that worker that answers there."""
        who = worker.info.worker_id, worker.info.generation
        try:
            report = await self._client(worker).describe()
        except (WorkerLost, InternalError):
            return replace(worker, report=None)
        return replace(worker, report=report if (report.worker_id, report.generation) == who else None)

    def _client(self, worker: _Worker) -> WorkerClient:
        """Kept open: a channel costs more than a call."""
        address = worker.info.address
        if address not in self._clients:
            self._clients[address] = WorkerClient(address)
        return self._clients[address]

    async def _close(self, addresses: Iterable[str]) -> None:
        for address in list(addresses):
            await self._clients.pop(address).close()

    def _met(self, leased: Leased, pool: str, index: int) -> _Worker:
        before = self._workers.get(leased.info.worker_id)
        same = before is not None and before.info.generation == leased.info.generation
        since = before.since if before is not None and same else self._clock.now()
        return _Worker(leased.info, pool, index, since, leased.draining)

    def _place(self, worker_id: str) -> tuple[str, int] | None:
        """(pool, index); None when its name is none of a pool of the configuration."""
        pool, _, index = worker_id.removeprefix(self._prefix).rpartition("-")
        ours = worker_id.startswith(self._prefix) and pool in self._config.pools and index.isdecimal()
        return (pool, int(index)) if ours else None

    def _note_strangers(self, leases: Sequence[Leased]) -> None:
        strangers = frozenset(leased.info.worker_id for leased in leases) - self._workers.keys()
        if new := strangers - self._strangers:
            form = f"{self._prefix}POOL-INDEX"
            log.warning("of no pool by their names (%s), so no part of any decision: %s", form, ", ".join(sorted(new)))
        self._strangers = strangers

    async def _read_desired(self) -> Desired:
        """As many as there are; of them lent as many as was decided last (never the last one of a pool that was to keep
        some), or are by their own words."""
        before = await self._state.desired()
        lent_before = before or self._desired
        pools = {}
        for name, pool in self._config.pools.items():
            there = [w.seen for w in self._workers.values() if w.pool == name and w.seen.phase is Phase.READY]
            own = pool.worker_role
            if lent_before is not None and name in lent_before.pools:
                lent = lent_before.pools[name].lent_of(len(there))
            else:
                lent = sum(worker.role is own.other is not own for worker in there)
            pools[name] = DesiredPool(own, len(there), pool.layout, lent)
        desired = Desired(pools)
        if before is None or before.pools != pools:
            await self._state.write_desired(desired)
        return desired

    # -- act

    async def _decided(self, desired: Desired) -> Desired:
        seen = [Seen(worker.seen, worker.report) for worker in self._workers.values()]
        try:
            after = await self._autoscaler.turn(desired, seen)
        except StoreUnavailable:
            raise
        except Exception:
            log.exception("the autoscaler failed: roles and advice stay as they are")
            after = desired
        self._desired = after
        return after

    async def _flip(self, desired: Desired) -> None:
        by_slot = {worker.seen.worker_id: worker for worker in self._workers.values()}
        wanted = flips(desired, [worker.seen for worker in self._workers.values()])
        await asyncio.gather(*(self._set_role(by_slot[one.worker_id], one) for one in wanted))

    async def _set_role(self, worker: _Worker, flip: SetRole) -> None:
        try:
            await self._client(worker).set_role(flip.role)
        except (WorkerLost, InternalError) as error:
            log.warning("%s stays %s until it is asked again: %s", worker.info.worker_id, worker.seen.role, error)
            return
        log.info("%s serves %s from now on", worker.info.worker_id, flip.role)
        if worker.report is not None:
            self._workers[worker.info.worker_id] = replace(worker, report=replace(worker.report, role=flip.role.value))

    async def _publish(self, desired: Desired) -> None:
        now = self._clock.now()
        records = tuple(self._record(worker, now) for _, worker in sorted(self._workers.items()))
        sizes = {name: pool.replicas for name, pool in desired.pools.items()}
        await self._state.write_observed(ObservedState(self._token, records, sizes))

    def _record(self, worker: _Worker, now: float) -> WorkerRecord:
        address, port = worker.info.address, self._metrics_ports.get(worker.pool)
        metrics = f"{address.rpartition(':')[0]}:{port}" if port is not None else ""
        return replace(WorkerRecord.of(worker.seen, now, address, metrics), worker_id=worker.info.worker_id)
