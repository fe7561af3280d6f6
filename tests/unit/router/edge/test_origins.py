"""Pages in a browser: none of another origin may ask, but those that are configured."""

from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp

from headrace.clock import ManualClock
from headrace.config import RouterConfig
from headrace.errors import WorkerLost
from router.edge.openai import OpenAi
from router.edge.origins import open_to
from tests.unit.router.edge.edges import ANSWER, CHAT, events
from tests.unit.router.scripted import Scripted, make_edge

PAGE, OTHER = "https://chat.example.org", "https://other.example.org"
PREFLIGHT = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-lang",
}


def browser(core: Scripted, clock: ManualClock, *origins: str, page: str = PAGE) -> httpx.AsyncClient:
    app: ASGIApp = OpenAi(make_edge(core.text, core, clock=clock, api_keys=["key"]), 10_000, lambda: 0.0).app()
    transport = httpx.ASGITransport(open_to(origins, app), raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://router", headers={"origin": page})


async def post(client: httpx.AsyncClient, key: str = "key", **change: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    return await client.post("/v1/chat/completions", json={**CHAT, **change}, headers=headers)


def allowed(response: httpx.Response) -> str | None:
    return response.headers.get("access-control-allow-origin")


async def test_no_page_of_another_origin_may_ask_unless_it_is_allowed(core: Scripted, clock: ManualClock) -> None:
    async with browser(core, clock) as client:
        asked = await client.options("/v1/chat/completions", headers=PREFLIGHT)
        assert asked.status_code == 401
        assert allowed(asked) is allowed(await post(client)) is None


@pytest.mark.parametrize("origins", [(PAGE,), ("*",), (OTHER, PAGE)])
async def test_a_page_that_is_allowed_asks_with_its_key_and_reads_the_answer(
    core: Scripted, clock: ManualClock, origins: tuple[str, ...]
) -> None:
    async with browser(core, clock, *origins) as client:
        asked = await client.options("/v1/chat/completions", headers=PREFLIGHT)
        assert (asked.status_code, allowed(asked) in (PAGE, "*")) == (200, True)
        assert "POST" in asked.headers["access-control-allow-methods"]
        assert "authorization" in asked.headers["access-control-allow-headers"]
        assert "access-control-allow-credentials" not in asked.headers
        whole, stream = await post(client), await post(client, stream=True)
    for answer in (whole, stream):
        assert allowed(answer) in (PAGE, "*")
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
    assert whole.json()["choices"][0]["message"]["content"] == ANSWER
    assert events(stream)[-1] == "[DONE]"


async def test_a_page_that_is_not_among_those_allowed_is_refused(core: Scripted, clock: ManualClock) -> None:
    async with browser(core, clock, PAGE, page=OTHER) as client:
        asked = await client.options("/v1/chat/completions", headers=PREFLIGHT)
        assert (asked.status_code, allowed(asked)) == (400, None)
        assert allowed(await post(client)) is None


async def test_a_page_reads_why_it_was_refused_and_what_failed(core: Scripted, clock: ManualClock) -> None:
    async with browser(core, clock, PAGE) as client:
        refused, wrong = await post(client, key="no key"), await post(client, max_tokens=0)
        core.error = WorkerLost("the worker is gone")
        failed = await post(client)
        core.error = KeyError("unforeseen")  # type: ignore[assignment]
        unforeseen = await post(client)
    answers = (refused, wrong, failed, unforeseen)
    assert [answer.status_code for answer in answers] == [401, 400, 503, 500]
    assert [allowed(answer) for answer in answers] == [PAGE] * 4


@pytest.mark.parametrize("path", ["/metrics", "/health", "/ready", "/requests", "/why/x"])
async def test_what_operators_ask_is_for_no_page(core: Scripted, clock: ManualClock, path: str) -> None:
    async with browser(core, clock, "*") as client:
        asked = await client.options(path, headers={"access-control-request-method": "GET"})
        assert asked.status_code == 405
        assert allowed(asked) is allowed(await client.get(path)) is None


@pytest.mark.parametrize("origin", ["*", PAGE, "http://localhost:3000", "tauri://localhost", "https://[::1]:8080"])
def test_an_origin_is_as_a_browser_says_it(origin: str) -> None:
    assert RouterConfig.model_validate({"allowed_origins": [origin]}).allowed_origins == (origin,)


@pytest.mark.parametrize(
    "origin", ["chat.example.org", PAGE + "/", PAGE + "/chat", "https://*.example.org", "https://Chat.example.org", ""]
)
def test_an_origin_that_no_browser_says_is_refused(origin: str) -> None:
    with pytest.raises(ValueError, match=r"allowed_origins\.0"):
        RouterConfig.model_validate({"allowed_origins": [origin]})
