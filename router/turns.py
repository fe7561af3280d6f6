"""Whose turn it is: requests enter, wait for their turn, and leave. What is decided is decided in `decisions.admission`."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import assert_never

from headrace.clock import Clock
from headrace.errors import HeadraceError
from router import measures
from router.decisions.admission import Admission, Admitted, Entrant, Queued, Shed
from router.decisions.view import View


class Turns:
    """Owns the admission of one router, and who is waited for. Every request that enters ends with `ended`."""

    def __init__(self, admission: Admission, view: Callable[[], View], clock: Clock) -> None:
        self._admission = admission
        self._view = view
        self._clock = clock
        self._turns: dict[str, asyncio.Future[None]] = {}

    def __len__(self) -> int:
        return len(self._admission)

    async def enter(self, entrant: Entrant, uncached: Callable[[], int]) -> None:
        """Returns when it is the request's turn, at once if it need not wait. Raises the error of a refusal."""
        decision = self._admission.offer(entrant, self._view(), self._clock.now(), uncached)
        match decision:
            case Admitted():
                measures.admission(entrant.tenant, "admitted")
            case Queued(pushed_out=pushed_out):
                measures.admission(entrant.tenant, "queued")
                if pushed_out is not None:
                    self._count(pushed_out.tenant, pushed_out.shed)
                    self.give_up(pushed_out.name, pushed_out.shed.error)
                await self._wait(entrant.name)
            case Shed():
                self._refuse(entrant.tenant, decision)
            case _:
                assert_never(decision)

    def enter_beside(self, entrant: Entrant, view: View) -> bool:
        """Whether there is room among these workers, which others do not wait for; then it is the request's turn. Raises
        the error of a refusal."""
        match self._admission.beside(entrant, view, self._clock.now()):
            case None:
                return False
            case Shed() as shed:
                self._refuse(entrant.tenant, shed)
            case _:
                measures.admission(entrant.tenant, "admitted")
        return True

    @contextmanager
    def shared(self, entrant: Entrant) -> Iterator[None]:
        """For a request that is answered from another one's tokens. Raises the error of a refusal."""
        shed = self._admission.share(entrant, self._clock.now())
        if shed is not None:
            self._refuse(entrant.tenant, shed)
        try:
            yield
        finally:
            self._admission.ended(entrant, 0, ran=False)

    def _refuse(self, tenant: str, shed: Shed) -> None:
        self._count(tenant, shed)
        raise shed.error

    def _count(self, tenant: str, shed: Shed) -> None:
        measures.SHED.labels(shed.reason).inc()
        measures.admission(tenant, shed.reason)

    async def _wait(self, name: str) -> None:
        turn = self._turns[name] = asyncio.get_running_loop().create_future()
        try:
            await turn
        except BaseException:
            self._admission.leave(name)
            raise
        finally:
            del self._turns[name]

    def give_up(self, name: str, error: HeadraceError) -> None:
        """If the request waits, it does so no more."""
        turn = self._turns.get(name)
        if turn is not None and not turn.done():
            turn.set_exception(error)

    def call_next(self) -> None:
        """Room may have come: whoever's turn it is goes on. One that is leaving just now gives its turn back as it goes."""
        if len(self._admission):
            for name in self._admission.admit(self._view(), self._clock.now()):
                if not self._turns[name].done():
                    self._turns[name].set_result(None)

    def begun(self, entrant: Entrant) -> None:
        """It is placed, and the view counts it from now on."""
        self._admission.begun(entrant.name)

    def ended(self, entrant: Entrant, num_generated: int, *, ran: bool) -> None:
        self._admission.ended(entrant, num_generated, ran=ran)
