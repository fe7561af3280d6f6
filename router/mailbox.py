"""From the sessions to the requests: what workers said to one request, until it takes it; and how often it is woken.

First tokens, finishes and failures wake their request at once. Between them, and only while this process is short of
CPU, a stream is woken at most every `coalesce_seconds`, with all its tokens since: the cost of a message to a client is
many times that of a token in it.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from headrace.errors import HeadraceError, Overloaded
from headrace.values import RequestKey, SequenceOutput

MAX_PENDING_OUTPUTS = 8192
WAKES_PER_TURN = 32
BUSY_WINDOW_SECONDS = 0.25
BUSY_ON, BUSY_OFF = 0.6, 0.3


@dataclass(frozen=True, slots=True)
class PeerFailed:
    """The decode worker keeps the request and asks for another prefill worker."""

    worker_id: str
    error: HeadraceError


@dataclass(frozen=True, slots=True)
class GivenUp:
    """The request holds nothing on its decode worker any more: refused, failed, or the worker itself is gone."""

    error: HeadraceError


Failure = PeerFailed | GivenUp
T = TypeVar("T")


class Pacer:
    """Decides when a mailbox with new tokens wakes its request. One per router, on its event loop."""

    def __init__(
        self,
        coalesce_seconds: float,
        loop: asyncio.AbstractEventLoop,
        cpu_seconds: Callable[[], float] = time.process_time,
    ) -> None:
        self._coalesce_seconds = coalesce_seconds
        self._loop = loop
        self._cpu_seconds = cpu_seconds
        self._window_start = loop.time()
        self._window_cpu = cpu_seconds()
        self._num_fed = 0
        self._num_behind = 0
        self._due: deque[tuple[float, Mailbox[Any]]] = deque()
        self._timer: asyncio.Handle | None = None
        self.coalescing = False

    def fed(self, mailbox: "Mailbox[Any]", *, behind: bool) -> None:
        """The mailbox got tokens that may wait; `behind`: its request has not taken the ones before yet."""
        if self._coalesce_seconds == 0:
            mailbox.wake()
            return
        now = self._loop.time()
        self._num_fed += 1
        self._num_behind += behind
        if now - self._window_start >= BUSY_WINDOW_SECONDS:
            self._judge(now)
        if not self.coalescing:
            mailbox.wake()
        elif not behind:
            self._due.append((now + self._coalesce_seconds, mailbox))
            if self._timer is None:
                self._timer = self._loop.call_at(self._due[0][0], self._turn)

    def _judge(self, now: float) -> None:
        """Busy is what this process uses of a core; where others share the core, requests that lag behind tell it."""
        cpu = self._cpu_seconds()
        busy = (cpu - self._window_cpu) / (now - self._window_start)
        lagging = self._num_behind > self._num_fed / 8
        if self.coalescing:
            self.coalescing = busy > BUSY_OFF
        else:
            self.coalescing = busy > BUSY_ON or (lagging and busy > BUSY_OFF)
        self._window_start, self._window_cpu = now, cpu
        self._num_fed = self._num_behind = 0

    def _turn(self) -> None:
        """Wakes what is due, a few at a time: sockets are served between two turns."""
        self._timer = None
        now = self._loop.time()
        for _ in range(WAKES_PER_TURN):
            if not self._due or self._due[0][0] > now:
                break
            self._due.popleft()[1].wake()
        if self._due:
            if self._due[0][0] <= now:
                self._timer = self._loop.call_soon(self._turn)
            else:
                self._timer = self._loop.call_at(self._due[0][0], self._turn)


class Mailbox(Generic[T]):
    """Owned by one request, which alone takes; the session of its decode worker alone feeds.

    `key` names the attempt that counts: that an older one failed is dropped by the session. `relay` makes of outputs
    what the request takes; where the request waits already, it is called as the outputs come, so that all requests of a
    worker's step have only their writing left to do, one right after the other. `heard_all` is called once there is no
    more to hear, however slowly it will be taken: True when the last of `num_samples` finishes is here, False when no
    more is kept.
    """

    __slots__ = (
        "_earlier",
        "_heard_all",
        "_num_open",
        "_outputs",
        "_overflowed",
        "_pacer",
        "_ready",
        "_relay",
        "_started",
        "_waiter",
        "key",
    )

    def __init__(
        self,
        key: RequestKey,
        pacer: Pacer,
        relay: Callable[[list[SequenceOutput]], T],
        num_samples: int = 1,
        heard_all: Callable[[bool], None] = lambda _: None,
    ) -> None:
        self.key = key
        self._pacer = pacer
        self._relay = relay
        self._num_open = num_samples
        self._heard_all = heard_all
        self._outputs: list[SequenceOutput] = []
        self._earlier: deque[list[SequenceOutput] | Failure] = deque()  # failures, and the outputs before them
        self._waiter: asyncio.Future[T | Failure] | None = None
        self._ready = False
        self._started = False
        self._overflowed = False

    def feed(self, output: SequenceOutput) -> None:
        """Adds, and never blocks. A client that does not read loses its request rather than the router its memory."""
        outputs = self._outputs
        behind = bool(outputs)
        if len(outputs) >= MAX_PENDING_OUTPUTS:
            if not self._overflowed:
                self._overflowed = True
                reason = f"the client does not read: {MAX_PENDING_OUTPUTS} outputs wait for it"
                self.fail(GivenUp(Overloaded(reason, limit=MAX_PENDING_OUTPUTS)))
                self._heard_all(False)
            return
        if self._overflowed:
            return
        outputs.append(output)
        if output.finish is not None:
            self.wake()
            self._num_open -= 1
            if not self._num_open:
                self._heard_all(True)
        elif self._started:
            self._pacer.fed(self, behind=behind)
        else:
            self._started = True
            self.wake()

    def fail(self, failure: Failure) -> None:
        """Adds what ends the request or needs an answer, after the outputs that came before it."""
        if self._outputs:
            self._earlier.append(self._outputs)
            self._outputs = []
        self._earlier.append(failure)
        self.wake()

    async def take(self) -> T | Failure:
        """What comes next of what was said: what `relay` made of all outputs up to a failure, or the failure. Waits
        until the request is woken. Raises what `relay` raised."""
        if self._ready:
            return self._next()
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            return await self._waiter
        finally:
            self._waiter = None

    def wake(self) -> None:
        if not (self._outputs or self._earlier):
            return
        waiter = self._waiter
        if waiter is None or waiter.done():
            self._ready = True
            return
        try:
            waiter.set_result(self._next())
        except Exception as error:
            waiter.set_exception(error)

    def _next(self) -> T | Failure:
        if self._earlier:
            said = self._earlier.popleft()
            self._ready = bool(self._earlier or self._outputs)
            return self._relay(said) if isinstance(said, list) else said
        self._ready = False
        outputs, self._outputs = self._outputs, []
        return self._relay(outputs)
