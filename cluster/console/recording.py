"""A scene that was saved, shown again: of an incident, or of a cluster that was simulated."""

import asyncio
import gzip
import json
import pathlib
import time
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

from headrace.errors import ConfigError


class Recording:
    """cluster.console.serve.Watched that never changes: {"scene": …, "history": …}, as the page saves it."""

    is_full = False

    def __init__(self, recording: dict[str, Any]) -> None:
        scene: dict[str, Any] = recording["scene"]
        cluster = scene["cluster"]
        at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(scene["at"]))
        note = cluster.get("recorded") or f"Recorded at {at}: nothing here is live."
        self.scene = json.dumps({**scene, "cluster": {**cluster, "recorded": note}}, separators=(",", ":")).encode()
        self._history: dict[str, Any] = recording["history"]
        self._over = asyncio.Event()

    def end(self) -> None:
        self._over.set()

    @contextmanager
    def watching(self) -> Iterator[None]:
        yield

    def history(self) -> dict[str, Any]:
        return self._history

    async def scenes(self) -> AsyncIterator[bytes]:
        yield self.scene
        await self._over.wait()

    async def why(self, router_id: str, request_id: str) -> tuple[int, bytes]:
        """Nobody is there to be asked."""
        return 404, b""


def read_recording(path: pathlib.Path) -> Recording:
    """Plain or gzip. ConfigError when it is not what a console saved."""
    try:
        data = path.read_bytes()
        recording = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
        return Recording(recording)
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ConfigError(f"{path} is no recording of a console: {error!r}", key="--recorded", value=path) from error
