"""Whether a request may run now, waits its turn, or is refused at once. Pure.

The long queue is the router's, where order and placement can still change: a request is let go when workers have rows for
it and the queue of those that prefill is short. In which order: `fair_queue`. It is bounded, and what it refuses it
refuses before any work is done: what nobody serves, what its tenant's quotas do not hold, what would not begin before its
deadline, what finds the queue full. A full queue is not one tenant's: whoever has less waiting than its weight's share
takes the place of the last of the one that has most.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import Literal

from headrace.errors import DeadlineExceeded, HeadraceError, InvalidRequest, NoWorkers, Overloaded, QuotaExceeded
from headrace.values import DEFAULT_TENANT
from router.decisions.fair_queue import FairQueue, Waiting
from router.decisions.quotas import Exceeded, Kind, Quotas, worth_asking_after
from router.decisions.room import Room, Rooms
from router.decisions.tenants import NO_TARGETS, Targets, Tenancy
from router.decisions.view import View

BYPASS_RATIO = 10.0  # a prompt lets so many times its own tokens pass
PRIORITY_SECONDS = 1.0  # a step of priority is worth as many tokens as all workers compute in this time
OWED_SECONDS = 30.0  # of all workers' prefill: no turn of a tenant comes later than that for what was generated for it
MIN_DEPARTURES = 8  # that say how fast the queue moves

Reason = Literal[
    "no_workers",
    "too_many_samples",
    "queue_full",
    "pushed_out",
    "deadline",
    "quota_requests",
    "quota_tokens",
    "quota_concurrency",
]


@dataclass(frozen=True, slots=True)
class Entrant:
    """A new request. `name` is the router's own for it; `max_tokens` of one sample; `seconds_left` until its deadline."""

    name: str
    num_prompt_tokens: int = 1
    max_tokens: int = 0
    num_sequences: int = 1
    tenant: str = DEFAULT_TENANT
    priority: int = 0
    targets: Targets = NO_TARGETS
    seconds_left: float = inf

    @property
    def most_tokens(self) -> int:
        """What it can come to, as quotas count."""
        return self.num_prompt_tokens + self.num_sequences * self.max_tokens


@dataclass(frozen=True, slots=True)
class Admitted:
    """The request may be placed now."""


@dataclass(frozen=True, slots=True)
class Shed:
    """The request is refused, with the time after which a retry has a chance."""

    reason: Reason
    retry_after_seconds: float
    error: HeadraceError


@dataclass(frozen=True, slots=True)
class PushedOut:
    """Who lost its place in the queue, and what it is told."""

    name: str
    tenant: str
    shed: Shed


@dataclass(frozen=True, slots=True)
class Queued:
    """The request waits; `Admission.admit` will name it. `num_ahead` requests are served before it as things stand.
    `pushed_out` lost its place to it."""

    num_ahead: int
    pushed_out: PushedOut | None = None


Decision = Admitted | Queued | Shed


@dataclass(frozen=True, slots=True)
class Rules:
    """`prefill_backlog_seconds`: how much prefill workers may have before them on average when one more prompt is let go,
    and each WORKER_BACKLOG prompts in any case. Those whose speed nobody has measured yet are not bound by it, nor are
    prompts of which at most `local_prefill_max_tokens` must be computed, which is done where they decode.
    `max_bypass_seconds`: what a prompt lets pass is computed within it. `waits_for_workers`: where there is none requests
    queue, for somebody starts some because of them."""

    max_queue: int = 1024
    prefill_backlog_seconds: float = inf
    max_bypass_seconds: float = 10.0
    local_prefill_max_tokens: int = 0
    waits_for_workers: bool = False


@dataclass(frozen=True, slots=True)
class _Promise:
    """Admitted and not placed yet, so the view does not count it."""

    num_sequences: int
    num_tokens: int


@dataclass(slots=True)
class _Pace:
    """When the last of those who waited were let go, since somebody waits."""

    departures: deque[float] = field(default_factory=lambda: deque(maxlen=32))

    def seconds_for(self, number: int) -> float | None:
        """How long until so many more are let go; None while that is not known."""
        times = self.departures
        if len(times) < MIN_DEPARTURES:
            return None
        return number * (times[-1] - times[0]) / (len(times) - 1)


