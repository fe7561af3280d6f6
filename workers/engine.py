"""The engine: a scheduler, an executor, and the loop between them (design section 6).

    schedule → run → postprocess

The overlapped loop keeps one step ahead: plan k+1 is made and handed over while plan k computes, so that the ranks
never wait for bookkeeping: at once, or, launching late, shortly before plan k ends (scheduling.pacing). With several
pipeline stages a plan for each is under way, of rows of its own (scheduling.turns). The plain loop
does the same without overlap, and is its specification.

Everything here belongs to one event loop. Whoever changes the scheduler through `engine.scheduler` calls
`engine.changed()` afterwards; an idle engine waits for that and for nothing else.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from headrace.clock import Clock
from headrace.costmodel import CostModel
from headrace.errors import HeadraceError, WorkerLost
from headrace.values import Load, RequestKey, SequenceOutput
from workers.faults import Faults
from workers.ranges import NO_RANGES, Ranges
from workers.ranks.executor import Executor
from workers.scheduling.pacing import Pacing
from workers.scheduling.plan import StepPlan, StepResult
from workers.scheduling.scheduler import ChunkDone, Scheduler
from workers.scheduling.work import StepFit, StepWork

T = TypeVar("T")

SWEEP_SECONDS = 0.05
_NOTHING = Load()


class Listener(Protocol):
    """Whom the engine tells. Called on the event loop; must return at once."""

    def on_step(self, work: StepWork, seconds: float) -> None: ...

    def on_outputs(self, outputs: list[SequenceOutput]) -> None: ...

    def on_chunk(self, chunk: ChunkDone) -> None: ...

    def on_deadline(self, key: RequestKey) -> None:
        """The request's deadline passed; the scheduler has ended it."""

    def on_pin_ended(self, key: RequestKey) -> None:
        """Nobody pulled or renewed a finished ticket in time; its blocks are free."""


@dataclass(slots=True)
class _Flight:
    """`ended_at`: when a rank's thread said so; the event loop hears of it later."""

    plan: StepPlan
    work: StepWork
    result: Future[StepResult]
    ended_at: float = 0.0


