"""A few HTTP routes at a port, while a block lasts."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.routing import BaseRoute

from router.edge.connections import HttpServer, http_config, listen

KEEP_ALIVE_SECONDS = 5
CLOSE_SECONDS = 1


@asynccontextmanager
async def serving(routes: Sequence[BaseRoute], host: str, port: int, key: str) -> AsyncIterator[int]:
    """Answers at the port that it yields; 0 takes any free one. ConfigError, which names `key`, when it is taken."""
    listener = listen(host, port, key)
    server = HttpServer(http_config(Starlette(routes=routes), KEEP_ALIVE_SECONDS, CLOSE_SECONDS))
    running = asyncio.create_task(server.serve([listener]))
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        await running
        listener.close()
