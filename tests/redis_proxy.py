"""A TCP proxy before Redis, for faults that lie on the way to it: slow, and failed over to another server."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class RedisProxy:
    """Every chunk of an answer waits for `delay_seconds`; new connections go to `port`. Owns its connections."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.delay_seconds = 0.0
        self.url = ""
        self._pipes: set[asyncio.Task[None]] = set()

    def fail_over(self, port: int) -> None:
        """Whoever is connected is cut off, and finds another server behind the same address."""
        self.port = port
        self.cut()

    def cut(self) -> None:
        for pipe in self._pipes:
            pipe.cancel()

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._pipes.add(task)
        try:
            upstream_reader, upstream_writer = await asyncio.open_connection("127.0.0.1", self.port)
            try:
                async with asyncio.TaskGroup() as ways:
                    ways.create_task(self._pass(reader, upstream_writer, slow=False))
                    ways.create_task(self._pass(upstream_reader, writer, slow=True))
            finally:
                upstream_writer.close()
        except* (OSError, asyncio.IncompleteReadError):
            pass
        except* asyncio.CancelledError:
            pass
        finally:
            self._pipes.discard(task)
            writer.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, slow: bool) -> None:
        while chunk := await reader.read(2**16):
            if slow and self.delay_seconds:
                await asyncio.sleep(self.delay_seconds)
            writer.write(chunk)
            await writer.drain()
        raise ConnectionResetError("the other end closed")


@asynccontextmanager
async def a_redis_proxy(port: int) -> AsyncIterator[RedisProxy]:
    proxy = RedisProxy(port)
    server = await asyncio.start_server(proxy.connected, "127.0.0.1", 0)
    proxy.url = f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"
    try:
        yield proxy
    finally:
        server.close()
        proxy.cut()
        if proxy._pipes:
            await asyncio.wait(proxy._pipes)
