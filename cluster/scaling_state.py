"""What the autoscaler keeps in Redis: its last look, its decisions with their outcomes, and the arrivals of past days.

`now` is the whole last turn, inputs and decision, what it remembers among them; `decisions` a hash by number, the newest
KEPT of them; `arrivals` the history that forecasts come from. The leading controller alone writes them. A turn that
changes what is desired writes that in the same transaction: no controller dies between a decision and its record.
"""

import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from redis.exceptions import ResponseError, WatchError

from cluster.lifecycle import Desired
from cluster.scaling.forecast import Arrivals
from cluster.scaling.values import Recorded
from cluster.state import decode_desired, encode_desired, text
from headrace.keys import Keys
from headrace.store import Store
from router.decisions import codec

T = TypeVar("T")

KEPT = 256
NOW_SECONDS = 3600  # a look that is older says nothing of now


class ScalingState:
    """One process's view of these keys. Every call raises StoreUnavailable when Redis is away; what another version wrote
    counts as absent."""

    def __init__(self, store: Store, cluster: str) -> None:
        self._store = store
        self._keys = Keys(cluster)

    async def now(self) -> Recorded | None:
        return _decoded(Recorded, await text(self._store, self._keys.scaling_now))

    async def arrivals(self) -> Arrivals | None:
        return _decoded(Arrivals, await text(self._store, self._keys.scaling_arrivals))

    async def decisions(self) -> list[Recorded]:
        """Oldest first."""
        found: dict[bytes, bytes] = await self._of_hash(lambda redis: redis.hgetall(self._keys.scaling_decisions), {})
        decoded = [_decoded(Recorded, raw) for raw in found.values()]
        return sorted((one for one in decoded if one is not None), key=lambda one: one.number)

    async def latest(self, number: int, count: int) -> list[Recorded]:
        """The decisions up to `number`, at most `count` of them."""
        names = [str(one) for one in range(max(number - count, 0) + 1, number + 1)]
        if not names:
            return []
        found: list[bytes | None] = await self._of_hash(
            lambda redis: redis.hmget(self._keys.scaling_decisions, names), []
        )
        return [one for raw in found if (one := _decoded(Recorded, raw)) is not None]

    async def _of_hash(self, read: Callable[[Any], Awaitable[T]], nothing: T) -> T:
        try:
            return await self._store.call(read)
        except ResponseError as error:
            if not str(error).startswith("WRONGTYPE"):
                raise
            return nothing

    async def commit(
        self,
        now: Recorded,
        records: Sequence[Recorded] = (),
        arrivals: Arrivals | None = None,
        desired: Desired | None = None,
        before: Desired | None = None,
    ) -> bool:
        """One turn, as a whole or not at all. `records`: new ones, and those whose outcome is known now. Not at all, and
        False, where somebody else has written another desired state than `before`, on which the turn rests."""

        async def write(redis: Any) -> bool:
            async with redis.pipeline(transaction=True) as pipe:
                if desired is not None and before is not None:
                    await pipe.watch(self._keys.desired)
                    raw = await pipe.get(self._keys.desired)
                    there = None if raw is None else decode_desired(raw)
                    if there is not None and there.pools != before.pools:
                        return False
                    pipe.multi()
                pipe.set(self._keys.scaling_now, _encoded(now), ex=NOW_SECONDS)
                for one in records:
                    pipe.hset(self._keys.scaling_decisions, str(one.number), _encoded(one))
                    pipe.hdel(self._keys.scaling_decisions, str(one.number - KEPT))
                if arrivals is not None:
                    pipe.set(self._keys.scaling_arrivals, _encoded(arrivals))
                if desired is not None:
                    pipe.set(self._keys.desired, encode_desired(desired))
                try:
                    await pipe.execute()
                except WatchError:
                    return False
                except ResponseError as error:
                    if "WRONGTYPE" in str(error):  # the one key of ours that a SET does not write anew
                        await redis.delete(self._keys.scaling_decisions)
                    raise
            return True

        return await self._store.call(write)


def _encoded(value: object) -> str:
    return json.dumps(codec.encode(value), separators=(",", ":"))


def _decoded(kind: type[T], raw: bytes | None) -> T | None:
    if raw is None:
        return None
    try:
        return codec.decode(kind, json.loads(raw))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
