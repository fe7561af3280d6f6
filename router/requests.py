"""The life of a request in the router, top to bottom. Contract between the edges (openai, grpc_api) and the core."""

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from heapq import nsmallest

from headrace.clock import Clock
from headrace.errors import DeadlineExceeded, HeadraceError, InternalError
from headrace.reports import RouterReport
from headrace.values import PrefillTarget, RequestKey, SequenceOutput
from router import measures
from router.decision_log import Note
from router.decisions.admission import Admission, Entrant
from router.decisions.caches import Caches
from router.decisions.health import Health
from router.decisions.ledger import Ledger
from router.decisions.placement import NoCapacity, Placed
from router.decisions.retry import (
    End,
    PlaceAgain,
    PrefillAgain,
    after_peer_lost,
    after_rejection,
    nobody,
    with_last_resort,
)
from router.decisions.revisions import Revisions
from router.decisions.told import Told
from router.decisions.view import View
from router.decisions.views import Views
from router.explanations import Explanation, Explanations, Recent
from router.flight import Flight, TextStream
from router.jobs import Job, Piece
from router.lanes import Lanes
from router.mailbox import GivenUp, Mailbox, Pacer, PeerFailed
from router.placer import Placer
from router.sessions import Sessions
from router.tally import Tally
from router.turns import Turns

log = logging.getLogger(__name__)

NUM_EXPLANATIONS = 512
COUNT_EVERY_TOKENS = 64


