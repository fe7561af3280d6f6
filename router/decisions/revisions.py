"""Which revision a request runs on, and which workers are that revision's. Pure.

A request is placed among the workers of one revision alone: no prompt is prefilled by one and decoded by the other, and
what a canary holds in its caches is counted for nobody else, whether or not the two could share it. Without a canary this
costs a look at one field.

Whoever is the canary's by his conversation goes to what serves all the same where the canary has no worker, none that takes
so long a request, or no room: it never makes anybody wait or fail. The other way round, where no worker of what serves is
left, a canary that has a share takes all.
"""

from enum import StrEnum
from math import inf

from headrace.revisions import Split
from router.decisions.view import View

SILENT_SECONDS = 5.0  # without a word from Redis, or without a turn of the controller: nobody judges


class Diverted(StrEnum):
    """Why a request ran on another revision than the one of its conversation."""

    UNJUDGED = "unjudged"
    NO_WORKER = "no_worker"
    CONTEXT = "context"
    NO_ROOM = "no_room"
    FAILED = "failed"
    BASE_GONE = "base_gone"


class Revisions:
    """Owns what one router was last told, and the views of each revision. `known`: there is a canary, with or without a
    share."""

    def __init__(self) -> None:
        self._split = Split()
        self._heard_at = -inf
        self._beat_at = -inf
        self._of: View | None = None
        self._views: dict[str, View] = {}
        self.known = False

    @property
    def split(self) -> Split:
        """As it was last told."""
        return self._split

    def told(self, split: Split, now: float) -> None:
        if split.beat != self._split.beat or split.number != self._split.number or self._beat_at == -inf:
            self._beat_at = now
        self._heard_at = now
        self._split = split
        self._of = None
        self.known = bool(split.canary)

    def is_beside(self, revision: str) -> bool:
        """Whether requests of it may go to what serves instead."""
        return bool(revision) and revision != self._split.base

    def judged(self, now: float) -> bool:
        """Whether somebody looks after the canary, as far as this router knows."""
        return now - min(self._heard_at, self._beat_at) <= SILENT_SECONDS

    def percent(self, now: float) -> float:
        """The canary's share, as this router acts on it."""
        return self._split.percent if self.judged(now) else 0.0

    def choose(self, conversation: str, num_tokens: int, view: View, now: float) -> tuple[str, Diverted | None]:
        """The revision of a new request of so many tokens, prompt and answer."""
        split = self._split
        if self.base_is_gone(view):
            return split.canary, Diverted.BASE_GONE
        if not split.takes(conversation):
            return split.base, None
        reach = _reach(self.only(view, split.canary))
        if reach < 0:
            return split.base, Diverted.NO_WORKER
        if not self.judged(now):
            return split.base, Diverted.UNJUDGED
        return (split.base, Diverted.CONTEXT) if reach < num_tokens else (split.canary, None)

    def serving(self, view: View) -> View:
        """The workers that new requests wait for."""
        split = self._split
        return self.only(view, split.canary if self.base_is_gone(view) else split.base)

    def elsewhere(self, revision: str) -> tuple[str, Diverted] | None:
        """Where a request goes for which that revision has no worker."""
        if self.is_beside(revision):
            return self._split.base, Diverted.NO_WORKER
        return (self._split.canary, Diverted.BASE_GONE) if revision and self._split.percent else None

    def base_is_gone(self, view: View) -> bool:
        split = self._split
        return split.percent > 0 and _reach(self.only(view, split.base)) < 0 <= _reach(self.only(view, split.canary))

    def only(self, view: View, revision: str) -> View:
        """The workers of that revision; kept until the view is another one. All who are not the canary's serve beside it:
        as one canary begins while the last one's workers are still replaced, these are neither's and go on."""
        if view is not self._of:
            self._of, self._views = view, {}
        its = self._views.get(revision)
        if its is None:
            base, canary = revision == self._split.base, self._split.canary
            its = view.only(lambda w: w.info.revision != canary if base else w.info.revision == revision)
            self._views[revision] = its
        return its


def _reach(view: View) -> int:
    """The most tokens that one of its workers decodes; below 0 where none takes any."""
    return max((worker.decode_limit for worker in view.workers), default=-1)
