"""The requests that routers gave this worker, from Submit to their end.

    submit ─ local ────────────────────────────┐
           └ hand-off ─ arrives ───────────────┤ outputs … finish
                 └ fails ─ router says: other ─┤
                                       alone ──┘

Every request belongs to one router session and ends with it. A hand-off is one task; its story is `_hand_off`.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from headrace.errors import (
    DeadlineExceeded,
    Draining,
    HeadraceError,
    InternalError,
    InvalidRequest,
    TransferFailed,
)
from headrace.values import PrefillTarget, Request, RequestKey, SequenceOutput
from workers.engine import Engine
from workers.handoff.puller import NoRoom, Puller

log = logging.getLogger(__name__)


class RouterSession(Protocol):
    """The stream to one router, as requests see it. Sending queues and never waits. Outputs come with the numbers that
    the router gave their samples, 0 where it gave none."""

    @property
    def router_id(self) -> str: ...

    def send_outputs(self, outputs: list[tuple[int, SequenceOutput]]) -> None: ...

    def send_rejected(self, key: RequestKey, error: HeadraceError) -> None: ...

    def send_peer_lost(self, key: RequestKey, target: PrefillTarget, error: HeadraceError) -> None: ...


@dataclass(frozen=True, slots=True)
class Placed:
    """The router's answer to a lost hand-off. `prefill` None: compute alone."""

    key: RequestKey
    prefill: PrefillTarget | None


@dataclass(slots=True, eq=False)
class _Live:
    """`key` is the scheduler's name for it, `wire_key` the router's: they part when the router answers too late."""

    session: RouterSession
    request: Request
    first_sample: int
    key: RequestKey
    wire_key: RequestKey
    unfinished: int
    began: bool = False
    task: asyncio.Task[None] | None = None
    answer: asyncio.Future[Placed] | None = None


