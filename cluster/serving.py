"""A few HTTP routes at a port, while a block lasts."""

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import uvicorn
from starlette.applications import Starlette
from starlette.routing import BaseRoute

from headrace.errors import ConfigError
from router.edge.connections import BoundedHttp, HttpServer

CLOSE_SECONDS = 1


@asynccontextmanager
async def serving(routes: Sequence[BaseRoute], host: str, port: int, key: str) -> AsyncIterator[int]:
    """Answers at the port that it yields; 0 takes any free one. ConfigError, which names `key`, when it is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        why = f"{key}: cannot listen on {host}:{port}: {error.strerror}"
        raise ConfigError(why, key=key, value=port) from error
    server = HttpServer(
        uvicorn.Config(
            Starlette(routes=routes),
            http=BoundedHttp,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=CLOSE_SECONDS,
        )
    )
    running = asyncio.create_task(server.serve([listener]))
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        await running
        listener.close()
