"""Who waits to start, in order; and the bounded bypass: nobody starves, and nobody holds up all the others.

Entries are requests that have not started: prompts to compute, and expected hand-offs that have no claim yet.
"""

from bisect import insort
from collections.abc import Iterator
from itertools import takewhile

from workers.scheduling.sequence import Kind, RequestState


class Backlog:
    """Sorted by priority, then arrival. Owned by one Scheduler.

    Whoever starts counts as a bypass for everyone who came before it and still waits (for an expected request: once it
    asked for its claim). One that was bypassed `max_bypass` times is starving: nothing starts before it, unless it
    waits for pins to be released, which holds up tickets alone.
    """

    def __init__(self, max_bypass: int) -> None:
        self._max_bypass = max_bypass
        self._waiting: list[RequestState] = []
        self._starving: list[RequestState] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._waiting)

    def __contains__(self, state: RequestState) -> bool:
        return state in self._waiting

    def add(self, state: RequestState) -> None:
        state.bypassed = 0
        insort(self._waiting, state, key=lambda waiting: waiting.rank)

    def discard(self, state: RequestState) -> None:
        if state in self._waiting:
            self._waiting.remove(state)
        if state in self._starving:
            self._starving.remove(state)

    def candidates(self) -> Iterator[RequestState]:
        """Prompts in the order in which they are to be tried: the starving first."""
        starving = [state for state in self._starving if state.kind is not Kind.EXPECTED]
        yield from starving
        for state in tuple(self._waiting):
            if state.kind is not Kind.EXPECTED and state not in starving:
                yield state

    def may_start(self, state: RequestState) -> bool:
        """Whether it would pass nobody who is starving. Whoever waits for pins holds up tickets alone: may_pin()."""
        return all(starving.pin_blocked for starving in self._starving_before(state))

    def may_pin(self, ticket: RequestState) -> bool:
        """Whether it would pass no ticket that is starving for pins."""
        return not any(starving.pin_blocked for starving in self._starving_before(ticket))

    def _starving_before(self, state: RequestState) -> Iterator[RequestState]:
        return takewhile(lambda starving: starving is not state, self._starving)

    def started(self, state: RequestState) -> None:
        """Takes it out, and counts the bypass."""
        self.discard(state)
        for waiting in self._waiting:
            if waiting.order < state.order and (waiting.asked or waiting.kind is not Kind.EXPECTED):
                waiting.bypassed += 1
                if waiting.bypassed == self._max_bypass:
                    insort(self._starving, waiting, key=lambda starving: starving.order)