class Requests:
    """Admission, placement, submission, relay, retry. One per router; owns its ledger, turns and explanations.

    `open_text(job)` opens the text of one sample. What is decided is decided in admission, placement, retry and health;
    here it is carried out.
    """

    def __init__(
        self,
        *,
        router_id: str,
        sessions: Sessions,
        caches: Caches,
        open_text: Callable[[Job], TextStream],
        pacer: Pacer,
        clock: Clock,
        randomness: random.Random,
        admission: Admission,
        request_seconds: float,
        local_prefill_max_tokens: int,
        note_decision: Note = lambda key, decision: None,
        record: Callable[[Flight, float], None] = lambda flight, now: None,
        revisions: Revisions | None = None,
    ) -> None:
        self._router_id = router_id
        self._sessions = sessions
        self._caches = caches
        self._open_text = open_text
        self._pacer = pacer
        self._clock = clock
        self._request_seconds = request_seconds
        self._local_prefill_max_tokens = local_prefill_max_tokens
        self._record = record
        self._ledger = Ledger()
        self._health = Health()
        self._views = Views(self._ledger, self._health)
        self._lanes = Lanes(revisions or Revisions(), self._views)
        self._placer = Placer(
            caches, self._lanes, self._ledger, clock, randomness, local_prefill_max_tokens, note_decision
        )
        self._turns = Turns(admission, self._lanes.waited_for, clock)
        self._flights: set[Flight] = set()
        self._tally = Tally()
        self._explanations = Explanations(NUM_EXPLANATIONS)
        self._generations: dict[str, int] = {}
        self._next_number = 0
        sessions.listen(self._heard_of)
        measures.watch(self._flights, self.view, lambda: self._health.num_ejected(clock.now()))

    async def stream(self, job: Job) -> AsyncGenerator[Piece]:
        """The pieces of all samples, interleaved as they come. Raises a HeadraceError (before the first piece when it
        was refused). Closing the iterator early cancels the request on its workers; every way out releases it."""
        flight, mailbox = self._open(job)
        deadline = self._arm_deadline(flight, mailbox)
        try:
            await self._admit(flight)
            self._dispatch(flight, mailbox)
            while not flight.done:
                match await mailbox.take():
                    case PeerFailed(worker_id=worker_id, error=error):
                        self._prefill_again(flight, mailbox, worker_id, error)
                    case GivenUp(error=error):
                        self._place_again(flight, mailbox, error)
                    case pieces:
                        for piece in pieces:
                            yield piece
            self._succeed(flight)
        except Exception as error:
            flight.outcome = error.type if isinstance(error, HeadraceError) else InternalError.__name__
            raise
        finally:
            deadline.cancel()
            self._release(flight)

    def why(self, request_id: str) -> Explanation | None:
        """The explanation of one that runs, or of one of the last requests, by the id that its edge gave it."""
        running = next((flight for flight in self._flights if flight.job.request_id == request_id), None)
        if running is not None:
            return running.explanation(running.state, self._clock.now())
        return self._explanations.find(request_id)

    def recent(self, tenant: str | None, num_running: int) -> Iterator[Recent]:
        """Of this tenant, or of all: the oldest that run, at most so many, then those that ended, from the last on: as many
        as are remembered. Each is made as it is asked for: a router may have thousands."""
        now = self._clock.now()
        flights = (flight for flight in self._flights if tenant in (None, flight.job.tenant))
        for flight in nsmallest(num_running, flights, key=lambda flight: flight.marks.began):
            yield flight.running(now)
        yield from (one for one in self._explanations.latest(now) if tenant in (None, one.outline.tenant))

    def forget(self, worker_id: str) -> None:
        """The worker is gone for good: nothing is remembered of it, and no series speaks of it."""
        self._generations.pop(worker_id, None)
        self._health.forget(worker_id)
        self._caches.forget(worker_id)
        self._tally.forget(worker_id)
        measures.forget(worker_id)

    def report(self) -> RouterReport:
        """What came in and what became of it since the start, and what waits now."""
        return self._tally.report(self._router_id, self._flights, self._clock.now())

    def view(self) -> View:
        """The workers as they are believed to be now."""
        return self._views.view()

    def hear(self, told: Told) -> None:
        """Another router placed a request. The view is made at once, and not in the next placement's time."""
        self._views.told(told, self._clock.now())
        self._views.view()

    def base_view(self) -> View:
        """Of these the ones that serve whoever is not a canary's."""
        return self._lanes.waited_for()

    @contextmanager
    def sharing(self, job: Job) -> Iterator[None]:
        """For a job that is answered from another one's tokens: its tenant's quotas count the request alone. Raises the
        error of a refusal."""
        self._next_number += 1
        with self._turns.shared(Entrant(f"{self._router_id}:{self._next_number:x}", tenant=job.tenant)):
            yield

    @property
    def num_in_flight(self) -> int:
        return len(self._ledger)

    @property
    def num_queued(self) -> int:
        return len(self._turns)

    def _open(self, job: Job) -> tuple[Flight, Mailbox[list[Piece]]]:
        """Between processes a request has a name of this router's own: a client's id may come twice."""
        self._next_number += 1
        key = RequestKey(f"{self._router_id}:{self._next_number:x}")
        flight = Flight(job, key, lambda: self._open_text(job), self._clock.now())
        self._flights.add(flight)
        self._tally.arrived(job)
        return flight, Mailbox(key, self._pacer, partial(self._relay, flight), job.n, partial(self._let_go, flight))

    def _arm_deadline(self, flight: Flight, mailbox: Mailbox[list[Piece]]) -> asyncio.TimerHandle:
        seconds = self._request_seconds
        if flight.job.seconds_left is not None:
            seconds = min(seconds, flight.job.seconds_left)
        flight.deadline = flight.marks.began + seconds
        turn = flight.job.turn_seconds_left
        flight.entrant = replace(flight.entrant, seconds_left=seconds if turn is None else min(seconds, turn))
        error = DeadlineExceeded(f"not finished within {seconds:g} s", limit=seconds)
        return asyncio.get_running_loop().call_later(seconds, self._expire, flight, mailbox, error)

    def _expire(self, flight: Flight, mailbox: Mailbox[list[Piece]], error: DeadlineExceeded) -> None:
        mailbox.fail(GivenUp(error))
        self._turns.give_up(flight.entrant.name, error)
        self._let_go(flight, flight.ended_by_worker)

    async def _admit(self, flight: Flight) -> None:
        """Returns when it is the request's turn. A canary's requests stand in no line: there is room for them now, or they
        are not its own."""
        beside = self._lanes.enter(flight, self._clock.now())
        if not beside or not self._turns.enter_beside(flight.entrant, self._lanes.view(flight)):
            self._lanes.stand_in_line(flight)
            await self._turns.enter(flight.entrant, partial(self._placer.uncached_tokens, flight))
        flight.queue_seconds = self._clock.now() - flight.marks.began
        measures.waited(flight)

    def _dispatch(self, flight: Flight, mailbox: Mailbox[list[Piece]]) -> None:
        """Places an admitted request and hands it to its decode worker."""
        try:
            self._submit(flight, mailbox)
        finally:
            self._turns.begun(flight.entrant)

    def _submit(self, flight: Flight, mailbox: Mailbox[list[Piece]]) -> None:
        placement = self._placer.place(flight)
        if isinstance(placement, NoCapacity) and self._lanes.nobody(flight):
            placement = self._placer.place(flight)
        match placement:
            case NoCapacity(reason=reason):
                raise flight.first_error or nobody(reason, placement.decided)
            case Placed() as placed:
                session = self._sessions.find(placed.decode.worker_id)
                assert session is not None, "the view holds live workers only"
                self._placer.placed(flight, placed)
                request = flight.request(self._clock.now(), self._local_prefill_max_tokens)
                session.submit(request, mailbox)
                flight.marks.submit(self._clock.now())

    def _relay(self, flight: Flight, outputs: list[SequenceOutput]) -> list[Piece]:
        """The client's pieces of what its worker said."""
        now = self._clock.now()
        first = flight.marks.first_token is None
        if flight.waits_for_prefill:
            self._note_first_token(flight, now)
        measures.outputs(flight, now)
        pieces = flight.relay(outputs)
        if first:
            measures.first_token(flight)
        if flight.stopped:
            self._stop_samples(flight)
        if flight.num_uncounted >= COUNT_EVERY_TOKENS:
            self._ledger.grew(flight.key.request_id, flight.num_uncounted)
            flight.num_uncounted = 0
        return pieces

    def _stop_samples(self, flight: Flight) -> None:
        """What a stop string ended need not be computed any further, though other samples of the request go on."""
        session = self._sessions.find(flight.decode)
        if session is not None and not flight.done:  # all over, it is cancelled as a whole
            for index in flight.stopped:
                session.stop_sample(flight.key, index)
        flight.stopped.clear()

    def _note_first_token(self, flight: Flight, now: float) -> None:
        flight.waits_for_prefill = False
        self._placer.computed(flight, now)
        if flight.marks.first_token is None:
            flight.marks.first_token = now
        if flight.job.served is not None:
            flight.job.served.revision = flight.revision

    def _place_again(self, flight: Flight, mailbox: Mailbox[list[Piece]], error: HeadraceError) -> None:
        """The decode worker gave the request up: it goes elsewhere, or ends with the error."""
        self._health.failed(flight.decode, error, self._clock.now())
        flight.failed(flight.decode, error)
        match after_rejection(flight.progress(), error):
            case End(error=last):
                raise last
            case PlaceAgain(key=key, excluded=excluded):
                measures.FALLBACKS.labels(error.type).inc()
                flight.key = mailbox.key = key
                flight.excluded = excluded
                self._lanes.given_up(flight, error)
                self._submit(flight, mailbox)

    def _prefill_again(self, flight: Flight, mailbox: Mailbox[list[Piece]], prefill: str, error: HeadraceError) -> None:
        """The decode worker lost its prefill worker: it gets another one, or prefills alone."""
        self._health.peer_failed(flight.decode, prefill, error, self._clock.now())
        flight.failed(prefill, error)
        match after_peer_lost(flight.progress(), prefill, error):
            case End(error=last):
                raise last
            case PrefillAgain(key=key, excluded=excluded):
                measures.FALLBACKS.labels(error.type).inc()
                flight.key = mailbox.key = key
                flight.excluded = excluded
                self._answer_peer_failed(flight)

    def _answer_peer_failed(self, flight: Flight) -> None:
        session = self._sessions.find(flight.decode)
        if session is None:
            return  # its end is in the mailbox, or on its way there
        placement = self._placer.place(flight, decode=flight.decode)
        target: PrefillTarget | None = None
        if isinstance(placement, Placed):
            self._placer.placed(flight, with_last_resort(placement, flight.key.attempt))
            target = flight.placed.prefill.target if flight.placed and flight.placed.prefill else None
        session.place(flight.key, target)

    def _succeed(self, flight: Flight) -> None:
        now = self._clock.now()
        flight.outcome = "finished"
        self._health.served(flight.decode, flight.prefill, handed_off=flight.handed_over_by != "")
        self._placer.proven(flight, now)
        measures.finished(flight, now)

    def _release(self, flight: Flight) -> None:
        """The one way out: nothing of the request is left on its worker, in the ledger, or in the queue."""
        self._flights.discard(flight)
        self._turns.ended(flight.entrant, flight.num_generated, ran=flight.ran)
        self._let_go(flight, flight.ended_by_worker)
        if flight.waits_for_prefill:
            self._caches.ended(flight.key.request_id)
        now = self._clock.now()
        self._explanations.add(flight.outline(flight.outcome, now), flight.decided, now)
        measures.ended(flight, now)
        self._tally.finished(flight, now)
        self._record(flight, now)

    def _let_go(self, flight: Flight, ended_by_worker: bool) -> None:
        """Its worker is rid of it, and its place is free, though its client may not have read it all: one that reads
        slowly, or not at all, costs nobody else's turn. Idempotent."""
        session = self._sessions.find(flight.decode)
        if session is not None:
            if ended_by_worker:
                session.forget(flight.key.request_id)
            else:
                session.cancel(flight.key)
        self._ledger.close(flight.key.request_id)
        self._turns.call_next()

    def _heard_of(self, worker_id: str) -> None:
        """A worker's session began, reported or ended."""
        session = self._sessions.find(worker_id)
        self._views.heard(worker_id, session, self._clock.now())
        if session is not None and self._generations.get(worker_id) != session.info.generation:
            self._generations[worker_id] = session.info.generation
            self._health.forget(worker_id)
            if not self._caches.met(session.info):
                log.error("%s names blocks otherwise than this router: it is placed by load alone", worker_id)
        self._turns.call_next()
