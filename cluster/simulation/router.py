"""A router under virtual time: what `router.requests` does with the router's deciding modules, without wire.

admit → place → submit → relay → retry; the queue, the ledger, health and the index are production's own.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import assert_never

from cluster.simulation.policies import Policy
from cluster.simulation.results import Served
from headrace.blocks import BlockHasher
from headrace.errors import DeadlineExceeded, HeadraceError, NoWorkers
from headrace.keys import EventBatch, Snapshot
from headrace.values import LoadReport, Request, RequestKey, SamplingParams, SequenceOutput, WorkerInfo
from router.decisions.admission import Admission, Admitted, Entrant, Queued, Rules, Shed
from router.decisions.caches import Caches, Prediction
from router.decisions.chain import Chain
from router.decisions.health import Health
from router.decisions.index import Followed, Index
from router.decisions.ledger import Ledger
from router.decisions.placement import Ask, NoCapacity, Placed
from router.decisions.retry import (
    End,
    PlaceAgain,
    PrefillAgain,
    Progress,
    after_peer_lost,
    after_rejection,
    with_last_resort,
)
from router.decisions.tenants import NO_TARGETS, Targets
from router.decisions.told import Told
from router.decisions.view import HashClass, View
from router.decisions.views import Views
from workers.virtual.engine import Prompt
from workers.virtual.time import VirtualTime
from workers.virtual.worker import VirtualWorker

COUNT_EVERY_TOKENS = 64
MAX_TOKENS = 512


@dataclass(frozen=True, slots=True)
class RouterLimits:
    """As in headrace.config. `message_seconds`: how long a message takes to a worker; `targets`: what the class of all
    requests is owed."""

    max_queue: int = 1024
    prefill_backlog_seconds: float = 2.0
    request_seconds: float = 600.0
    local_prefill_max_tokens: int = 64
    message_seconds: float = 0.0
    targets: Targets = NO_TARGETS


@dataclass(slots=True, eq=False)
class _Flight:
    served: Served
    prompt: Prompt
    key: RequestKey
    entrant: Entrant
    excluded: frozenset[str] = frozenset()
    first_error: HeadraceError | None = None
    prediction: Prediction | None = None
    placed: Placed | None = None
    waits_for_prefill: bool = False


@dataclass(slots=True)
class _Session:
    """What was heard of a worker: see router.decisions.view.Live."""

    info: WorkerInfo
    report: LoadReport | None = None
    lost: str | None = None


class VirtualRouter:
    """Owns what a router owns. `ended` hears of every request once, `tell` of every placement."""

    def __init__(
        self,
        time: VirtualTime,
        workers: Mapping[str, VirtualWorker],
        hasher: BlockHasher,
        policy: Policy,
        limits: RouterLimits,
        ended: Callable[[Served], None],
        *,
        seed: int = 0,
        keep_why: bool = False,
        tell: Callable[[Told], None] = lambda told: None,
    ) -> None:
        self.index = Index()
        self._caches = Caches(self.index, tell)
        self._time = time
        self._workers = workers
        self._hasher = hasher
        self._hash_class: HashClass | None = None
        self._policy = policy
        self._limits = limits
        self._ended = ended
        self._keep_why = keep_why
        self._random = Random(seed)
        self._admission = Admission(
            Rules(
                limits.max_queue,
                limits.prefill_backlog_seconds,
                local_prefill_max_tokens=limits.local_prefill_max_tokens,
            )
        )
        self._ledger = Ledger()
        self._health = Health()
        self._flights: dict[str, _Flight] = {}
        self._deadlines: deque[Served] = deque()
        self._sessions: dict[str, _Session] = {}
        self._views = Views(self._ledger, self._health)

    def join(self, info: WorkerInfo) -> None:
        """A worker's session begins, and its part of the index is read: empty, for it has just started."""
        session = self._sessions[info.worker_id] = _Session(info)
        self._views.heard(info.worker_id, session, self._time.now)
        # The first view of a worker fixes its place: a set of names has no order that lasts.
        self._hash_class = self._views.view().workers[0].hash_class
        self.index.load(info.worker_id, Snapshot(info.generation, 0, ()))

    @property
    def num_queued(self) -> int:
        return len(self._admission)

    @property
    def num_in_flight(self) -> int:
        return len(self._flights)

    # -- the life of a request

    def arrive(self, number: int, prompt: Prompt, output_tokens: int) -> None:
        """A client asks. How long the answer will be nobody knows but the model."""
        name = f"r{number}"
        served = Served(number, len(prompt), output_tokens, self._time.now)
        entrant = Entrant(
            name,
            len(prompt),
            _max_tokens(output_tokens),
            targets=self._limits.targets,
            seconds_left=self._limits.request_seconds,
        )
        flight = self._flights[name] = _Flight(served, prompt, RequestKey(name), entrant)
        match self._admission.offer(flight.entrant, self.view(), self._time.now, lambda: self._uncached_tokens(flight)):
            case Admitted():
                self._dispatch(name)
            case Queued():
                pass
            case Shed(reason=reason):
                self._close(name, f"shed: {reason}")
                return
            case decision:
                assert_never(decision)
        self._deadlines.append(served)
        if len(self._deadlines) == 1:
            self._time.after(self._limits.request_seconds, self._expire)

    def _expire(self) -> None:
        """Ends those whose time is over. One timer for all: their times end in the order in which they came."""
        while self._deadlines:
            served = self._deadlines[0]
            if served.outcome:
                self._deadlines.popleft()
            elif (ends := served.arrived_at + self._limits.request_seconds) > self._time.now:
                self._time.at(ends, self._expire)
                return
            else:
                self._deadlines.popleft()
                self._late(f"r{served.number}", served)

    def _late(self, name: str, served: Served) -> None:
        waited = self._admission.leave(name)
        if not waited:
            self._say(self._workers[served.decode].cancel, name)
        self._close(name, DeadlineExceeded.__name__)

    def _dispatch(self, name: str) -> None:
        flight = self._flights[name]
        flight.served.admitted_at = self._time.now
        try:
            self._submit(flight)
        finally:
            self._admission.begun(name)

    def _submit(self, flight: _Flight) -> None:
        placed = self._place(flight, None)
        if placed is None:
            first = flight.first_error
            self._close(flight.key.request_id, first.type if first is not None else NoWorkers.__name__)
            return
        self._note_placed(flight, placed)
        request = Request(
            flight.key,
            flight.prompt,
            SamplingParams(_max_tokens(flight.served.output_tokens), seed=flight.served.output_tokens),
            seconds_left=self._limits.request_seconds - (self._time.now - flight.served.arrived_at),
            local_prefill_max_tokens=self._limits.local_prefill_max_tokens,
            prefill=placed.prefill.target if placed.prefill is not None else None,
            offer_held=placed.pulls,
        )
        self._say(self._workers[placed.decode.worker_id].submit, request)

    def _place(self, flight: _Flight, decode: str | None) -> Placed | None:
        view, now, prompt = self.view(), self._time.now, flight.prompt
        flight.prediction = self._predict(flight, view, now)
        targets, waited = flight.entrant.targets, now - flight.served.arrived_at
        ask = Ask(
            num_prompt_tokens=len(prompt),
            max_tokens=_max_tokens(flight.served.output_tokens),
            cached_tokens=flight.prediction.cached_tokens,
            local_prefill_max_tokens=self._limits.local_prefill_max_tokens,
            decode=decode,
            excluded=flight.excluded,
            tie=self._random.random(),
            ttft_seconds=targets.ttft_seconds - waited if targets.ttft_seconds is not None else None,
            tpot_seconds=targets.tpot_seconds,
        )
        placement = self._policy.place(ask, view, now, prompt.chain or ())
        if self._keep_why:
            flight.served.whys.append(placement.why)
        match placement:
            case Placed():
                return placement
            case NoCapacity():
                return None

    def _predict(self, flight: _Flight, view: View, now: float) -> Prediction:
        """What workers hold of the prompt, which is hashed once."""
        hashed = flight.prediction.chains if flight.prediction is not None else {}
        if not hashed and self._hash_class is not None:
            hashed = {self._hash_class: Chain(self._hasher.chain(flight.prompt))}
        return self._caches.predict_from(hashed, view, now)

    def _uncached_tokens(self, flight: _Flight) -> int:
        flight.prediction = self._predict(flight, self.view(), self._time.now)
        return max(len(flight.prompt) - max(flight.prediction.cached_tokens.values(), default=0), 1)

    def _note_placed(self, flight: _Flight, placed: Placed) -> None:
        served = flight.served
        served.decode = placed.decode.worker_id
        served.prefill = placed.prefill.worker_id if placed.prefill is not None else None
        served.predicted_tokens = placed.cached_tokens
        flight.placed, flight.waits_for_prefill = placed, True
        if flight.prediction is not None:
            self._caches.placed(flight.key.request_id, flight.prediction, placed, self._time.now)
        self._ledger.open(
            flight.key.request_id,
            decode=served.decode,
            prefill=served.prefill,
            num_prompt_tokens=served.input_tokens,
            prefill_tokens=placed.prefill_tokens,
            n=1,
        )

    def _close(self, name: str, outcome: str) -> None:
        """The one way out."""
        flight = self._flights.pop(name)
        served = flight.served
        served.outcome, served.ended_at = outcome, self._time.now
        self._ledger.close(name)
        self._admission.ended(flight.entrant, served.num_generated, ran=flight.placed is not None)
        if flight.waits_for_prefill:
            self._caches.ended(name)
        self._ended(served)
        self._call_next()

    def _call_next(self) -> None:
        if len(self._admission):
            for name in self._admission.admit(self.view(), self._time.now):
                self._dispatch(name)

    def view(self) -> View:
        return self._views.view()

    def _say(self, hear: Callable[..., None], *what: object) -> None:
        self._time.after(self._limits.message_seconds, hear, *what)

    # -- what workers say

    def outputs(self, worker_id: str, outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            self._relay(output)

    def _relay(self, output: SequenceOutput) -> None:
        name = output.key.request_id
        flight = self._flights.get(name)
        if flight is None:
            return
        served = flight.served
        served.num_generated = output.num_generated
        if output.num_generated == 1:
            served.first_token_at = self._time.now
            flight.waits_for_prefill = False
            self._ledger.first_token(name)
            if flight.prediction is not None and flight.placed is not None:
                self._caches.computed(name, flight.prediction, flight.placed, self._time.now)
            if output.usage is not None:
                served.cached_tokens = output.usage.cached_tokens
        if output.num_generated % COUNT_EVERY_TOKENS == 0:
            self._ledger.grew(name, COUNT_EVERY_TOKENS)
        if output.finish is not None:
            self._health.succeeded(served.decode)
            self._health.succeeded(served.prefill or served.decode)
            self._note_truth(flight, output)
            self._close(name, "finished")

    def _note_truth(self, flight: _Flight, last: SequenceOutput) -> None:
        """What the index said of the worker that prefilled, against what it found."""
        placed, prediction = flight.placed, flight.prediction
        if placed is None or prediction is None:
            return
        handed_off = last.timeline is not None and last.timeline.prefill_worker != ""
        source = placed.prefill if placed.prefill is not None and handed_off else placed.decode
        self._caches.found(source, prediction, flight.served.cached_tokens, self._time.now)

    def rejected(self, worker_id: str, key: RequestKey, error: HeadraceError) -> None:
        flight = self._flights.get(key.request_id)
        if flight is None:
            return
        self._failed(flight, worker_id, error)
        match after_rejection(self._progress(flight), error):
            case End():
                self._close(key.request_id, error.type)
            case PlaceAgain(key=new, excluded=excluded):
                self._rename(flight, new, excluded)
                self._submit(flight)

    def peer_lost(self, worker_id: str, key: RequestKey, prefill: str, error: HeadraceError) -> None:
        flight = self._flights.get(key.request_id)
        if flight is None:
            return
        self._failed(flight, prefill, error)
        match after_peer_lost(self._progress(flight), prefill, error):
            case End():
                self._say(self._workers[worker_id].cancel, key.request_id)
                self._close(key.request_id, error.type)
            case PrefillAgain(key=new, excluded=excluded):
                self._rename(flight, new, excluded)
                placed = self._place(flight, worker_id)
                if placed is not None:
                    placed = with_last_resort(placed, new.attempt)
                    self._note_placed(flight, placed)
                target = placed.prefill.worker_id if placed is not None and placed.prefill is not None else None
                self._say(self._workers[worker_id].place, key, new, target)

    def _rename(self, flight: _Flight, key: RequestKey, excluded: frozenset[str]) -> None:
        flight.key, flight.excluded = key, excluded
        flight.served.num_attempts = key.attempt

    def _progress(self, flight: _Flight) -> Progress:
        return Progress(flight.key, flight.served.decode, flight.served.num_generated, flight.excluded)

    def _failed(self, flight: _Flight, worker_id: str, error: HeadraceError) -> None:
        flight.first_error = flight.first_error or error
        self._health.failed(worker_id, error, self._time.now)

    def reported(self, worker_id: str, report: LoadReport) -> None:
        session = self._sessions[worker_id]
        session.report = report
        self._views.heard(worker_id, session, self._time.now)
        self._call_next()

    def hear(self, told: Told) -> None:
        """What another router placed."""
        self._caches.told(told, self._sessions[told.worker_id].info, self._time.now)
        self._views.told(told, self._time.now)

    def changed(self, worker_id: str, batch: EventBatch) -> None:
        outcome = self.index.apply(worker_id, batch)
        assert isinstance(outcome, Followed), f"{worker_id} is not followed: {outcome}"


def _max_tokens(output_tokens: int) -> int:
    """What a client asks for at most: the default, unless the model is known to say more."""
    return max(output_tokens, MAX_TOKENS)
