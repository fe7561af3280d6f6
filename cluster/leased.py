"""The workers of a cluster by their leases: those that serve, whoever started them."""

from dataclasses import dataclass
from typing import Any

from headrace.keys import Keys
from headrace.leases import parse_lease
from headrace.store import Store
from headrace.values import WorkerInfo


@dataclass(frozen=True, slots=True)
class Leased:
    """One worker, as its lease says."""

    info: WorkerInfo
    draining: bool

    @property
    def host(self) -> str:
        return self.info.address.rpartition(":")[0].strip("[]")


async def leased_workers(store: Store, cluster: str) -> list[Leased]:
    """In the order of their ids. StoreUnavailable when Redis does not answer."""

    async def leases(redis: Any) -> list[dict[bytes, bytes]]:
        names = [name async for name in redis.scan_iter(match=Keys(cluster).lease_pattern, count=1000)]
        return [await redis.hgetall(name) for name in names]

    found = [
        Leased(info, fields.get(b"draining") == b"1")
        for fields in await store.call(leases)
        if (info := parse_lease(fields)) is not None
    ]
    return sorted(found, key=lambda worker: worker.info.worker_id)
