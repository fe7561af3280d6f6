"""The life of a request in the router, top to bottom. Contract between the edges (openai, grpc_api) and the core."""

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, Callable, Iterator
from functools import partial
from typing import assert_never

from prometheus_client import Counter, Gauge, Histogram

from headrace import metrics
from headrace.clock import Clock
from headrace.errors import ContextLengthExceeded, DeadlineExceeded, HeadraceError, InternalError, NoWorkers
from headrace.values import PrefillTarget, RequestKey, Role, SequenceOutput
from router.decision_log import Note
from router.decisions.admission import Admission, Admitted, Queued, Shed
from router.decisions.caches import Caches
from router.decisions.health import Health
from router.decisions.index import Index
from router.decisions.ledger import Ledger
from router.decisions.placement import Ask, NoCapacity, Placed, Placement, place
from router.decisions.record import Decision
from router.decisions.retry import End, PlaceAgain, PrefillAgain, after_peer_lost, after_rejection, with_last_resort
from router.decisions.view import View, Views
from router.flight import STATES, Explanation, Explanations, Flight, Job, Piece, RequestTimeline, TextStream
from router.mailbox import GivenUp, Mailbox, Pacer, PeerFailed
from router.sessions import Sessions

__all__ = ["Explanation", "Job", "Piece", "RequestTimeline", "Requests"]

log = logging.getLogger(__name__)

NUM_EXPLANATIONS = 512
COUNT_EVERY_TOKENS = 64

_REQUESTS = Counter(metrics.REQUESTS, "Requests by how they ended.", ["model", "outcome"])
_READY = Gauge(metrics.WORKERS_READY, "Workers that answer and take requests.", ["role"])
_IN_FLIGHT = Gauge(metrics.IN_FLIGHT, "Requests that are in the router now.", ["state"])
_SHED = Counter(metrics.SHED, "Requests refused before any work.", ["reason"])
_PLACEMENTS = Counter(metrics.PLACEMENTS, "Placements by kind.", ["why"])
_FALLBACKS = Counter(metrics.FALLBACKS, "Requests placed again after a failure.", ["reason"])
_QUEUE = Histogram(metrics.ROUTER_QUEUE, "Seconds a request waited in the router.")
_TTFT = Histogram(metrics.TTFT, "Seconds from a request's arrival to its first token.")
_TPOT = Histogram(metrics.TPOT, "Mean seconds per token after the first.", buckets=[0.001 * 2**i for i in range(14)])
_E2E = Histogram(metrics.E2E, "Seconds from a request's arrival to its last token.")
_PREDICTED = Counter(metrics.PREDICTED_CACHED_TOKENS, "Cached prompt tokens that placement counted on.", ["worker"])
_INDEX_FALLBACKS = Counter(metrics.INDEX_FALLBACKS, "Placements that passed over the index for a worker.", ["reason"])
_ERROR = Gauge(
    metrics.INDEX_ERROR, "Tokens that the mirror promised and the worker did not have, of those promised.", ["worker"]
)
_ACTUAL = Counter(metrics.ACTUAL_CACHED_TOKENS, "Cached prompt tokens that the worker found.", ["worker"])


