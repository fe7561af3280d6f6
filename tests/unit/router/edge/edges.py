"""Both edges over a scripted core, as clients reach them, and what clients ask."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from headrace.clock import ManualClock
from router.edge.grpc_api import add_services, open_server
from router.edge.openai import OpenAi
from tests.unit.router.scripted import Scripted, make_edge

ANSWER = "The quick brown fox"
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 40}
COMPLETION = {"model": "tiny", "prompt": "hi", "max_tokens": 40}


def client_of(core: Scripted, clock: ManualClock, max_body_bytes: int = 10_000, **edge: Any) -> httpx.AsyncClient:
    app = OpenAi(make_edge(core.text, core, clock=clock, **edge), max_body_bytes, lambda: 1_700_000_000.0).app()
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router")


def events(response: httpx.Response) -> list[Any]:
    lines = response.text.split("\n\n")
    assert lines.pop() == ""
    assert all(line.startswith("data: ") for line in lines)
    return [line[6:] if line == "data: [DONE]" else json.loads(line[6:]) for line in lines]


MESSAGES = [{"role": "user", "content": "hi"}]


@asynccontextmanager
async def serving(core: Scripted, **edge: Any) -> AsyncIterator[str]:
    server, port = open_server("127.0.0.1", 0, 2**20)
    add_services(server, make_edge(core.text, core, clock=ManualClock(), **edge))
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def collected(parts: AsyncIterator[object]) -> list[object]:
    return [part async for part in parts]
