"""Tenants' quotas, decided locally out of slices that are leased in the background. Pure.

Of each quota a router holds a slice: what it may spend without asking. A rate's slice is spent and granted anew; slots of
a concurrency limit come back. How slices come about is `router.quota_leases`; how long one is believed, here:

    alone      no store, one router: the slice is the whole quota and refills by itself
    leased     the store was heard within the lease: only what it grants is spent
    unleased   it was not: the slice refills by itself at this router's part of the quota, which is one of as many as there
               were routers when the store was last heard, or `unleased_fraction` where it never was; what comes so is told
               to the store as soon as it is heard, and taken off what it has to grant

So no quota is exceeded while the store answers, and none while it is away for all; docs/adr/0009 has the bounds.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from router.decisions.tenants import Tenant

MIN_RETRY_SECONDS = 1.0
MAX_RETRY_SECONDS = 60.0


class Kind(StrEnum):
    """What a quota counts."""

    REQUESTS = "requests"
    TOKENS = "tokens"
    CONCURRENCY = "concurrency"


@dataclass(frozen=True, slots=True)
class QuotaRules:
    """`shared`: other routers may spend the same quotas. `burst_seconds`: how many seconds' worth of a rate may be spent at
    once after a pause."""

    shared: bool = False
    lease_seconds: float = 10.0
    burst_seconds: float = 60.0
    unleased_fraction: float = 0.5


@dataclass(frozen=True, slots=True)
class Exceeded:
    """A quota that a request does not fit into now, with the numbers; `never`: nor ever."""

    kind: Kind
    limit: int
    needed: float
    left: float
    retry_after_seconds: float
    never: bool = False


@dataclass(slots=True)
class Slice:
    """One quota of one tenant, in this router. Owned by Quotas. Units: requests, tokens, or slots.

    `balance` may be spent; `used` slots are in use (concurrency alone). `demand` is what was asked for since the last
    report, refused or not; `hungry`: some of it was refused. `minted` came without the store, which does not know yet.
    """

    kind: Kind
    limit: int
    capacity: float
    per_second: float
    balance: float
    refilled_at: float
    used: int = 0
    demand: float = 0.0
    hungry: bool = False
    minted: float = 0.0
    num_routers: int = 0  # 0: the store was never heard
    heard_at: float = float("-inf")
    others_hungry: bool = False

    @property
    def holding(self) -> float:
        return self.balance + self.used

    @property
    def is_idle(self) -> bool:
        return not (self.demand or self.hungry or self.minted or self.used)


@dataclass(frozen=True, slots=True)
class Report:
    """What a router says to the store about one slice: what it holds, what it gives back of that which it held, what it had
    without being granted it, how much it would like to hold, and whether it had to refuse."""

    kind: Kind
    capacity: float
    per_second: float
    holding: float
    given_back: float
    minted: float
    target: float
    hungry: bool


@dataclass(frozen=True, slots=True)
class Grant:
    """The store's answer: what the router may spend more, how many routers share the quota, and whether another one had to
    refuse."""

    kind: Kind
    amount: float
    num_routers: int
    others_hungry: bool


@dataclass(slots=True)
class _Taken:
    tenant: str
    tokens: float


class Quotas:
    """Owns the slices of one router, and what each request in it has taken. Tenants without quotas cost one lookup."""

    def __init__(self, tenants: Iterable[Tenant] = (), rules: QuotaRules | None = None, now: float = 0.0) -> None:
        self._rules = rules = rules or QuotaRules()
        self._taken: dict[str, _Taken] = {}
        self._slices: dict[str, dict[Kind, Slice]] = {}
        for tenant in tenants:
            slices = {its.kind: its for its in _slices(tenant, rules, now)}
            if slices:
                self._slices[tenant.name] = slices

    @property
    def tenants(self) -> tuple[str, ...]:
        """Those with quotas."""
        return tuple(self._slices)

    def slices(self, tenant: str) -> Iterable[Slice]:
        return self._slices.get(tenant, {}).values()

    def left(self, tenant: str, kind: Kind, now: float) -> float:
        """What may be spent of it now."""
        its = self._slices[tenant][kind]
        self._refill(its, now)
        return its.balance

    def take(self, name: str, tenant: str, num_tokens: int, now: float) -> Exceeded | None:
        """A request enters: one request, one slot, and the most tokens that it can come to. All of it, or nothing and
        which quota stands against it."""
        slices = self._slices.get(tenant)
        if slices is None:
            return None
        needs = [(its, float(num_tokens) if kind is Kind.TOKENS else 1.0) for kind, its in slices.items()]
        exceeded: Exceeded | None = None
        for its, needed in needs:
            if not needed:
                continue
            self._refill(its, now)
            its.demand += needed
            if its.balance < needed:
                exceeded = exceeded or self._exceeded(its, needed)
                its.hungry = its.hungry or needed <= its.capacity
        if exceeded is not None:
            return exceeded
        for its, needed in needs:
            its.balance -= needed
            if its.kind is Kind.CONCURRENCY:
                its.used += 1
        self._taken[name] = _Taken(tenant, num_tokens)
        return None

    def give_back(self, name: str, num_tokens: int) -> None:
        """The request is over, and came to so many tokens. Its slot is free, what it did not need is the tenant's again;
        that it asked stays counted. Idempotent."""
        taken = self._taken.pop(name, None)
        if taken is None:
            return
        for kind, its in self._slices[taken.tenant].items():
            if kind is Kind.CONCURRENCY:
                its.used -= 1
                its.balance += 1
            elif kind is Kind.TOKENS:
                its.balance += max(taken.tokens - num_tokens, 0.0)

    # -- the store's side

    def report(self, tenant: str, now: float) -> list[Report]:
        """What to tell the store. What a slice holds beyond its target leaves it at once: whatever becomes of the report,
        it is not spent twice."""
        return [self._report(its, now) for its in self.slices(tenant)]

    def last_report(self, tenant: str) -> list[Report]:
        """All that this router holds goes back: it ends."""
        return [
            Report(its.kind, its.capacity, its.per_second, 0.0, its.balance, its.minted, 0.0, False)
            for its in self.slices(tenant)
        ]

    def granted(self, tenant: str, grants: Iterable[Grant], now: float) -> None:
        """The store answered the last report."""
        slices = self._slices[tenant]
        for grant in grants:
            its = slices[grant.kind]
            its.balance += grant.amount
            its.num_routers = max(grant.num_routers, 1)
            its.others_hungry = grant.others_hungry
            its.heard_at = its.refilled_at = now
            its.minted = 0.0

    def unheard(self, tenant: str, now: float) -> None:
        """The store did not answer. A router that never heard it begins with its part."""
        for its in self.slices(tenant):
            if not its.num_routers and not its.minted:
                its.balance = its.minted = max(float(int(its.capacity * self._rules.unleased_fraction)), 1.0)
                its.refilled_at = now

    def _report(self, its: Slice, now: float) -> Report:
        self._refill(its, now)
        target = self._target(its)
        given_back = max(its.holding - target, 0.0)
        its.balance -= given_back
        report = Report(its.kind, its.capacity, its.per_second, its.holding, given_back, its.minted, target, its.hungry)
        its.demand, its.hungry = 0.0, False
        return report

    def _target(self, its: Slice) -> float:
        """What this router should hold: its part, of which one is left in the store for whoever needs more; less, where
        another one is short; twice what it was asked for, where that is more."""
        num = max(its.num_routers, 1)
        part = its.capacity if num == 1 else its.capacity / (num + 1)
        if its.others_hungry:
            part /= 4
        return max(min(max(float(int(part)), its.used + 2 * its.demand), its.capacity), its.used)

    def _refill(self, its: Slice, now: float) -> None:
        """What comes without the store: nothing while it is heard."""
        rules = self._rules
        part = 1.0
        if rules.shared:
            if now - its.heard_at <= rules.lease_seconds or not (its.num_routers or its.minted):
                return
            part = 1 / its.num_routers if its.num_routers else rules.unleased_fraction
        room = max(its.capacity * part - its.balance, 0.0)
        amount = min(max(now - its.refilled_at, 0.0) * its.per_second * part, room)
        its.balance += amount
        its.minted += amount
        its.refilled_at = now

    def _exceeded(self, its: Slice, needed: float) -> Exceeded:
        if needed > its.capacity:
            return Exceeded(its.kind, its.limit, needed, its.capacity, 0.0, never=True)
        seconds = MIN_RETRY_SECONDS
        if its.per_second:
            seconds = (needed - its.balance) * max(its.num_routers, 1) / its.per_second
        return Exceeded(its.kind, its.limit, needed, max(its.balance, 0.0), worth_asking_after(seconds))


def worth_asking_after(seconds: float) -> float:
    """When a retry makes sense, of something that is expected after so long."""
    return min(max(seconds, MIN_RETRY_SECONDS), MAX_RETRY_SECONDS)


def _slices(tenant: Tenant, rules: QuotaRules, now: float) -> Iterator[Slice]:
    """Full where nobody else spends of it, else empty until the store was asked."""
    part = 0.0 if rules.shared else 1.0
    rates: tuple[tuple[Literal[Kind.REQUESTS, Kind.TOKENS], int | None], ...] = (
        (Kind.REQUESTS, tenant.requests_per_minute),
        (Kind.TOKENS, tenant.tokens_per_minute),
    )
    if tenant.max_concurrent is not None:
        slots = tenant.max_concurrent
        yield Slice(Kind.CONCURRENCY, slots, slots, 0.0, slots * part, now)
    for kind, limit in rates:
        if limit is not None:
            capacity = max(limit * rules.burst_seconds / 60, 1.0)
            yield Slice(kind, limit, capacity, limit / 60, capacity * part, now)
