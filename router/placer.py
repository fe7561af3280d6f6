"""How placement is carried out for requests in flight: what caches are believed to hold for them is looked up, what was
decided is noted, and what follows for the ledger and for the belief in caches is done."""

import random
from functools import partial

from headrace.clock import Clock
from router import measures
from router.decision_log import Note
from router.decisions.caches import Caches, Prediction
from router.decisions.ledger import Ledger
from router.decisions.placement import Placed, Placement, place
from router.decisions.record import Decision
from router.decisions.view import View
from router.flight import Flight
from router.lanes import Lanes


class Placer:
    """Owned by router.requests, as are the ledger and the caches in which it notes what it did."""

    def __init__(
        self,
        caches: Caches,
        lanes: Lanes,
        ledger: Ledger,
        clock: Clock,
        randomness: random.Random,
        local_prefill_max_tokens: int,
        note_decision: Note,
    ) -> None:
        self._caches = caches
        self._lanes = lanes
        self._ledger = ledger
        self._clock = clock
        self._random = randomness
        self._local_prefill_max_tokens = local_prefill_max_tokens
        self._note_decision = note_decision

    def uncached_tokens(self, flight: Flight) -> int:
        """What of the prompt somebody must compute, where most of it is cached."""
        cached = self._predict(flight, self._lanes.view(flight), self._clock.now()).cached_tokens
        return max(len(flight.job.prompt_token_ids) - max(cached.values(), default=0), 1)

    def place(self, flight: Flight, decode: str | None = None) -> Placement:
        """Decides where it runs; beside `decode`, where that has it already. Nothing but the decision is noted."""
        view, now = self._lanes.view(flight), self._clock.now()
        prediction = self._predict(flight, view, now)
        for fallback in prediction.fallbacks:
            measures.INDEX_FALLBACKS.labels(fallback.value).inc()
        ask = flight.ask(prediction.cached_tokens, self._local_prefill_max_tokens, self._random.random(), decode, now)
        placement = place(ask, view, now)
        flight.decided.append(placement.decided)
        self._note_decision(flight.key, partial(Decision.of, flight.job.request_id, flight.key, view, now, placement))
        return placement

    def _predict(self, flight: Flight, view: View, now: float) -> Prediction:
        """What workers hold of the prompt; it is hashed once, however often that is asked."""
        chains = flight.prediction.chains if flight.prediction is not None else None
        flight.prediction = self._caches.predict(flight.job.prompt_token_ids, flight.job.cache_salt, view, now, chains)
        self._lanes.count_own(flight, view)
        return flight.prediction

    def placed(self, flight: Flight, placed: Placed) -> None:
        """It goes there."""
        flight.placed = placed
        flight.waits_for_prefill = True
        if flight.prediction is not None:
            self._caches.placed(flight.key.request_id, flight.prediction, placed, self._clock.now())
        measures.PLACEMENTS.labels(placed.decided.reason).inc()
        self._ledger.open(
            flight.key.request_id,
            decode=flight.decode,
            prefill=flight.prefill,
            num_prompt_tokens=len(flight.job.prompt_token_ids),
            prefill_tokens=placed.prefill_tokens,
            n=flight.job.n,
        )

    def computed(self, flight: Flight, now: float) -> None:
        """Its prompt is."""
        self._ledger.first_token(flight.key.request_id)
        if flight.prediction is not None and flight.placed is not None:
            self._caches.computed(flight.key.request_id, flight.prediction, flight.placed, now)

    def proven(self, flight: Flight, now: float) -> None:
        """What the index said of the worker that prefilled, against what that worker found."""
        placed, prediction, found = flight.placed, flight.prediction, flight.cached_tokens
        if placed is not None and prediction is not None and not placed.pulls:
            # A decode worker with little left to compute does it itself, whatever the placement.
            source = placed.prefill if placed.prefill is not None and flight.handed_over_by else placed.decode
            error = self._caches.found(source, prediction, found, now)
            measures.truth(source.worker_id, prediction.cached_tokens.get(source.worker_id, 0), found, error)