class Engine:
    """Owns the scheduler and the fit; alone in calling Executor.step()."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        clock: Clock,
        ranges: Ranges = NO_RANGES,
        *,
        overlap: bool = True,
        faults: Faults | None = None,
        graph_tokens: Sequence[int] = (),
    ) -> None:
        """`graph_tokens`: see StepFit."""
        self.scheduler = scheduler
        self.executor = executor
        self.clock = clock
        self.num_steps = 0
        self._overlap = overlap
        self.pacing: Pacing | None = None
        self._ranges = ranges
        self._faults = faults or Faults()
        self._fit = StepFit(clock.now, graph_tokens)
        self._wake = asyncio.Event()
        self._occupied = asyncio.Event()
        self._pulse = asyncio.Event()
        self._stir = asyncio.Event()
        self.version = 0
        self._busy_since: float | None = None

    @property
    def cost(self) -> CostModel:
        """What this worker's steps cost, as measured so far."""
        return self._fit.model

    def launch_late(self, *, on: bool) -> None:
        """From the next step on; what was learnt is forgotten where it is turned off."""
        if on != (self.pacing is not None):
            self.pacing = Pacing() if on else None

    def add_transfer(self, num_bytes: int, seconds: float) -> None:
        self._fit.add_transfer(num_bytes, seconds)

    def changed(self) -> None:
        """Something was given to, or taken from, the scheduler."""
        self._wake.set()
        self._stir.set()
        self._occupied.set()
        self._tell_waiters()

    async def next_change(self) -> None:
        """Returns after the next step, intake or ending: when blocks or claims may have become free."""
        await self._pulse.wait()

    def seconds_since_progress(self) -> float:
        """How long there has been work without a step finishing; 0 when there is none."""
        return 0.0 if self._busy_since is None else self.clock.now() - self._busy_since

    async def run(self, listener: Listener) -> None:
        """Until cancelled. WorkerLost, in an ExceptionGroup, when the executor fails or a step raises."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._run_overlapped(listener) if self._overlap else self._run_plain(listener))
            tasks.create_task(self._watch_executor())
            tasks.create_task(self._sweep(listener))

    async def _run_plain(self, listener: Listener) -> None:
        while True:
            plan = self._schedule()
            if plan is None:
                await self._idle()
                continue
            flight = await self._launch(plan, listener, self.clock.now())
            self._postprocess(flight, await self._land(flight), listener)

    async def _run_overlapped(self, listener: Listener) -> None:
        flights: deque[_Flight] = deque()
        while True:
            while len(flights) < self.scheduler.limits.plans_in_flight:
                if self.pacing is not None and flights:
                    await self._hold(self.pacing, flights[0])
                began = self.clock.now()
                if (plan := self._schedule()) is None:
                    break
                flights.append(await self._launch(plan, listener, began))
            if not flights:
                await self._idle()
                continue
            flight = flights.popleft()
            self._postprocess(flight, await self._land(flight), listener)

    def act_out_faults(self) -> None:
        """Those that change what the scheduler has to do with: a smaller pool, a sequence preempted."""
        pool, sequence = self._faults.find("pool"), self._faults.find("sequence")
        self.scheduler.ledger.resize(pool.at if pool else self.scheduler.ledger.size)
        if sequence is not None and self.scheduler.preempt_at(sequence.at):
            self._faults.take("sequence")

    def _schedule(self) -> StepPlan | None:
        self.act_out_faults()
        with self._ranges("schedule"):
            return self.scheduler.schedule(self.clock.now())

    async def _hold(self, pacing: Pacing, flight: _Flight) -> None:
        """Until it is time for the next step; at the latest until this one has landed. What comes meanwhile may want more
        time."""
        while not flight.result.done():
            self._stir.clear()
            now = self.clock.now()
            release_at = pacing.release_at(now, alike=not self.scheduler.starting)
            if release_at is None or release_at <= now:
                break
            with suppress(TimeoutError):
                async with asyncio.timeout(release_at - now):
                    await self._stir.wait()
                    continue
            break

    async def _launch(self, plan: StepPlan, listener: Listener, began: float) -> _Flight:
        if self._busy_since is None:
            self._busy_since = self.clock.now()
        await self._faults.reach("step")
        result = self.executor.step(plan)
        flight = _Flight(plan, StepWork.of(plan), result)
        if self.pacing is not None:
            result.add_done_callback(partial(self._ended, asyncio.get_running_loop(), flight))
            now, starts = self.clock.now(), bool(plan.starts)
            self.pacing.launched(plan.number, flight.work, self.cost, began, now, starts=starts)
        for chunk in self.scheduler.take_ahead():
            listener.on_chunk(chunk)
        return flight

    def _ended(self, loop: asyncio.AbstractEventLoop, flight: _Flight, result: Future[StepResult]) -> None:
        """In a rank's thread."""
        flight.ended_at = self.clock.now()
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(self._stir.set)

    async def _land(self, flight: _Flight) -> StepResult:
        try:
            return await settled(flight.result)
        except HeadraceError:
            raise
        except Exception as error:
            raise WorkerLost(f"step {flight.plan.number} failed: {type(error).__name__}: {error}") from error

    def _postprocess(self, flight: _Flight, result: StepResult, listener: Listener) -> None:
        with self._ranges("postprocess"):
            now = self.clock.now()
            events = self.scheduler.apply(result, now)
            self.num_steps += 1
            self._busy_since = now
            if self.pacing is not None:
                self.pacing.landed(result, flight.ended_at or now)  # 0: the rank's thread has yet to say it
            for chunk in events.chunks:  # first what others wait for
                listener.on_chunk(chunk)
            if events.outputs:
                listener.on_outputs(events.outputs)
            self._fit.add(flight.work, result.seconds)
            listener.on_step(flight.work, result.seconds)
            self._tell_waiters()

    async def _idle(self) -> None:
        if not self.scheduler.has_work:
            self._busy_since = None
        elif self._busy_since is None:
            self._busy_since = self.clock.now()
        # To plan nothing may have meant to preempt somebody: who waits for blocks looks again.
        self._tell_waiters()
        await self._wake.wait()
        self._wake.clear()

    def _tell_waiters(self) -> None:
        self.version += 1
        self._pulse.set()
        self._pulse.clear()

    async def _watch_executor(self) -> None:
        raise await settled(self.executor.failed)

    async def _sweep(self, listener: Listener) -> None:
        """Deadlines and pins end also while nothing computes. Runs only while somebody is here."""
        while True:
            await self._occupied.wait()
            await asyncio.sleep(SWEEP_SECONDS)
            self.expire(listener)
            if self.scheduler.load() == _NOTHING:
                self._occupied.clear()

    def expire(self, listener: Listener) -> None:
        """Ends what is overdue, and says so."""
        late, unpinned = self.scheduler.expire(self.clock.now())
        for key in late:
            listener.on_deadline(key)
        for key in unpinned:
            listener.on_pin_ended(key)
        if late or unpinned:
            self.changed()


async def settled(future: Future[T]) -> T:
    """The result of an executor's future. Cancelling the waiter leaves the executor's work alone."""
    return await asyncio.shield(asyncio.wrap_future(future))