class Requests:
    """Admission, placement, submission, relay, retry. One per router; owns its ledger, queue and explanations.

    `open_text(job)` opens the text of one sample. What is decided is decided in admission, placement, retry and health;
    here it is carried out.
    """

    def __init__(
        self,
        *,
        router_id: str,
        sessions: Sessions,
        index: Index,
        open_text: Callable[[Job], TextStream],
        pacer: Pacer,
        clock: Clock,
        randomness: random.Random,
        max_queue: int,
        request_seconds: float,
        local_prefill_max_tokens: int,
        note_decision: Note = lambda key, decision: None,
    ) -> None:
        self._router_id = router_id
        self._sessions = sessions
        self._caches = Caches(index)
        self._open_text = open_text
        self._pacer = pacer
        self._clock = clock
        self._random = randomness
        self._request_seconds = request_seconds
        self._local_prefill_max_tokens = local_prefill_max_tokens
        self._note_decision = note_decision
        self._admission = Admission(max_queue)
        self._ledger = Ledger()
        self._health = Health()
        self._views = Views(self._ledger, self._health)
        self._flights: set[Flight] = set()
        self._turns: dict[str, asyncio.Future[None]] = {}
        self._explanations = Explanations(NUM_EXPLANATIONS)
        self._generations: dict[str, int] = {}
        self._next_number = 0
        sessions.listen(self._heard_of)
        for role in Role:
            _READY.labels(role.value).set_function(partial(self._num_ready, role))
        for state in STATES:
            _IN_FLIGHT.labels(state).set_function(partial(self._num_in, state))

    async def stream(self, job: Job) -> AsyncGenerator[Piece]:
        """The pieces of all samples, interleaved as they come. Raises a HeadraceError (before the first piece when it
        was refused). Closing the iterator early cancels the request on its workers; every way out releases it."""
        flight, mailbox = self._open(job)
        deadline = self._arm_deadline(flight, mailbox)
        try:
            await self._admit(flight)
            self._dispatch(flight, mailbox)
            while not flight.done:
                for piece in self._react(flight, mailbox, await mailbox.take()):
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

    def view(self) -> View:
        """The workers as they are believed to be now."""
        return self._views.view()

    @property
    def num_in_flight(self) -> int:
        return len(self._ledger)

    @property
    def num_queued(self) -> int:
        return len(self._admission)

    def _num_in(self, state: str) -> int:
        return sum(flight.state == state for flight in self._flights)

    def _num_ready(self, role: Role) -> int:
        return sum(worker.role is role and not worker.draining for worker in self.view().workers)

    def _open(self, job: Job) -> tuple[Flight, Mailbox]:
        """Between processes a request has a name of this router's own: a client's id may come twice."""
        self._next_number += 1
        key = RequestKey(f"{self._router_id}:{self._next_number:x}")
        flight = Flight(job, key, lambda: self._open_text(job), self._clock.now())
        self._flights.add(flight)
        return flight, Mailbox(key, self._pacer, job.n, partial(self._let_go, flight))

    def _arm_deadline(self, flight: Flight, mailbox: Mailbox) -> asyncio.TimerHandle:
        seconds = self._request_seconds
        if flight.job.seconds_left is not None:
            seconds = min(seconds, flight.job.seconds_left)
        flight.deadline = flight.began + seconds
        error = DeadlineExceeded(f"not finished within {seconds:g} s", limit=seconds)
        return asyncio.get_running_loop().call_later(seconds, self._expire, flight, mailbox, error)

    def _expire(self, flight: Flight, mailbox: Mailbox, error: DeadlineExceeded) -> None:
        mailbox.feed(GivenUp(error))
        turn = self._turns.get(flight.key.request_id)
        if turn is not None and not turn.done():
            turn.set_exception(error)
        self._let_go(flight, flight.ended_by_worker)

    async def _admit(self, flight: Flight) -> None:
        """Returns when it is the request's turn."""
        name, job = flight.key.request_id, flight.job
        decision = self._admission.offer(
            name, num_sequences=job.n, priority=job.priority, view=self.view(), now=self._clock.now()
        )
        match decision:
            case Admitted():
                pass
            case Queued():
                await self._wait_for_turn(name, job.n)
                flight.queue_seconds = self._clock.now() - flight.began
            case Shed(reason=reason, error=error):
                _SHED.labels(reason).inc()
                raise error
            case _:
                assert_never(decision)
        _QUEUE.observe(flight.queue_seconds)

    async def _wait_for_turn(self, name: str, num_sequences: int) -> None:
        turn = self._turns[name] = asyncio.get_running_loop().create_future()
        try:
            await turn
        except BaseException:
            if not self._admission.leave(name):
                self._admission.begun(num_sequences)
            raise
        finally:
            del self._turns[name]

    def _call_next(self) -> None:
        """Room may have come: whoever's turn it is goes on. One that is leaving just now gives its turn back as it goes."""
        if len(self._admission):
            for name in self._admission.admit(self.view(), self._clock.now()):
                if not self._turns[name].done():
                    self._turns[name].set_result(None)

    def _dispatch(self, flight: Flight, mailbox: Mailbox) -> None:
        """Places an admitted request and hands it to its decode worker."""
        try:
            self._submit(flight, mailbox)
        finally:
            self._admission.begun(flight.job.n)

    def _submit(self, flight: Flight, mailbox: Mailbox) -> None:
        match self._place(flight):
            case NoCapacity(reason=reason):
                raise flight.first_error or self._nobody(flight.job, reason)
            case Placed() as placed:
                session = self._sessions.find(placed.decode.worker_id)
                assert session is not None, "the view holds live workers only"
                self._note_placed(flight, placed)
                request = flight.request(self._clock.now(), self._local_prefill_max_tokens)
                session.submit(request, mailbox)

    def _nobody(self, job: Job, reason: str) -> HeadraceError:
        if reason != "context":
            return NoWorkers(f"nobody can serve the request: {reason}", reason=reason)
        limit = max(w.info.capacity.max_context_tokens for w in self.view().workers if w.role.decodes)
        actual = len(job.prompt_token_ids) + job.sampling.max_tokens
        message = f"prompt and max_tokens must be at most {limit} tokens together, got {actual}"
        return ContextLengthExceeded(message, field="max_tokens", limit=limit, actual=actual)

    def _place(self, flight: Flight, decode: str | None = None) -> Placement:
        view, now = self.view(), self._clock.now()
        prediction = self._caches.predict(flight.job.prompt_token_ids, flight.job.cache_salt, view, now)
        for fallback in prediction.fallbacks:
            _INDEX_FALLBACKS.labels(fallback.value).inc()
        flight.prediction = prediction
        ask = Ask(
            num_prompt_tokens=len(flight.job.prompt_token_ids),
            max_tokens=flight.job.sampling.max_tokens,
            n=flight.job.n,
            cached_tokens=prediction.cached_tokens,
            local_prefill_max_tokens=self._local_prefill_max_tokens,
            decode=decode,
            excluded=flight.excluded,
            tie=self._random.random(),
        )
        placement = place(ask, view, now)
        flight.decided.append(placement.decided)
        self._note_decision(flight.key, partial(Decision.of, flight.job.request_id, flight.key, view, now, placement))
        return placement

    def _note_placed(self, flight: Flight, placed: Placed) -> None:
        flight.placed = placed
        flight.waits_for_prefill = True
        if flight.prediction is not None:
            self._caches.placed(flight.key.request_id, flight.prediction, placed, self._clock.now())
        _PLACEMENTS.labels(placed.decided.reason).inc()
        self._ledger.open(
            flight.key.request_id,
            decode=flight.decode,
            prefill=flight.prefill,
            num_prompt_tokens=len(flight.job.prompt_token_ids),
            prefill_tokens=placed.prefill_tokens,
            n=flight.job.n,
        )

    def _react(
        self, flight: Flight, mailbox: Mailbox, said: list[SequenceOutput | PeerFailed | GivenUp]
    ) -> Iterator[Piece]:
        """Follows what was said, in order, and yields the client's pieces: tokens before the failure that came after
        them. Raises what ends the request."""
        outputs: list[SequenceOutput] = []
        for one in said:
            if isinstance(one, SequenceOutput):
                outputs.append(one)
                continue
            yield from self._relay(flight, outputs)
            outputs = []
            if flight.done:
                return
            match one:
                case PeerFailed(worker_id=worker_id, error=error):
                    self._prefill_again(flight, mailbox, worker_id, error)
                case GivenUp(error=error):
                    self._place_again(flight, mailbox, error)
                case _:
                    assert_never(one)
        yield from self._relay(flight, outputs)

    def _relay(self, flight: Flight, outputs: list[SequenceOutput]) -> list[Piece]:
        if not outputs:
            return []
        if flight.waits_for_prefill:
            self._note_first_token(flight)
        pieces = flight.relay(outputs)
        if flight.num_uncounted >= COUNT_EVERY_TOKENS:
            self._ledger.grew(flight.key.request_id, flight.num_uncounted)
            flight.num_uncounted = 0
        return pieces

    def _note_first_token(self, flight: Flight) -> None:
        flight.waits_for_prefill = False
        self._ledger.first_token(flight.key.request_id)
        if flight.prediction is not None and flight.placed is not None:
            self._caches.computed(flight.key.request_id, flight.prediction, flight.placed, self._clock.now())
        if flight.first_token_at is None:
            flight.first_token_at = self._clock.now()
            _TTFT.observe(flight.first_token_at - flight.began)

    def _place_again(self, flight: Flight, mailbox: Mailbox, error: HeadraceError) -> None:
        """The decode worker gave the request up: it goes elsewhere, or ends with the error."""
        self._health.failed(flight.decode, error, self._clock.now())
        flight.failed(flight.decode, error)
        match after_rejection(flight.progress(), error):
            case End(error=last):
                raise last
            case PlaceAgain(key=key, excluded=excluded):
                _FALLBACKS.labels(error.type).inc()
                flight.key = mailbox.key = key
                flight.excluded = excluded
                self._submit(flight, mailbox)

    def _prefill_again(self, flight: Flight, mailbox: Mailbox, prefill: str, error: HeadraceError) -> None:
        """The decode worker lost its prefill worker: it gets another one, or prefills alone."""
        self._health.failed(prefill, error, self._clock.now())
        flight.failed(prefill, error)
        match after_peer_lost(flight.progress(), prefill, error):
            case End(error=last):
                raise last
            case PrefillAgain(key=key, excluded=excluded):
                _FALLBACKS.labels(error.type).inc()
                flight.key = mailbox.key = key
                flight.excluded = excluded
                self._answer_peer_failed(flight)

    def _answer_peer_failed(self, flight: Flight) -> None:
        session = self._sessions.find(flight.decode)
        if session is None:
            return  # its end is in the mailbox already
        placement = self._place(flight, decode=flight.decode)
        target: PrefillTarget | None = None
        if isinstance(placement, Placed):
            self._note_placed(flight, with_last_resort(placement, flight.key.attempt))
            target = flight.placed.prefill.target if flight.placed and flight.placed.prefill else None
        session.place(flight.key, target)

    def _succeed(self, flight: Flight) -> None:
        now = self._clock.now()
        flight.outcome = "finished"
        self._health.succeeded(flight.decode)
        source = flight.prefill or flight.decode
        self._health.succeeded(source)
        self._note_truth(flight, now)
        _E2E.observe(now - flight.began)
        tpot_seconds = flight.tpot_seconds(now)
        if tpot_seconds is not None:
            _TPOT.observe(tpot_seconds)

    def _note_truth(self, flight: Flight, now: float) -> None:
        """What the index said of the worker that prefilled, against what that worker found."""
        placed, prediction = flight.placed, flight.prediction
        if placed is None or prediction is None or placed.pulls:
            return  # what is pulled from another cache says nothing of this one's entries
        # A decode worker with little left to compute does it itself, whatever the placement.
        source = placed.prefill if placed.prefill is not None and flight.was_handed_off else placed.decode
        _PREDICTED.labels(source.worker_id).inc(prediction.cached_tokens.get(source.worker_id, 0))
        _ACTUAL.labels(source.worker_id).inc(flight.cached_tokens)
        _ERROR.labels(source.worker_id).set(self._caches.found(source, prediction, flight.cached_tokens, now))

    def _release(self, flight: Flight) -> None:
        """The one way out: nothing of the request is left on its worker, in the ledger, or in the queue."""
        self._flights.discard(flight)
        self._let_go(flight, flight.ended_by_worker)
        if flight.waits_for_prefill:
            self._caches.ended(flight.key.request_id)
        self._explanations.add(flight.explanation(flight.outcome, self._clock.now()))
        _REQUESTS.labels(flight.job.model, flight.outcome).inc()

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
        self._call_next()

    def _heard_of(self, worker_id: str) -> None:
        """A worker's session began, reported or ended."""
        session = self._sessions.find(worker_id)
        self._views.heard(worker_id, session)
        if session is not None and self._generations.get(worker_id) != session.info.generation:
            self._generations[worker_id] = session.info.generation
            self._health.forget(worker_id)
            if not self._caches.met(session.info):
                log.error("%s names blocks otherwise than this router: it is placed by load alone", worker_id)
        self._call_next()
