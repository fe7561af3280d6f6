"""What the controller tells this router of revisions, read twice a second. Nothing on the way of a request waits for it;
a router that cannot read it goes on as `decisions.revisions` says."""

import asyncio
import logging

from redis.exceptions import RedisError

from headrace.clock import Clock
from headrace.errors import ConfigError, Unavailable
from headrace.keys import Keys
from headrace.revisions import Split, decode_split
from router.decisions.revisions import Revisions
from router.follow import Store

log = logging.getLogger(__name__)

READ_SECONDS = 0.5


class ToldRevisions:
    """Tells `revisions` what stands under the key, until its run() is cancelled."""

    def __init__(self, store: Store, keys: Keys, revisions: Revisions, clock: Clock) -> None:
        self._store = store
        self._keys = keys
        self._revisions = revisions
        self._clock = clock

    async def run(self) -> None:
        while True:
            await self.read()
            await asyncio.sleep(READ_SECONDS)

    async def read(self) -> None:
        """One that is lost takes nothing back: it stays as it was told, and is believed for as long as the controller is
        known to turn."""
        try:
            raw = await self._store.call(lambda redis: redis.get(self._keys.revisions))
        except (Unavailable, RedisError, ConfigError):
            return
        split = decode_split(raw) if raw is not None else None
        if split is None:
            return
        before = self._revisions.split
        if (split.number, split.base, split.canary, split.percent) != _but_beat(before):
            log.info("revisions: %s serves, canary %s has %g %%", split.base, split.canary or "-", split.percent)
        self._revisions.told(split, self._clock.now())


def _but_beat(split: Split) -> tuple[int, str, str, float]:
    return split.number, split.base, split.canary, split.percent
