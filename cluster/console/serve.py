"""The page, its stream of scenes, and why a request ran where it ran. Under /console/; nothing here changes anything."""

import asyncio
import json
import pathlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager
from hashlib import blake2b
from typing import Any, Protocol

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from cluster.console.guard import HEADERS, Admitted, Guard
from headrace.errors import Unavailable

PATH = "/console/"
PAGE = pathlib.Path(__file__).parent / "page"
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
MAX_WHYS = 4  # asked of routers at once
Handler = Callable[[Request], Awaitable[Response]]


class Watched(Protocol):
    """What a console shows: cluster.console.watcher.Watcher, or a recording."""

    @property
    def scene(self) -> bytes: ...
    @property
    def is_full(self) -> bool: ...
    def watching(self) -> AbstractContextManager[None]: ...
    def end(self) -> None: ...
    def history(self) -> dict[str, Any]: ...
    def scenes(self) -> AsyncIterator[bytes]: ...
    async def why(self, router_id: str, request_id: str, /) -> tuple[int, bytes]: ...


class Console:
    """Owns nothing but the files of the page, read once."""

    def __init__(self, watcher: Watched, guard: Guard) -> None:
        self._watcher = watcher
        self._guard = guard
        self._files = {file.name: file.read_bytes() for file in PAGE.iterdir() if file.suffix in KINDS}
        self._whys = asyncio.Semaphore(MAX_WHYS)

    def routes(self) -> list[Route]:
        return [
            Route("/", self._to_page),
            Route(PATH.rstrip("/"), self._to_page),
            Route(PATH, self._page),
            Route(f"{PATH}scene", self._guarded(self._scene)),
            Route(f"{PATH}stream", self._guarded(self._stream)),
            Route(f"{PATH}why/{{router}}/{{request_id:path}}", self._guarded(self._why)),
            Route(f"{PATH}{{name}}", self._page),
        ]

    def close(self) -> None:
        """Streams end; before the server does, which would wait for them."""
        self._watcher.end()

    async def _to_page(self, request: Request) -> Response:
        return RedirectResponse(PATH, 307, HEADERS)

    async def _page(self, request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        body = self._files.get(name)
        if body is None:
            raise HTTPException(404)
        tag = f'"{blake2b(body, digest_size=12).hexdigest()}"'
        headers = {**HEADERS, "etag": tag, "cache-control": "no-cache"}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(body, media_type=KINDS[pathlib.PurePath(name).suffix], headers=headers)

    async def _scene(self, request: Request) -> Response:
        return Response(self._watcher.scene, media_type="application/json", headers=_FRESH)

    async def _stream(self, request: Request) -> Response:
        """Server-Sent Events: the history, then a scene a second."""
        if self._watcher.is_full:
            return JSONResponse({"error": "as many watch already as may"}, 503, _FRESH)
        return StreamingResponse(self._events(), media_type="text/event-stream", headers=_FRESH)

    async def _events(self) -> AsyncIterator[bytes]:
        with self._watcher.watching():
            yield _event("history", json.dumps(self._watcher.history(), separators=(",", ":")).encode())
            async for scene in self._watcher.scenes():
                yield _event("scene", scene)

    async def _why(self, request: Request) -> Response:
        """What that router says."""
        async with self._whys:
            try:
                status, body = await self._watcher.why(request.path_params["router"], request.path_params["request_id"])
            except Unavailable as error:
                return JSONResponse({"error": f"the router: {error.message}"}, 502, _FRESH)
        if status != 200:
            missing = "the router does not remember this request any more"
            why = missing if status == 404 else f"the router answered with status {status}"
            return JSONResponse({"error": why}, 404 if status == 404 else 502, _FRESH)
        return Response(body, media_type="application/json", headers=_FRESH)

    def _guarded(self, handler: Handler) -> Handler:
        async def guarded(request: Request) -> Response:
            peer = request.client.host if request.client is not None else ""
            headers = request.headers
            answer = self._guard.admit(headers.get("authorization"), peer, headers.get("host", ""))
            if isinstance(answer, Admitted):
                return await handler(request)
            return JSONResponse({"error": answer.why}, answer.status, _FRESH)

        return guarded


_FRESH = {**HEADERS, "cache-control": "no-store"}


def _event(kind: str, data: bytes) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"
