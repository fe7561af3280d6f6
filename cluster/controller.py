"""The controller: brings the pools that exist towards those that are desired, and says what it sees.

One loop: lead → read desired → scale → reconcile → act → publish; it runs on every change and at least every TICK_SECONDS.
Every worker has one task that lives as long as it: start, watch, and the reason of its end. While Redis is away, or
another controller leads, nothing is started, drained or removed; what serves goes on serving.
"""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Awaitable
from dataclasses import dataclass, field, replace
from typing import assert_never

from cluster.autoscaler import Autoscaler, Seen
from cluster.canary.control import Canary
from cluster.lifecycle import Action, Desired, Drain, History, Observed, ObservedWorker, Phase, Remove, SetRole, Start
from cluster.pools import WAITING, Addresses, RayPools
from cluster.reconcile import headless, reconcile
from cluster.rollouts import Rollouts, held_up, waiting
from cluster.specs import observed_worker, spec_of
from cluster.state import ControlState, ObservedState, WorkerRecord, rebuilt
from cluster.worker_client import WorkerClient, WorkerReport, described
from headrace.clock import Clock
from headrace.config import ClusterConfig
from headrace.errors import HeadraceError, InternalError, WorkerLost
from headrace.store import StoreUnavailable

log = logging.getLogger(__name__)

TICK_SECONDS = 1.0
HEALTH_SECONDS = 2.0
SILENT_SECONDS = 30.0
LEAVE_SECONDS = 3.0  # between the end of a drain and that of the node: to end in order


@dataclass
class _Worker:
    """One worker of this controller's table; changed by its own task and by the loop, on one event loop. `report`: what it
    last said of itself; `silence`: why it could not be asked since."""

    seen: ObservedWorker
    addresses: Addresses = field(default_factory=Addresses)
    report: WorkerReport | None = None
    silence: str = ""
    task: asyncio.Task[None] | None = None
    drain: asyncio.Task[None] | None = None

    def enter(self, phase: Phase, now: float, reason: str = "") -> None:
        self.seen = replace(self.seen, phase=phase, since=now, reason=reason, pending=False)

    @property
    def trouble(self) -> str:
        """Why it does not make progress, by its own words or as it cannot be asked; empty where it does."""
        return self.silence or (self.report.unhealthy_reason if self.report is not None else "")

    @property
    def observed(self) -> ObservedWorker:
        held = self.report.held if self.report is not None else None
        return replace(self.seen, failing=bool(self.trouble), held=held)


