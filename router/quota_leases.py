"""Slices of tenants' quotas, leased from Redis in the background: what a router may spend without asking (ADR 9).

Each tenant's quotas are one hash in Redis. One script changes it, on Redis's own time: it refills what is unleased, takes
back what routers do not need, and grants what they would like to hold, as far as there is some. A router that was not
heard for a lease is forgotten, with what it held of a rate as spent. No request waits for any of this.
"""

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

from prometheus_client import Counter, Gauge
from redis.exceptions import RedisError

from headrace import metrics
from headrace.clock import Clock
from headrace.errors import ConfigError, Unavailable
from headrace.keys import Keys
from router.decisions.quotas import Grant, Kind, Quotas, Report
from router.follow import Store

log = logging.getLogger(__name__)

TENANTS_A_CALL = 64  # any number of tenants is leased for within any budget
IDLE_TENANTS_A_SECOND = 100  # that Redis is asked about though nothing moved
KEEP_SECONDS = 3600  # of a quota that nobody uses; it is full again long before

_LEFT = Gauge(metrics.QUOTA_LEFT, "What this router may spend of a quota without asking.", ["tenant", "quota"])
_LEASES = Counter(metrics.QUOTA_LEASES, "Rounds of leasing quotas.", ["outcome"])

# Fields: r:ROUTER when its lease ends · h:KIND:ROUTER what it holds · w:KIND:ROUTER until when it counts as short of it ·
# l:KIND what is unleased, t:KIND since when. Times in ms. A rate's level may go below 0: that is owed.
SCRIPT = """
local key, router, lease_ms = KEYS[1], ARGV[1], tonumber(ARGV[2])
local found = redis.call('TYPE', key).ok
if found ~= 'hash' and found ~= 'none' then redis.call('DEL', key) end -- no router wrote it
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local flat, f, live, gone = redis.call('HGETALL', key), {}, {}, {}
for i = 1, #flat, 2 do f[flat[i]] = flat[i + 1] end
for field, value in pairs(f) do
  if string.sub(field, 1, 2) == 'r:' and field ~= 'r:' .. router then
    local other = string.sub(field, 3)
    if tonumber(value) < now then gone[#gone + 1] = other else live[#live + 1] = other end
  end
end
for _, other in ipairs(gone) do
  redis.call('HDEL', key, 'r:' .. other)
  for _, kind in ipairs({'requests', 'tokens', 'concurrency'}) do
    redis.call('HDEL', key, 'h:' .. kind .. ':' .. other, 'w:' .. kind .. ':' .. other)
  end
end
redis.call('HSET', key, 'r:' .. router, now + lease_ms)
local answers = {}
for i = 3, #ARGV, 8 do
  local kind, capacity, rate = ARGV[i], tonumber(ARGV[i + 1]), tonumber(ARGV[i + 2])
  local holding, given_back, minted = tonumber(ARGV[i + 3]), tonumber(ARGV[i + 4]), tonumber(ARGV[i + 5])
  local target, hungry = tonumber(ARGV[i + 6]), ARGV[i + 7] == '1'
  local others, others_hungry, level = 0, 0, 0
  for _, other in ipairs(live) do
    others = others + tonumber(f['h:' .. kind .. ':' .. other] or '0')
    if tonumber(f['w:' .. kind .. ':' .. other] or '0') > now then others_hungry = 1 end
  end
  if rate == 0 then
    level = capacity - others - holding
  else
    level = tonumber(f['l:' .. kind] or capacity)
    local passed = math.max(now - tonumber(f['t:' .. kind] or now), 0) -- or its clock was set back
    level = level + passed / 1000 * rate + given_back - minted
    level = math.max(math.min(level, capacity - others - holding), -capacity)
  end
  local amount = math.max(math.floor(math.min(target - holding, level)), 0)
  holding, level = holding + amount, level - amount
  redis.call('HSET', key, 'h:' .. kind .. ':' .. router, string.format('%.3f', holding),
    'l:' .. kind, string.format('%.3f', level), 't:' .. kind, now,
    'w:' .. kind .. ':' .. router, (hungry and holding < target) and now + math.floor(lease_ms / 4) or 0)
  answers[#answers + 1] = {kind, amount, #live + 1, others_hungry}
end
redis.call('EXPIRE', key, %d)
return answers
""".replace("%d", str(KEEP_SECONDS))


def watch(quotas: Quotas, clock: Clock) -> None:
    """What may be spent is looked up when somebody asks, with a store or without."""
    for tenant in quotas.tenants:
        for its in quotas.slices(tenant):
            left = partial(_left, quotas, tenant, its.kind, clock)
            _LEFT.labels(tenant, its.kind.value).set_function(left)


def _left(quotas: Quotas, tenant: str, kind: Kind, clock: Clock) -> float:
    return quotas.left(tenant, kind, clock.now())


