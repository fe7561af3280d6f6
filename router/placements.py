"""What routers place, told to each other at once (ADR 12).

Between a placement and the event of its blocks lie a queue and a prefill; a copy that knows nothing of them places the next
prompt that begins alike somewhere else, where it is computed again. So each router appends to one stream which blocks its
placements will bring where, and expects what others say there, for as long as they said. It is a hint like all of the
index: what is lost, late or wrong costs a prefill, and nothing waits for any of it.
"""

import asyncio
import logging
import struct
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from redis.exceptions import RedisError

from headrace.errors import ConfigError, Unavailable
from headrace.keys import Keys
from router.decisions.told import Brought, Told
from router.follow import Store

log = logging.getLogger(__name__)
T = TypeVar("T")

MAX_KEYS = 1024  # of a placement: what is behind them is hardly asked for again meanwhile
MAX_WAITING = 1024
STREAM_ENTRIES = 1024
STREAM_SECONDS = 60
MAX_SECONDS = 600.0  # for which a placement is believed, whoever tells of it
READ_SECONDS = 1.0
READ_COUNT = 256
HEARD_AT_ONCE = 16  # of long prompts 4 ms; then the streams have their turn
RETRY_SECONDS = 0.5


class Placements:
    """Owns what is still to be told, and how far was heard. `hear` is called with each placement of another router."""

    def __init__(self, store: Store, keys: Keys, router_id: str, hear: Callable[[Told], None]) -> None:
        self._store = store
        self._key = keys.placements
        self._router_id = router_id
        self._hear = hear
        self._waiting: deque[Told] = deque(maxlen=MAX_WAITING)
        self._filled = asyncio.Event()
        self._position = b""
        self._failing = False

    def tell(self, told: Told) -> None:
        """Tells the others, soon."""
        if told.keys or told.load is not None:
            self._waiting.append(told)
            self._filled.set()

    async def run(self) -> None:
        """Until cancelled. What Redis does not take is dropped, and after a failure only what is new is heard."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._tell_all(), name="placements told")
            group.create_task(self._hear_all(), name="placements heard")

    async def _tell_all(self) -> None:
        while True:
            await self._filled.wait()
            self._filled.clear()
            waiting = tuple(self._waiting)
            self._waiting.clear()
            await self._try(partial(self._append, waiting=waiting))

    async def _hear_all(self) -> None:
        while True:
            entries = await self._try(self._read, wait_seconds=READ_SECONDS)
            if entries is None:
                self._position = b""
                await asyncio.sleep(RETRY_SECONDS)
                continue
            for number, (entry, fields) in enumerate(entries, 1):
                if not number % HEARD_AT_ONCE:
                    await asyncio.sleep(0)
                self._position = entry
                told = _told(entry, fields)
                if told is not None and fields[b"by"] != self._router_id.encode():
                    self._hear(told)

    async def _try(self, operation: Callable[[Any], Awaitable[T]], *, wait_seconds: float = 0.0) -> T | None:
        """None where it failed."""
        try:
            result = await self._store.call(operation, wait_seconds=wait_seconds)
        except (Unavailable, RedisError, ConfigError) as error:
            if not self._failing:
                log.warning("routers do not hear of each other's placements just now: %s", error)
            self._failing = True
            return None
        self._failing = False
        return result

    async def _append(self, redis: Any, waiting: Sequence[Told]) -> None:
        async with redis.pipeline(transaction=False) as pipe:
            for told in waiting:
                pipe.xadd(self._key, _fields(self._router_id, told), maxlen=STREAM_ENTRIES, approximate=True)
            pipe.expire(self._key, STREAM_SECONDS)
            await pipe.execute()

    async def _read(self, redis: Any) -> list[tuple[bytes, dict[bytes, bytes]]]:
        if not self._position:
            last = await redis.xrevrange(self._key, count=1)
            self._position = last[0][0] if last else b"0-0"
        block = int(READ_SECONDS * 1000)
        found = await redis.xread({self._key: self._position}, count=READ_COUNT, block=block)
        return [entry for _, entries in found or () for entry in entries]


def _fields(router_id: str, told: Told) -> dict[str, str | bytes | int]:
    keys = told.keys[:MAX_KEYS]
    packed = struct.pack(f"<{len(keys)}Q", *keys)
    fields: dict[str, str | bytes | int] = {
        "by": router_id,
        "to": told.worker_id,
        "ms": int(told.seconds * 1000),
        "keys": packed,
    }
    if told.load is not None:
        load = told.load
        fields |= {"at": load.decode, "load": f"{load.num_prompt_tokens} {load.prefill_tokens} {load.n}"}
    return fields


def _told(entry: bytes, fields: dict[bytes, bytes]) -> Told | None:
    """None where it is nothing that a router of this version wrote."""
    try:
        packed, milliseconds = fields[b"keys"], int(fields[b"ms"])
        keys = struct.unpack(f"<{min(len(packed) // 8, MAX_KEYS)}Q", packed[: 8 * MAX_KEYS])
        seconds = min(milliseconds, 1000 * MAX_SECONDS) / 1000
        name = f"{fields[b'by'].decode()} {entry.decode()}"
        return Told(name, fields[b"to"].decode(), keys, seconds, _load(fields))
    except (KeyError, ValueError, OverflowError, struct.error):
        return None


def _load(fields: dict[bytes, bytes]) -> Brought | None:
    """None where a router of another version says none that is understood: its blocks are expected all the same."""
    try:
        num_prompt_tokens, prefill_tokens, n = map(int, fields[b"load"].split())
        return Brought(fields[b"at"].decode(), num_prompt_tokens, prefill_tokens, n)
    except (KeyError, ValueError):
        return None
