"""What all routers of a cluster last said of their traffic (headrace.reports), and which of them ended in order."""

from typing import Any

from redis.exceptions import ResponseError

from headrace.keys import Keys
from headrace.reports import RouterReport, decode_report
from headrace.store import Store


async def router_reports(store: Store, cluster: str) -> dict[str, RouterReport]:
    """By router id, in its order; what a router of another version says is left out. StoreUnavailable when Redis does not
    answer."""

    async def read(redis: Any) -> list[bytes | None]:
        names = [name async for name in redis.scan_iter(match=Keys(cluster).router_pattern, count=1000)]
        return await redis.mget(names) if names else []

    found = [decode_report(raw) for raw in await store.call(read) if raw is not None]
    return {report.router_id: report for report in sorted(filter(None, found), key=lambda report: report.router_id)}


async def ended_routers(store: Store, cluster: str) -> frozenset[str]:
    """Ids of those that ended lately; what is no set counts as absent. StoreUnavailable when Redis does not answer."""

    async def read(redis: Any) -> frozenset[str]:
        try:
            return frozenset(name.decode() for name in await redis.smembers(Keys(cluster).ended_routers))
        except ResponseError:
            return frozenset()

    return await store.call(read)