class QuotaLeases:
    """Leases for one router's Quotas, until it ends."""

    def __init__(
        self,
        store: Store,
        keys: Keys,
        router_id: str,
        quotas: Quotas,
        clock: Clock,
        *,
        lease_seconds: float = 10.0,
        sync_seconds: float = 0.5,
    ) -> None:
        self._store = store
        self._keys = keys
        self._router_id = router_id
        self._quotas = quotas
        self._clock = clock
        self._lease_seconds = lease_seconds
        self._sync_seconds = sync_seconds
        self._idle_seconds = min(max(2 * sync_seconds, len(quotas.tenants) / IDLE_TENANTS_A_SECOND), lease_seconds / 4)
        self._asked_at: dict[str, float] = {}
        self._failing = False
        self._refusing: set[str] = set()  # tenants whose key Redis answers with an error

    async def run(self) -> None:
        """Leases until cancelled, and then gives back what is left. The first round is the caller's: before it nothing is
        spent."""
        try:
            while True:
                await asyncio.sleep(self._sync_seconds)
                await self.sync()
        finally:
            await self._give_back()

    async def sync(self) -> None:
        """One round: all tenants whose slices moved, and the others now and then. ConfigError when Redis is not what it
        must be, from the start; all else is waited out."""
        now = self._clock.now()
        left = [tenant for tenant in self._quotas.tenants if self._is_due(tenant, now)]
        try:
            while left:
                await self._lease(left[:TENANTS_A_CALL])
                left = left[TENANTS_A_CALL:]
        except (Unavailable, RedisError, ConfigError) as error:
            if isinstance(error, ConfigError) and not self._asked_at:
                raise
            _LEASES.labels("failed").inc()
            if not self._failing:  # the first of a row
                log.warning("quotas are not leased just now: %s", error)
            self._failing = True
            for tenant in left:
                self._quotas.unheard(tenant, now)
            return
        if self._failing:
            log.warning("quotas are leased again")
            self._failing = False

    async def _lease(self, tenants: Sequence[str]) -> None:
        """For these, in one round trip."""
        now = self._clock.now()
        reports = {tenant: self._quotas.report(tenant, now) for tenant in tenants}
        answers = await self._store.call(lambda redis: self._ask(redis, reports))
        _LEASES.labels("leased").inc()
        for tenant, answer in zip(tenants, answers, strict=True):
            self._asked_at[tenant] = now
            if isinstance(answer, RedisError):
                self._refused(tenant, answer, now)
            else:
                self._quotas.granted(tenant, map(_grant, answer), now)
                self._refusing.discard(tenant)

    def _refused(self, tenant: str, error: RedisError, now: float) -> None:
        """What is written there for this one tenant is no quota: its slices go on by themselves, the others' as before."""
        _LEASES.labels("failed").inc()
        if tenant not in self._refusing:
            log.warning("the quotas of tenant %s are not leased: %s", tenant, error)
            self._refusing.add(tenant)
        self._quotas.unheard(tenant, now)

    def _is_due(self, tenant: str, now: float) -> bool:
        asked = self._asked_at.get(tenant, float("-inf"))
        return now - asked >= self._idle_seconds or not all(its.is_idle for its in self._quotas.slices(tenant))

    async def _ask(self, redis: Any, reports: dict[str, list[Report]]) -> list[Any]:
        async with redis.pipeline(transaction=False) as pipe:
            for tenant, its in reports.items():
                pipe.eval(SCRIPT, 1, self._keys.tenant(tenant), *self._arguments(its))
            answers: list[Any] = await pipe.execute(raise_on_error=False)
        refused = [answer for answer in answers if isinstance(answer, RedisError)]
        if len(refused) == len(answers):
            raise refused[0]  # it is Redis, and no tenant's key
        return answers

    def _arguments(self, reports: Sequence[Report]) -> list[str]:
        """Names as they are, numbers without a needless fraction."""
        numbers = [self._router_id, f"{self._lease_seconds * 1000:.0f}"]
        for its in reports:
            amounts = (its.capacity, its.per_second, its.holding, its.given_back, its.minted, its.target)
            numbers += [its.kind.value, *(f"{amount:.6f}" for amount in amounts), str(int(its.hungry))]
        return numbers

    async def _give_back(self) -> None:
        """A router that ends is not waited for until its lease does."""
        try:
            tenants = self._quotas.tenants
            for first in range(0, len(tenants), TENANTS_A_CALL):
                part = tenants[first : first + TENANTS_A_CALL]
                reports = {tenant: self._quotas.last_report(tenant) for tenant in part}
                await self._store.call(partial(self._leave, reports=reports))
        except (Unavailable, RedisError, ConfigError) as error:
            log.warning("quotas were not given back, and come back when the lease ends: %s", error)

    async def _leave(self, redis: Any, reports: dict[str, list[Report]]) -> None:
        async with redis.pipeline(transaction=True) as pipe:
            for tenant, its in reports.items():
                key = self._keys.tenant(tenant)
                pipe.eval(SCRIPT, 1, key, *self._arguments(its))
                fields = [f"{field}:{report.kind.value}:{self._router_id}" for report in its for field in "hw"]
                pipe.hdel(key, f"r:{self._router_id}", *fields)
            await pipe.execute()


def _grant(answer: Sequence[Any]) -> Grant:
    kind, amount, num_routers, others_hungry = answer
    return Grant(Kind(kind.decode()), float(amount), int(num_routers), bool(others_hungry))