class Controller:
    """Owns the table of workers and the history of their slots."""

    def __init__(
        self,
        config: ClusterConfig,
        redis_url: str,
        host: str,
        pools: RayPools,
        state: ControlState,
        clock: Clock,
        autoscaler: Autoscaler | None = None,
        canary: Canary | None = None,
    ) -> None:
        self._config = config
        self._redis_url = redis_url
        self._host = host
        self._pools = pools
        self._state = state
        self._clock = clock
        self._autoscaler = autoscaler
        self._canary = canary
        how = config.rollouts
        self._rollouts = Rollouts(how.max_unavailable, how.max_surge, config.autoscaling.budget_gpus)
        self._token = secrets.token_hex(8)
        self._workers: dict[str, _Worker] = {}
        self._history: dict[str, History] = {}
        self._desired: Desired | None = None
        self._wanted: Desired | None = None
        self._changed = asyncio.Event()
        self._stopping = False
        self._adopted = False

    async def run(self) -> None:
        """Until stop(); then all workers are drained and gone, and the lease is given back."""
        async with asyncio.TaskGroup() as tasks:
            while not self._stopping:
                with contextlib.suppress(StoreUnavailable):
                    if await self._state.lead(self._token) and await self._adopt(tasks):
                        await self._hear_notices(tasks)
                        desired = await self._read_desired()
                        reserved = await self._judge_canary(desired)
                        self._desired = await self._scaled(desired, reserved)
                        self._wanted = self._canary.applied(self._desired) if self._canary else self._desired
                        self._act(self._needed(self._wanted), tasks)
                        await self._publish()
                await self._wait()
            await self._take_down(tasks)

    def stop(self) -> None:
        """Ends run(). Call it on the controller's event loop."""
        self._stopping = True
        self._changed.set()

    # -- see

    def _observed(self) -> Observed:
        return Observed([worker.observed for worker in self._workers.values()], self._history)

    def _needed(self, desired: Desired) -> list[Action]:
        scaling = self._config.autoscaling
        budget = scaling.budget_gpus if scaling.scales else None
        actions = reconcile(desired, self._observed(), self._clock.now(), budget, self._rollouts)
        return headless(actions, self._observed().workers) if self._pools.head_silent_seconds else actions

    async def _hear_notices(self, tasks: asyncio.TaskGroup) -> None:
        """Who lies on a node that is about to go is marked so, and again where it goes sooner than was said before: what
        follows is reconcile's. Who drains already has the node's time for it from now on."""
        try:
            notices = await self._pools.notices()
        except Exception:
            log.exception("nobody knows which nodes go: workers there end with them")
            return
        for (slot, generation), seconds in notices.items():
            worker = self._workers.get(slot)
            if worker is None or worker.seen.generation != generation:
                continue
            leaves_at, known = self._clock.now() + seconds, worker.seen.leaves_at
            if known is not None and known - leaves_at < LEAVE_SECONDS:
                continue
            why = f"its node is taken away in {seconds:.0f} s: Ray drains it"
            log.warning("%s (generation %d): %s", slot, generation, why)
            worker.seen = replace(worker.seen, leaves_at=leaves_at, reason=why)
            if worker.seen.phase is Phase.DRAINING:
                self._drain_anew(worker, tasks)

    async def _read_desired(self) -> Desired:
        desired = await self._state.desired()
        if desired is None:
            desired = self._desired or rebuilt(self._config, [worker.seen for worker in self._workers.values()])
            desired = replace(desired, trusted=False)
            await self._state.write_desired(desired)
        return desired

    async def _judge_canary(self, desired: Desired) -> int:
        """A turn of the canary, where there may be one; the GPUs that are its own. One that cannot be judged has no share:
        routers see that nothing turns."""
        if self._canary is None:
            return 0
        seen = [its.seen for its in self._workers.values()]
        try:
            await self._canary.turn(self._token, desired, seen, self._clock.now())
        except StoreUnavailable:
            raise
        except Exception:
            log.exception("the canary's turn failed: its workers stay, and routers give it nothing")
        return self._canary.num_gpus(seen)

    async def _scaled(self, desired: Desired, reserved_gpus: int) -> Desired:
        """As the autoscaler wants it, where there is one. One that fails costs its own decision, and nothing else."""
        if self._autoscaler is None:
            return desired
        # Who only comes in another's place, and has no room, is none of its sizes: it would wait for it to start.
        beside = waiting(self._wanted or desired, [its.seen for its in self._workers.values()])
        seen = [
            Seen(its.seen, its.report, self._history.get(slot, History()).failures)
            for slot, its in self._workers.items()
            if its.seen not in beside
        ]
        try:
            return await self._autoscaler.turn(desired, seen, reserved_gpus)
        except StoreUnavailable:
            raise
        except Exception:
            log.exception("the autoscaler failed: sizes and roles stay as they are")
            return desired

    async def _adopt(self, tasks: asyncio.TaskGroup) -> bool:
        """Once, on the first lead: workers and generations of an earlier controller are taken over, in the roles that they
        have by now, those that start yet too. Whether that is done: until then nothing else is."""
        if self._adopted:
            return True
        before = await self._state.observed()
        self._history = before.generations() if before else {}
        adopted_workers = await self._pools.adopt()
        if adopted_workers is None:
            return False
        reports = await asyncio.gather(*(described(adopted.addresses.service) for adopted in adopted_workers))
        for adopted, report in zip(adopted_workers, reports, strict=True):
            spec, seen = adopted.spec, observed_worker(adopted, report, self._clock.now())
            worker = self._workers[spec.worker_id] = _Worker(seen, adopted.addresses, report=report)
            known = self._history.get(spec.worker_id, History())
            self._history[spec.worker_id] = known.started(max(spec.generation, known.generation))
            life = self._watch(worker) if seen.phase is Phase.READY else self._live(worker, self._pools.resume(spec))
            worker.task = tasks.create_task(life)
            if report is not None and report.draining:  # it refuses work for good, whoever asked it to drain
                self._begin_drain(worker, "it drained under an earlier controller", tasks)
        self._adopted = True
        return True

    async def _publish(self) -> None:
        now = self._clock.now()
        records = tuple(
            WorkerRecord.of(worker.seen, now, worker.addresses.service, worker.addresses.metrics)
            for _, worker in sorted(self._workers.items())
        )
        desired = {name: pool.replicas for name, pool in self._wanted.pools.items()} if self._wanted else None
        history = {slot: (past.generation, past.failures, past.reason) for slot, past in self._history.items()}
        await self._state.write_observed(ObservedState(self._token, records, desired, history, self._trouble(now)))

    def _trouble(self, now: float) -> str:
        """What an operator should know: of Ray's head, and of rollouts that wait for room."""
        patience, seen = self._config.autoscaling.pending_seconds, self._observed().workers
        stopped = held_up(self._wanted, seen, self._rollouts, now, patience) if self._wanted is not None else ""
        return "; ".join(filter(None, (self._pools.trouble, stopped)))

    async def _wait(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TICK_SECONDS):
                await self._changed.wait()
        self._changed.clear()

    # -- act

    def _act(self, actions: list[Action], tasks: asyncio.TaskGroup) -> None:
        for action in actions:
            match action:
                case Start():
                    self._start(action, tasks)
                case SetRole():
                    tasks.create_task(self._set_role(self._workers[action.worker_id], action))
                case Drain():
                    self._begin_drain(self._workers[action.worker_id], action.why, tasks)
                case Remove():
                    if action.failed:
                        self._note_failed(action)
                    self._remove(self._workers[action.worker_id])
                case _:
                    assert_never(action)

    def _note_failed(self, action: Remove) -> None:
        past = self._history[action.worker_id]
        self._history[action.worker_id] = past.failed(self._clock.now(), 0.0, action.why)
        if self._canary is not None:
            self._canary.died(replace(self._workers[action.worker_id].seen, reason=action.why))

    def _start(self, action: Start, tasks: asyncio.TaskGroup) -> None:
        now = self._clock.now()
        seen = ObservedWorker(
            *(action.pool, action.index, action.generation, action.role, action.layout, Phase.STARTING, now),
            revision=action.revision,
        )
        worker = self._workers[action.worker_id] = _Worker(seen)
        self._history[action.worker_id] = self._history.get(action.worker_id, History()).started(action.generation)
        spec = spec_of(action, self._config, self._canary, self._redis_url, self._host)

        def progress(reason: str) -> None:
            pending, now = reason.startswith(WAITING), self._clock.now()
            since = now if worker.seen.pending and not pending else worker.seen.since  # it starts from now on
            worker.seen = replace(worker.seen, reason=reason, pending=pending, since=since)
            self._changed.set()

        worker.task = tasks.create_task(self._live(worker, self._pools.start(spec, progress)))

    async def _live(self, worker: _Worker, starts: Awaitable[Addresses]) -> None:
        """A worker's life up to its end, whatever ends it."""
        try:
            worker.addresses = await starts
        except HeadraceError as error:
            self._died(worker, error.message)
            return
        worker.enter(Phase.READY, self._clock.now())
        self._changed.set()
        await self._watch(worker)

    async def _watch(self, worker: _Worker) -> None:
        """Until a rank of the worker ends, or it is alive and does not work."""
        seen = worker.seen
        ended = asyncio.ensure_future(self._pools.ended(seen.worker_id, seen.generation))
        stuck = asyncio.ensure_future(self._stuck(worker))
        try:
            done, _ = await asyncio.wait({ended, stuck}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
            stuck.cancel()
        self._died(worker, next(iter(done)).result())

    async def _stuck(self, worker: _Worker) -> str:
        """Waits until the worker has been silent, or without progress by its own words, for SILENT_SECONDS; why."""
        good = self._clock.now()
        async with WorkerClient(worker.addresses.service) as client:
            while self._clock.now() - good < SILENT_SECONDS:
                await asyncio.sleep(HEALTH_SECONDS)
                try:
                    worker.report = await client.describe()
                    worker.silence = ""
                except WorkerLost as error:
                    worker.silence = error.message
                except InternalError:
                    worker.silence = ""  # it answers: whatever is wrong with it, another start would not put right
                    worker.report = replace(worker.report, unhealthy_reason="") if worker.report is not None else None
                if not worker.trouble:
                    good = self._clock.now()
        return f"no progress for {SILENT_SECONDS:.0f} s: {worker.trouble}"

    def _died(self, worker: _Worker, reason: str) -> None:
        now = self._clock.now()
        slot = worker.seen.worker_id
        if worker.seen.phase in (Phase.DRAINING, Phase.DRAINED):
            worker.enter(Phase.DRAINED, now, worker.seen.reason)
        else:
            ready_seconds = now - worker.seen.since if worker.seen.phase is Phase.READY else 0.0
            self._history[slot] = self._history[slot].failed(now, ready_seconds, reason)
            worker.enter(Phase.DEAD, now, reason)
            if self._canary is not None:
                self._canary.died(worker.seen)
        self._changed.set()

    async def _set_role(self, worker: _Worker, action: SetRole) -> None:
        before = worker.seen.role
        worker.seen = replace(worker.seen, role=action.role)
        try:
            async with WorkerClient(worker.addresses.service) as client:
                await client.set_role(action.role)
        except (WorkerLost, InternalError):
            worker.seen = replace(worker.seen, role=before)  # so that the next round asks again

    def _begin_drain(self, worker: _Worker, why: str, tasks: asyncio.TaskGroup) -> None:
        now, slot = self._clock.now(), worker.seen.worker_id
        self._history[slot] = self._history[slot].served(now - worker.seen.since)
        worker.enter(Phase.DRAINING, now, why)
        self._drain_anew(worker, tasks)

    def _drain_anew(self, worker: _Worker, tasks: asyncio.TaskGroup) -> None:
        """Within the time that it has for its requests by now, whatever it had before."""
        seconds: float | None = self._config.autoscaling.drain_seconds
        if self._stopping:
            seconds = None  # what a worker has that is told to end
        elif (leaves_at := worker.seen.leaves_at) is not None:
            seconds = max(leaves_at - self._clock.now() - LEAVE_SECONDS, 0.0)  # the node's time and no other
        if worker.drain is not None:
            worker.drain.cancel()
        worker.drain = tasks.create_task(self._drain(worker, seconds))

    async def _drain(self, worker: _Worker, seconds: float | None) -> None:
        if seconds is not None:
            with contextlib.suppress(WorkerLost, InternalError):  # whoever is gone has no more to finish
                async with WorkerClient(worker.addresses.service) as client:
                    await client.drain(seconds)
        await self._pools.drain(worker.seen.worker_id, worker.seen.generation)
        if worker.seen.phase is Phase.DRAINING:
            worker.enter(Phase.DRAINED, self._clock.now(), worker.seen.reason)
        self._changed.set()

    def _remove(self, worker: _Worker) -> None:
        slot, now = worker.seen.worker_id, self._clock.now()
        beside = waiting(self._wanted, [its.seen for its in self._workers.values()]) if self._wanted else []
        # The room that comes free is theirs: who waited for it as long as it takes has its time to start from now on.
        for seen in beside:
            if seen.pool == worker.seen.pool:
                self._workers[seen.worker_id].seen = replace(seen, since=now)
        for task in filter(None, (worker.task, worker.drain)):
            task.cancel()
        self._pools.remove(slot, worker.seen.generation)
        del self._workers[slot]
        self._changed.set()

    async def _take_down(self, tasks: asyncio.TaskGroup) -> None:
        """Every worker drained, those that drain already too, and removed; Redis forgets the cluster."""
        for worker in self._workers.values():
            if worker.seen.phase is Phase.READY:
                worker.enter(Phase.DRAINING, self._clock.now(), "the cluster goes down")
            if worker.seen.phase is Phase.DRAINING:  # whoever had long for its requests has it no more
                self._drain_anew(worker, tasks)
        drains = [worker.drain for worker in self._workers.values() if worker.drain is not None]
        if drains:
            await asyncio.wait(drains)
        for worker in list(self._workers.values()):
            self._remove(worker)
        with contextlib.suppress(StoreUnavailable):
            await self._state.forget()
