"""Reports reach Redis, where whoever wants all of them reads them; a Redis that does not take one ends nothing."""

import asyncio

import pytest
from redis.exceptions import ResponseError

from cluster.router_reports import ended_routers, router_reports
from headrace.keys import Keys
from headrace.reports import RouterReport
from headrace.store import connect
from router.reports import Reports, reachable


async def test_reports_of_all_routers_are_read_and_other_values_passed_over(redis_url: str) -> None:
    store, keys = connect(redis_url, 2.0), Keys("tally")
    reports = [RouterReport(name, "", 1.0, arrivals=number) for number, name in enumerate(("a", "b"))]
    for report in reports:
        await Reports(store, keys, lambda report=report: report, f"host-{report.router_id}:8000").write()
    await store.call(lambda redis: redis.set(keys.router("other"), "{}"))
    try:
        found = await router_reports(store, "tally")
        assert {name: (report.arrivals, report.http_address) for name, report in found.items()} == {
            "a": (0, "host-a:8000"),
            "b": (1, "host-b:8000"),
        }
        assert 0 < await store.call(lambda redis: redis.ttl(keys.router("a"))) <= 10
    finally:
        await store.close()


async def test_a_router_that_ends_in_order_says_so(redis_url: str) -> None:
    """Looks of an autoscaler are 15 s apart, a report is there for 10: a router that was busy at the last look and drained
    since was missed for an hour, in which nothing was taken away."""
    store, keys = connect(redis_url, 2.0), Keys("ends")
    asked = asyncio.Event()

    def report() -> RouterReport:
        asked.set()
        return RouterReport("a", "", 1.0, in_flight=3)

    try:
        writes = asyncio.create_task(Reports(store, keys, report, "").run())
        await asked.wait()
        assert await ended_routers(store, "ends") == frozenset()
        writes.cancel()
        await asyncio.wait([writes])
        assert await ended_routers(store, "ends") == {"a"}
    finally:
        await store.call(lambda redis: redis.delete(keys.ended_routers, keys.router("a")))
        await store.close()


class Refusing:
    """A Redis that answers every command with an error."""

    async def call(self, operation: object, **_: object) -> object:
        raise ResponseError("OOM command not allowed")


async def test_a_redis_that_refuses_ends_no_router() -> None:
    await Reports(Refusing(), Keys("c"), lambda: RouterReport("a", "", 1.0), "").write()  # type: ignore[arg-type]


@pytest.mark.parametrize(("host", "place"), [("10.0.0.7", "10.0.0.7:80"), ("::1", "[::1]:80")])
def test_an_address_of_its_own_is_said_as_it_is(host: str, place: str) -> None:
    assert reachable(host, 80) == place


def test_one_that_stands_for_all_addresses_is_said_as_this_hosts() -> None:
    assert not reachable("0.0.0.0", 80).startswith("0.0.0.0")
