"""The workers of a cluster by their leases: those that serve, whoever started them."""

from dataclasses import dataclass
from typing import Any

from headrace.keys import Keys
from headrace.leases import parse_lease
from headrace.store import Store
from headrace.values import WorkerInfo

AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class Leased:
    """One worker, as its lease says."""

    info: WorkerInfo
    draining: bool

    @property
    def host(self) -> str:
        return self.info.address.rpartition(":")[0].strip("[]")


async def leased_workers(store: Store, cluster: str) -> list[Leased]:
    """In the order of their ids; what is no lease of this version counts as absent. StoreUnavailable when Redis does not
    answer."""

    async def leases(redis: Any) -> list[Any]:
        names = [name async for name in redis.scan_iter(match=Keys(cluster).lease_pattern, count=1000)]
        found: list[Any] = []
        for at in range(0, len(names), AT_ONCE):
            pipe = redis.pipeline(transaction=False)
            for name in names[at : at + AT_ONCE]:
                pipe.hgetall(name)
            found += await pipe.execute(raise_on_error=False)
        return found

    parsed = [_parsed(fields) for fields in await store.call(leases)]
    return sorted((worker for worker in parsed if worker is not None), key=lambda worker: worker.info.worker_id)


def _parsed(fields: Any) -> Leased | None:
    if not isinstance(fields, dict):
        return None  # Redis's word on a key of another type
    try:
        info = parse_lease(fields)
    except ValueError:
        return None
    return Leased(info, fields.get(b"draining") == b"1") if info is not None else None
