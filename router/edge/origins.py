"""Web pages of other origins: whether a browser lets them ask this router, and read what it answers.

A browser asks first (a preflight, OPTIONS without a key), and shows a page the answer only if the server allows the
page's origin. Where none is configured the preflight is refused like any unknown method, and so is the page.
"""

from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from router.edge.validate import ID_HEADER, REVISION_HEADER, TRACE_HEADER

API = "/v1/"
SHOWN_TO_PAGES = (ID_HEADER, REVISION_HEADER, TRACE_HEADER, "retry-after", "x-should-retry")


def open_to(origins: Sequence[str], app: ASGIApp) -> ASGIApp:
    """The app, whose API pages of these origins may ask too. A key is theirs to send: cookies mean nothing here, and a
    browser adds none. What operators and probes ask is for no page."""
    if not origins:
        return app
    opened = CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=("GET", "POST"),
        allow_headers=("*",),
        expose_headers=SHOWN_TO_PAGES,
    )

    async def by_path(scope: Scope, receive: Receive, send: Send) -> None:
        is_api = scope["type"] == "http" and scope["path"].startswith(API)
        await (opened if is_api else app)(scope, receive, send)

    return by_path
