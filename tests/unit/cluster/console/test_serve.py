"""The page over HTTP: what it sends along, whom it lets in, and what it asks of routers."""

import gzip
import json
import pathlib
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import httpx
import pytest

from cluster.console.guard import HEADERS
from cluster.console.recording import read_recording
from cluster.console.serve import PAGE, PATH
from cluster.console.start import replayed, served
from headrace.config import ClusterConfig, PoolConfig, RouterConfig
from headrace.errors import ConfigError
from router.text.vocabulary import Text
from tests.unit.cluster.console.looks import recent, routed
from tests.unit.cluster.console.world import HOST, listed, world

OPERATOR = {"Authorization": "Bearer operator"}


@asynccontextmanager
async def console(redis_url: str, *keys: str) -> AsyncIterator[tuple[httpx.AsyncClient, ClusterConfig]]:
    config = ClusterConfig(
        name=f"c{uuid.uuid4().hex[:8]}",
        model="m",
        pools={"decode": PoolConfig(role="decode")},
        router=RouterConfig(api_keys=keys),
    )
    async with served(config, redis_url, HOST, 0) as url, httpx.AsyncClient(base_url=url, trust_env=False) as client:
        yield client, config


async def test_every_file_of_the_page_is_served_under_a_policy_that_allows_nothing_else(redis_url: str) -> None:
    async with console(redis_url) as (client, _):
        for name in ("", *(file.name for file in PAGE.iterdir())):
            answer = await client.get(name)
            assert answer.status_code == 200
            assert answer.headers["content-security-policy"] == HEADERS["content-security-policy"]
            assert (await client.get(name, headers={"if-none-match": answer.headers["etag"]})).status_code == 304
        assert (await client.get("../serve.py")).status_code == 404
        assert (await client.get("%2e%2e/serve.py")).status_code == 404
        moved = await client.get(str(client.base_url.copy_with(path="/")))
        assert (moved.status_code, moved.headers["location"]) == (307, PATH)


def test_the_page_asks_nobody_else_for_anything() -> None:
    """No CDN, no font, no script of others: no address but its own and the namespace of SVG."""
    for file in PAGE.iterdir():
        text = file.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert "http:" not in text, file.name
        assert "https:" not in text, file.name
        for unsafe in ("innerHTML", "insertAdjacentHTML", "document.write", "eval(", "style="):
            assert unsafe not in text, (file.name, unsafe)


async def test_without_keys_a_name_that_is_not_this_machine_s_is_refused(redis_url: str) -> None:
    async with console(redis_url) as (client, _):
        assert (await client.get("scene")).status_code == 200
        refused = await client.get("scene", headers={"host": "rebound.example"})
        assert refused.status_code == 403
        assert "this machine alone" in refused.json()["error"]


@pytest.mark.parametrize("path", ["scene", "stream", "why/r/a"])
async def test_with_keys_nothing_of_the_cluster_is_said_without_one(redis_url: str, path: str) -> None:
    async with console(redis_url, "operator") as (client, _):
        assert (await client.get("")).status_code == 200
        assert (await client.get(path)).status_code == 401
        assert (await client.get("scene", headers=OPERATOR)).status_code == 200


async def test_the_stream_begins_with_the_history(redis_url: str) -> None:
    async with console(redis_url) as (client, _), client.stream("GET", "stream") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line async for line in _first(answer, 5)]
    assert lines[0] == "event: history"
    assert set(json.loads(lines[1].removeprefix("data: "))) == {"recent", "day"}
    assert lines[3] == "event: scene"


async def _first(answer: httpx.Response, number: int) -> AsyncIterator[str]:
    async for line in answer.aiter_lines():
        yield line
        number -= 1
        if not number:
            return


async def test_why_is_asked_of_a_router_that_reports_and_of_nobody_else(redis_url: str, tiny: Text) -> None:
    outline = replace(recent("a/b").outline, request_id="a/b")
    async with console(redis_url, "operator") as (client, config), world(config, redis_url) as there:
        client.headers.update(OPERATOR)
        async with listed(tiny, {"a/b": outline}, api_keys=("operator",)) as address:
            await there.report(replace(routed("r1"), http_address=address))
            while not json.loads((await client.get("scene")).content).get("routers"):
                async with client.stream("GET", "stream") as answer:
                    assert [line async for line in _first(answer, 8)]
            assert (await client.get("why/r1/a%2Fb")).json()["request_id"] == "a/b"
            forgotten = await client.get("why/r1/other")
            assert (forgotten.status_code, forgotten.json()["error"]) == (
                404,
                "the router does not remember this request any more",
            )
            assert (await client.get("why/127.0.0.1:80/a")).status_code == 404
        lost = await client.get("why/r1/a%2Fb")
        assert lost.status_code == 502
        assert "does not answer" in lost.json()["error"]


async def test_what_was_saved_is_shown_again_and_said_to_be_recorded(tmp_path: pathlib.Path) -> None:
    saved = {"scene": {"at": 1_700_000_000.0, "cluster": {"name": "c"}}, "history": {"recent": None}}
    plain, packed, wrong = (tmp_path / name for name in ("a.json", "a.json.gz", "b.json"))
    plain.write_text(json.dumps(saved), encoding="utf-8")
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    for file in (plain, packed):
        async with replayed(read_recording(file), HOST, 0) as url, httpx.AsyncClient(base_url=url) as client:
            shown = (await client.get("scene")).json()["cluster"]["recorded"]
            assert shown == "Recorded at 2023-11-14 22:13:20 UTC: nothing here is live."
            assert (await client.get("why/r/a")).status_code == 404
    cut, late = packed.read_bytes()[:-9], b'{"scene": {"at": 1e30, "cluster": {}}, "history": {}}'
    for content in (b"", b"[]", b"{}", b'{"scene": {"at": "x", "cluster": {}}}', cut, late):
        wrong.write_bytes(content)
        with pytest.raises(ConfigError, match="no recording of a console"):
            read_recording(wrong)