class Intake:
    """Owns the live requests. Everything happens on the engine's event loop."""

    def __init__(
        self,
        engine: Engine,
        puller: Puller,
        *,
        worker_id: str,
        answer_seconds: float,
        on_failure: Callable[[HeadraceError], None] | None = None,
        on_first_token: Callable[[Request, SequenceOutput], None] | None = None,
    ) -> None:
        self._engine = engine
        self._puller = puller
        self._worker_id = worker_id
        self._answer_seconds = answer_seconds
        self._on_failure = on_failure
        self._on_first_token = on_first_token
        self._live: dict[str, _Live] = {}
        self._of_session: defaultdict[RouterSession, dict[str, _Live]] = defaultdict(dict)
        self._tasks: set[asyncio.Task[None]] = set()
        self.draining = False

    @property
    def num_live(self) -> int:
        return len(self._live)

    @property
    def num_handoffs(self) -> int:
        """Hand-offs under way, those that still let go included."""
        return len(self._tasks)

    # -- what routers ask

    def submit(self, session: RouterSession, request: Request, first_sample: int = 0) -> None:
        """Takes the request, or answers with Rejected and holds nothing."""
        try:
            self._check(request)
            self._take(session, request, first_sample)
        except HeadraceError as error:
            session.send_rejected(request.key, error)

    def cancel(self, session: RouterSession, key: RequestKey) -> None:
        """Ends the request without another word. Idempotent; a cancel of an older attempt is not for this one."""
        live = self._live.get(key.request_id)
        if live is not None and live.session is session and key.attempt >= live.wire_key.attempt:
            self._end(live)

    def stop_sample(self, session: RouterSession, key: RequestKey, index: int) -> None:
        """Ends one sample of the request, with a finish and no more tokens. Idempotent."""
        live = self._live.get(key.request_id)
        if live is None or live.session is not session or key != live.wire_key:
            return
        output = self._engine.scheduler.stop_sample(live.key, index, self._engine.clock.now())
        if output is not None:
            self.outputs([output])
            self._engine.changed()

    def place(self, session: RouterSession, placed: Placed) -> None:
        """The router's answer to PeerLost, under the request's new attempt."""
        live = self._live.get(placed.key.request_id)
        if live is None or live.session is not session:
            session.send_rejected(placed.key, TransferFailed(f"{placed.key} is not here any more"))
        elif placed.key.attempt > live.wire_key.attempt:
            live.wire_key = placed.key
            # After the wait for it was over the request computes alone; only its name changes then.
            if live.answer is not None and not live.answer.done():
                live.answer.set_result(placed)

    def close_session(self, session: RouterSession) -> None:
        """The router is gone: nobody waits for its requests any more."""
        for live in list(self._of_session.get(session, {}).values()):
            self._end(live)
        self._of_session.pop(session, None)

    def keys(self) -> list[RequestKey]:
        """All that live, by the routers' names."""
        return [live.wire_key for live in self._live.values()]

    def keys_of(self, session: RouterSession) -> list[RequestKey]:
        return [live.key for live in self._of_session.get(session, {}).values()]

    # -- what the engine says

    def outputs(self, outputs: list[SequenceOutput]) -> None:
        """To each session its part, in one call."""
        parts: dict[RouterSession, list[tuple[int, SequenceOutput]]] = {}
        for output in outputs:
            live = self._live.get(output.key.request_id)
            if live is None or live.key != output.key:
                continue
            if live.wire_key != output.key:
                output = replace(output, key=live.wire_key)
            if output.timeline is not None and not live.began:
                live.began = True
                if self._on_first_token is not None:
                    self._on_first_token(live.request, output)
            number = live.first_sample and live.first_sample + output.index
            parts.setdefault(live.session, []).append((number, output))
            if output.finish is not None:
                live.unfinished -= 1
                if not live.unfinished:
                    self._forget(live)
        for session, part in parts.items():
            session.send_outputs(part)

    def deadline(self, key: RequestKey) -> bool:
        """The scheduler ended it, its time was up. False: it is no request of a router."""
        live = self._live.get(key.request_id)
        if live is None or live.key != key:
            return False
        self._reject(live, DeadlineExceeded(f"{key.request_id}: its deadline passed"))
        return True

    def reject_all(self, error: HeadraceError) -> int:
        """Everything ends with this error; how many there were."""
        everyone = list(self._live.values())
        for live in everyone:
            self._reject(live, error)
        return len(everyone)

    async def settle(self) -> None:
        """Returns when no task is left that still holds blocks."""
        while self._tasks:
            await asyncio.wait(tuple(self._tasks))

    # -- the life of a request

    def _check(self, request: Request) -> None:
        if self.draining:
            raise Draining(f"{self._worker_id} is draining")
        live = self._live.get(request.key.request_id)
        if live is not None:
            if live.wire_key.attempt >= request.key.attempt:
                raise InvalidRequest(f"{request.key} is here already", field="request_id")
            self._end(live)

    def _take(self, session: RouterSession, request: Request, first_sample: int) -> None:
        live = _Live(session, request, first_sample, request.key, request.key, request.n)
        now = self._engine.clock.now()
        target = request.prefill
        if target is None or target.worker_id == self._worker_id:
            self._engine.scheduler.submit(request, now)
        else:
            expected = self._engine.scheduler.expect(request, now)
            if expected.remaining <= request.local_prefill_max_tokens:
                self._engine.scheduler.incoming.fall_back(request.key, request.key, now)
            else:
                task = live.task = asyncio.create_task(self._tell(live, target), name=f"hand-off {request.key}")
                self._tasks.add(task)
                task.add_done_callback(lambda task: self._over(live, task))
        self._live[request.key.request_id] = live
        self._of_session[session][request.key.request_id] = live
        self._engine.changed()

    async def _tell(self, live: _Live, target: PrefillTarget) -> None:
        """The hand-off; what goes wrong with one request ends that one, and no other."""
        try:
            await self._hand_off(live, target)
        except HeadraceError as error:
            live.task = None
            self._reject(live, error)
        except Exception as error:
            log.exception("hand-off of %s", live.key)
            live.task = None
            self._reject(live, InternalError(f"{live.key}: {type(error).__name__}: {error}"))

    def _over(self, live: _Live, task: asyncio.Task[None]) -> None:
        """A callback, not a `finally`: a task that is cancelled before its first step never enters its body."""
        self._tasks.discard(task)
        live.task = None
        if task.cancelled():
            self._engine.scheduler.cancel(live.key, self._engine.clock.now())
            self._engine.changed()

    async def _hand_off(self, live: _Live, target: PrefillTarget) -> None:
        scheduler = self._engine.scheduler
        while True:
            request = replace(live.request, key=live.key)
            try:
                self.outputs(await self._puller.pull(request, target, live.session.router_id))
                return
            except HeadraceError as error:
                placed = await self._ask_router(live, target, error)
            old, live.key = live.key, placed.key
            alone = placed.prefill is None
            if placed.prefill is not None:
                target = placed.prefill
                outlook = scheduler.incoming.restart(old, live.key, self._engine.clock.now())
                if outlook.remaining <= live.request.local_prefill_max_tokens:
                    alone, old = True, live.key
            if alone:
                scheduler.incoming.fall_back(old, live.key, self._engine.clock.now())
            self._engine.changed()
            if alone:
                return

    async def _ask_router(self, live: _Live, target: PrefillTarget, error: HeadraceError) -> Placed:
        """Only the router places; but a router that does not answer in time leaves the request to be computed here."""
        named = {"request_id": live.wire_key.request_id}
        log.warning("hand-off of %s from %s failed: %s", live.key, target.worker_id, error, extra=named)
        if self._on_failure is not None:
            self._on_failure(error)
        if isinstance(error, NoRoom):
            return Placed(live.key, None)
        live.answer = asyncio.get_running_loop().create_future()
        live.session.send_peer_lost(live.wire_key, target, error)
        try:
            async with asyncio.timeout(self._answer_seconds):
                return await live.answer
        except TimeoutError:
            return Placed(live.key, None)
        finally:
            live.answer = None

    def _reject(self, live: _Live, error: HeadraceError) -> None:
        if self._live.get(live.key.request_id) is live:
            live.session.send_rejected(live.wire_key, error)
            self._end(live)

    def _end(self, live: _Live) -> None:
        """Gives back all that the request holds; a hand-off under way when its task has ended."""
        self._forget(live)
        self._puller.give_up(live.key)
        # A task that has just ended cannot be cancelled any more, though its callback has yet to come.
        if live.task is None or not live.task.cancel():
            self._engine.scheduler.cancel(live.key, self._engine.clock.now())
            self._engine.changed()

    def _forget(self, live: _Live) -> None:
        self._live.pop(live.key.request_id, None)
        self._of_session[live.session].pop(live.key.request_id, None)