class Admission:
    """Owns the queue, and through `quotas` what each request has taken. Entries are names; who waits behind a name is the
    caller's matter. Every request that was not refused ends with `ended`."""

    def __init__(
        self, rules: Rules | None = None, tenancy: Tenancy | None = None, quotas: Quotas | None = None
    ) -> None:
        self._rules = rules or Rules()
        self._rooms = Rooms(self._rules.prefill_backlog_seconds)
        self._quotas = quotas or Quotas()
        tenants = (tenancy or Tenancy()).tenants
        self._queue = FairQueue({name: tenant.weight for name, tenant in tenants.items()})
        self._promised: dict[str, _Promise] = {}
        self._pace = _Pace()

    def __len__(self) -> int:
        return len(self._queue)

    def offer(self, entrant: Entrant, view: View, now: float, uncached: Callable[[], int] | None = None) -> Decision:
        """Decides on a new request. A Queued one stays until `admit` names it or `leave` is called. `uncached` says how
        many prompt tokens somebody must compute; it is asked only where the request must wait."""
        room = self._room(view)
        refused = self._unservable(entrant, room)
        if refused is not None:
            return refused
        if not len(self._queue) and self._fits(entrant.num_sequences, room):
            return self._over_quota(entrant, now) or self._admitted(entrant, entrant.num_prompt_tokens)
        num_tokens = uncached() if uncached is not None else entrant.num_prompt_tokens
        if self._needs_no_prefill_worker(entrant, room, num_tokens):
            return self._over_quota(entrant, now) or self._admitted(entrant, num_tokens)
        return self._queued(entrant, room, now, num_tokens)

    def beside(self, entrant: Entrant, view: View, now: float) -> Admitted | Shed | None:
        """For workers that nobody waits for: None where they have no room now."""
        room = self._room(view)
        if entrant.num_sequences > min(room.num_sequences, room.most_samples) or room.seconds <= 0:
            return None
        return self._over_quota(entrant, now) or self._admitted(entrant, entrant.num_prompt_tokens)

    def admit(self, view: View, now: float) -> list[str]:
        """The names that may run now, in order. Whoever does not fit keeps those behind it waiting, so none starves."""
        admitted: list[str] = []
        if not len(self._queue):
            return admitted
        room = self._room(view)
        while (head := self._queue.head()) is not None and self._fits(head.num_sequences, room):
            self._queue.pop()
            room.take(head.num_sequences, head.num_tokens)
            self._promise(head.name, head.num_sequences, head.num_tokens)
            self._pace.departures.append(now)
            admitted.append(head.name)
        self._forget_pace()
        return admitted

    def begun(self, name: str) -> None:
        """An admitted request is placed, and the view counts it from now on; or it ended before."""
        self._promised.pop(name, None)

    def leave(self, name: str) -> bool:
        """The request's client went away, or its time is over. False when it no longer waits: it was admitted."""
        waited = self._queue.remove(name)
        self._forget_pace()
        return waited

    def ended(self, entrant: Entrant, num_generated: int, *, ran: bool) -> None:
        """The request is over, whichever way, having got so many tokens; of a refused one nothing is changed. `ran`: it
        was placed, so that its prompt counts though no token came of it. Once for each request."""
        self.begun(entrant.name)
        self._quotas.give_back(entrant.name, entrant.num_prompt_tokens + num_generated if ran else 0)
        if num_generated:
            self._queue.charge(entrant.tenant, num_generated)

    def share(self, entrant: Entrant, now: float) -> Shed | None:
        """A request that is answered from another one's tokens costs its tenant a request and a slot. `ended` ends it."""
        return self._over_quota(Entrant(entrant.name, 0, tenant=entrant.tenant), now)

    # -- refusals

    def _unservable(self, entrant: Entrant, room: Room) -> Shed | None:
        if not room.most_samples and not self._rules.waits_for_workers:
            return Shed("no_workers", 2.0, NoWorkers("no worker that decodes is ready", retry_after_seconds=2.0))
        if 0 < room.most_samples < entrant.num_sequences:
            # It would wait until nothing runs, hold up all behind it, and then be refused.
            allowed = f"at most {room.most_samples}, as many as a worker runs at once"
            return Shed("too_many_samples", 0.0, InvalidRequest.out_of_range("n", entrant.num_sequences, allowed))
        if entrant.seconds_left <= 0:
            return Shed("deadline", 0.0, DeadlineExceeded("the request's time was over before it began", limit=0))
        return None

    def _over_quota(self, entrant: Entrant, now: float) -> Shed | None:
        exceeded = self._quotas.take(entrant.name, entrant.tenant, entrant.most_tokens, now)
        return _quota_shed(exceeded) if exceeded is not None else None

    def _queued(self, entrant: Entrant, room: Room, now: float, num_tokens: int) -> Queued | Shed:
        waiting, place = self._in_line(entrant, room, now, num_tokens)
        num_ahead = self._queue.num_ahead(entrant.tenant, place)
        refused = self._too_late(entrant, num_ahead)
        if refused is not None:
            return refused
        victim: Waiting | None = None
        if len(self._queue) >= self._rules.max_queue:
            victim = self._gives_way_to(entrant)
            if victim is None:
                return self._full("queue_full")
        refused = self._over_quota(entrant, now)
        if refused is not None:
            return refused
        pushed_out = None
        if victim is not None:
            pushed_out = PushedOut(victim.name, victim.tenant, self._full("pushed_out"))
            self._queue.remove(victim.name)
        self._queue.push(waiting, place, OWED_SECONDS * room.tokens_per_second)
        return Queued(num_ahead, pushed_out)

    def _too_late(self, entrant: Entrant, num_ahead: int) -> Shed | None:
        seconds = self._pace.seconds_for(num_ahead)
        if seconds is None or seconds < entrant.seconds_left:
            return None
        retry = worth_asking_after(seconds)
        message = f"its turn would come in about {seconds:.1f} s, and it has {entrant.seconds_left:.1f} s"
        error = Overloaded(
            message, retry_after_seconds=retry, limit=f"{entrant.seconds_left:.3f}", actual=f"{seconds:.3f}"
        )
        return Shed("deadline", retry, error)

    def _gives_way_to(self, entrant: Entrant) -> Waiting | None:
        """Who loses its place in a full queue: nobody of the same tenant, nor of one that has less waiting by weight."""
        queue, victim = self._queue, self._queue.last_of_the_greediest()
        if victim is None or victim.tenant == entrant.tenant:
            return None
        theirs = queue.num_of(victim.tenant) / queue.weight(victim.tenant)
        return victim if (queue.num_of(entrant.tenant) + 1) / queue.weight(entrant.tenant) < theirs else None

    def _full(self, reason: Literal["queue_full", "pushed_out"]) -> Shed:
        number, limit = len(self._queue), self._rules.max_queue
        seconds = worth_asking_after(self._pace.seconds_for(number) or 0.0)
        message = f"the queue is full: {number} requests wait, limit {limit}"
        if reason == "pushed_out":
            message += "; another tenant's request, of which fewer wait, took the place of this one"
        return Shed(reason, seconds, Overloaded(message, retry_after_seconds=seconds, limit=limit, actual=number))

    # -- order and room

    def _in_line(self, entrant: Entrant, room: Room, now: float, num_tokens: int) -> tuple[Waiting, int]:
        """The newcomer as one who waits, and its place. What it lets pass: as much as its target leaves time for; without
        one, or when that is missed already, some times its own tokens, so that all are delayed in proportion."""
        queue, per_second = self._queue, room.tokens_per_second
        waiting = Waiting(
            entrant.name, entrant.tenant, entrant.num_sequences, num_tokens, BYPASS_RATIO * num_tokens, entrant.priority
        )
        target = entrant.targets.ttft_seconds
        if target is not None:
            waiting.latest = now + target - num_tokens * room.token_seconds
        most = self._rules.max_bypass_seconds * per_second
        place = queue.place(waiting, now, PRIORITY_SECONDS * per_second, most)
        if target is not None:
            left = (waiting.latest - now) * per_second - queue.tokens_ahead(entrant.tenant, place)
            waiting.patience = left if left > 0 else waiting.patience
        waiting.patience = min(waiting.patience, most)
        return waiting, place

    def _needs_no_prefill_worker(self, entrant: Entrant, room: Room, num_tokens: int) -> bool:
        """Those who wait do so for prefill workers alone, and this one's worker computes its prompt by itself."""
        head = self._queue.head()
        return (
            num_tokens <= self._rules.local_prefill_max_tokens
            and entrant.num_sequences <= room.num_sequences
            and (head is None or head.num_sequences <= room.num_sequences)
        )

    def _room(self, view: View) -> Room:
        """What the workers take beside what was admitted and is not placed yet."""
        room = self._rooms.of(view)
        for promise in self._promised.values():
            room.take(promise.num_sequences, promise.num_tokens)
        return room

    def _fits(self, num_sequences: int, room: Room) -> bool:
        """One with more samples than there ever is room for runs when nothing else does, or it would wait for ever."""
        if self._rules.waits_for_workers and not room.most_samples:
            return False
        return (num_sequences <= room.num_sequences and room.seconds > 0) or (not self._promised and room.idle)

    def _admitted(self, entrant: Entrant, num_tokens: int) -> Admitted:
        self._promise(entrant.name, entrant.num_sequences, num_tokens)
        return Admitted()

    def _promise(self, name: str, num_sequences: int, num_tokens: int) -> None:
        self._promised[name] = _Promise(num_sequences, num_tokens)

    def _forget_pace(self) -> None:
        if not len(self._queue):
            self._pace.departures.clear()


def _quota_shed(exceeded: Exceeded) -> Shed:
    kind, limit, retry = exceeded.kind, exceeded.limit, exceeded.retry_after_seconds
    numbers = {"quota": kind.value, "limit": limit, "needed": f"{exceeded.needed:g}", "left": f"{exceeded.left:.0f}"}
    reason: Reason
    match kind:
        case Kind.REQUESTS:
            reason, what = "quota_requests", f"{limit} requests per minute"
        case Kind.TOKENS:
            reason, what = "quota_tokens", f"{limit} tokens per minute"
        case Kind.CONCURRENCY:
            reason, what = "quota_concurrency", f"{limit} requests at once"
    if exceeded.never:
        message = (
            f"prompt and max_tokens must be at most {exceeded.left:.0f} tokens together, which is what the tenant's quota "
            f"of {what} holds at once, got {exceeded.needed:.0f}"
        )
        return Shed(reason, 0.0, InvalidRequest(message, field="max_tokens", **numbers))
    message = f"the tenant's quota of {what} does not hold this request now"
    return Shed(reason, retry, QuotaExceeded(message, retry_after_seconds=retry, **numbers))
