"""An ASGI application on a port of its own, in the test's process."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn

from router.edge.connections import HttpServer


@asynccontextmanager
async def serving(app: Any) -> AsyncIterator[str]:
    """The URL where it answers."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = HttpServer(uvicorn.Config(app, ws="none", lifespan="off", log_config=None, access_log=False))
    running = asyncio.create_task(server.serve([listener]))
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await running
        listener.close()
