"""Among whose workers a request runs: those of what serves, or a canary's. What is decided is decided in
`decisions.revisions`; here flights are moved, and it is counted."""

from headrace.errors import Draining, HeadraceError, Overloaded
from router import measures
from router.decisions.revisions import Diverted, Revisions
from router.decisions.view import View
from router.decisions.views import Views
from router.flight import Flight


class Lanes:
    """One per router, owned by its requests. A flight's `revision` is "" and its view is everybody while there is no
    canary."""

    def __init__(self, revisions: Revisions, views: Views) -> None:
        self._revisions = revisions
        self._views = views

    def waited_for(self) -> View:
        """The workers that requests stand in line for."""
        view = self._views.view()
        return self._revisions.serving(view) if self._revisions.known else view

    def view(self, flight: Flight) -> View:
        """The workers that it may run on."""
        view = self._views.view()
        return self._revisions.only(view, flight.revision) if flight.revision else view

    def count_own(self, flight: Flight, view: View) -> None:
        """What others hold of its prompt counts for nothing."""
        prediction = flight.prediction
        if flight.revision and prediction is not None:
            own = {worker.worker_id for worker in view.workers}
            prediction.cached_tokens = {name: n for name, n in prediction.cached_tokens.items() if name in own}

    def enter(self, flight: Flight, now: float) -> bool:
        """Gives a new request its revision; whether that is a canary's, whose requests stand in no line."""
        if not self._revisions.known:
            return False
        job = flight.job
        num_tokens = len(job.prompt_token_ids) + job.sampling.max_tokens
        conversation = job.conversation or flight.key.request_id
        flight.revision, why = self._revisions.choose(conversation, num_tokens, self._views.view(), now)
        flight.canary = self._revisions.split.number
        if why is not None:
            measures.DIVERTED.labels(why.value).inc()
        flight.beside = self._revisions.is_beside(flight.revision)
        return flight.beside and why is not Diverted.BASE_GONE

    def stand_in_line(self, flight: Flight) -> None:
        """Where the canary has no room for it, it is what serves that takes it."""
        if self._revisions.is_beside(flight.revision) and not self._revisions.base_is_gone(self._views.view()):
            self._divert(flight, self._revisions.split.base, Diverted.NO_ROOM)

    def given_up(self, flight: Flight, error: HeadraceError) -> None:
        """Its worker gave it up: a canary has one try. One that is full, by what other routers placed there, or drains has
        no room, as a router that knew it would have found: that is no failure, nor is it one of what serves."""
        if self._revisions.is_beside(flight.revision):
            full = isinstance(error, Overloaded | Draining)
            if not full:
                flight.given_up_by = flight.revision
            self._divert(flight, self._revisions.split.base, Diverted.NO_ROOM if full else Diverted.FAILED)

    def nobody(self, flight: Flight) -> bool:
        """None of its revision's workers can take it; whether another's may."""
        elsewhere = self._revisions.elsewhere(flight.revision)
        if elsewhere is not None:
            self._divert(flight, *elsewhere)
        return elsewhere is not None

    def _divert(self, flight: Flight, revision: str, why: Diverted) -> None:
        measures.DIVERTED.labels(why.value).inc()
        flight.revision, flight.beside = revision, self._revisions.is_beside(revision)
