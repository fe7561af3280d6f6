"""What this router says of its traffic to Redis, every second (headrace.reports).

The key has a TTL, so that a router that is gone is soon forgotten. Nothing on the way of a request waits for any of this,
and a round that Redis does not take is left out: the next one says more.
"""

import asyncio
import contextlib
import ipaddress
import logging
import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from redis.exceptions import RedisError

from headrace.errors import ConfigError, Unavailable
from headrace.keys import Keys
from headrace.reports import RouterReport, encode_report
from router.follow import Store

log = logging.getLogger(__name__)

REPORT_SECONDS = 1.0
KEEP_SECONDS = 10
ENDED_SECONDS = 2 * 3600  # longer than anybody who fell silent is missed for


class Reports:
    """Writes what `report` says, until its run() is cancelled; then that this router ended in order."""

    def __init__(self, store: Store, keys: Keys, report: Callable[[], RouterReport], http_address: str) -> None:
        self._store = store
        self._keys = keys
        self._report = report
        self._http_address = http_address
        self._failing = False

    async def run(self) -> None:
        try:
            while True:
                await self.write()
                await asyncio.sleep(REPORT_SECONDS)
        finally:
            await self._end()

    async def _end(self) -> None:
        """A report is seen at looks that are further apart than a drain may last: the last one seen had requests in
        flight."""
        key, router_id = self._keys.ended_routers, self._report().router_id

        async def note(redis: Any) -> None:
            await redis.sadd(key, router_id)
            await redis.expire(key, ENDED_SECONDS)

        with contextlib.suppress(Unavailable, RedisError, ConfigError):  # it is missed for a while, and no more
            await self._store.call(note)

    async def write(self) -> None:
        report = replace(self._report(), http_address=self._http_address)
        key, value = self._keys.router(report.router_id), encode_report(report)
        try:
            await self._store.call(lambda redis: redis.set(key, value, ex=KEEP_SECONDS))
            self._failing = False
        except (Unavailable, RedisError, ConfigError) as error:
            if not self._failing:
                log.warning("this router's reports do not reach Redis: %s", error)
            self._failing = True


def reachable(host: str, port: int) -> str:
    """host:port by which others reach what listens on `host`: of one that stands for all addresses, this host's own."""
    if host in ("0.0.0.0", "::", ""):
        host = _own_address(socket.AF_INET6 if host == "::" else socket.AF_INET)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _own_address(family: socket.AddressFamily) -> str:
    """What this host's name stands for, where that is no loopback address."""
    try:
        found = [str(entry[4][0]) for entry in socket.getaddrinfo(socket.gethostname(), None, family)]
    except OSError:
        found = []
    loopback = "::1" if family == socket.AF_INET6 else "127.0.0.1"
    return next((address for address in found if not ipaddress.ip_address(address).is_loopback), loopback)
