"""A router that starts beside others is ready once it has read what caches hold.

Until then it would place by load alone what the others place by cache: a rolling update would cost hits. Where it is the
only one, it serves at once.
"""

import logging
from typing import Any, Protocol

from redis.exceptions import RedisError

from headrace.clock import Clock
from headrace.errors import ConfigError, Unavailable
from headrace.keys import Keys
from router.follow import Store

log = logging.getLogger(__name__)

MAX_SECONDS = 5.0  # then it serves with what it has


class Followed(Protocol):
    num_scans: int


class CatchingUp:
    """Whether this router is still to be spared. `run` asks Redis once who else is there; until that is known there may be
    others, and where it is not said nobody is."""

    def __init__(self, store: Store, keys: Keys, router_id: str, followed: Followed, clock: Clock) -> None:
        self._store = store
        self._keys = keys
        self._router_id = router_id
        self._followed = followed
        self._clock = clock
        self._until = clock.now() + MAX_SECONDS
        self._others = True

    async def run(self) -> None:
        try:
            names = await self._store.call(self._routers)
            self._others = bool(names - {self._keys.router(self._router_id)})
        except (Unavailable, RedisError, ConfigError) as error:
            log.info("whether other routers serve is not known: %s", error)
            self._others = False

    def why(self) -> str | None:
        """What it still waits for."""
        if not self._others or self._followed.num_scans or self._clock.now() >= self._until:
            return None
        return "the index is being read, and other routers serve"

    async def _routers(self, redis: Any) -> set[str]:
        return {name.decode() async for name in redis.scan_iter(match=self._keys.router_pattern, count=1000)}
