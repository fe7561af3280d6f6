"""A router process between real clients (the openai SDK, raw sockets, our own) and a worker that a test plays. Tests that
end neither share both."""

import asyncio
import pathlib
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2
from starlette.applications import Starlette

from headrace.client import AsyncClient
from headrace.config import RouterConfig
from headrace.errors import ModelNotFound, Unavailable
from headrace.values import Request
from router.edge.connections import http_config
from router.text.vocabulary import Text
from tests.e2e.routers import (
    RunningRouter,
    null_info,
    running_router,
    say,
    sdk_of,
    soon,
    tiny_checkpoint,
    until_health,
    write_config,
)
from tests.null_worker import NullWorker

pytestmark = pytest.mark.asyncio(loop_scope="module")
ANSWER = "The quick brown fox"
PAGE = "https://chat.example.org"
MESSAGES: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def words(checkpoint: pathlib.Path) -> Text:
    return Text.load(checkpoint)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def worker(checkpoint: pathlib.Path) -> AsyncIterator[NullWorker]:
    async with NullWorker(null_info(checkpoint)) as worker:
        yield worker


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def router(
    checkpoint: pathlib.Path, tmp_path_factory: pytest.TempPathFactory, worker: NullWorker
) -> AsyncIterator[RunningRouter]:
    folder = tmp_path_factory.mktemp("router")
    async with before(checkpoint, folder, worker, allowed_origins=[PAGE]) as router:
        yield router


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sdk(router: RunningRouter) -> AsyncIterator[openai.AsyncOpenAI]:
    async with sdk_of(router) as client:
        yield client


@asynccontextmanager
async def before(
    checkpoint: pathlib.Path, folder: pathlib.Path, worker: NullWorker, **options: object
) -> AsyncIterator[RunningRouter]:
    """A router of this worker alone, which serves."""
    async with running_router(checkpoint, folder / "headrace.yaml", [worker.address], **options) as router:
        await until_health(router, health_pb2.HealthCheckResponse.SERVING)
        yield router


async def test_the_sdk_gets_a_whole_answer_and_a_stream(
    sdk: openai.AsyncOpenAI, worker: NullWorker, words: Text
) -> None:
    token_ids = words.encode(ANSWER)
    whole = asyncio.ensure_future(sdk.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0))
    request = await soon(worker.submits.get())
    assert request.sampling.greedy
    say(worker, request.key, token_ids)
    answer = await soon(whole)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (ANSWER, "length")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.completion_tokens == len(token_ids)
    assert answer.usage.prompt_tokens_details.cached_tokens == 2

    creating = asyncio.ensure_future(
        sdk.chat.completions.create(
            model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
    )
    request = await soon(worker.submits.get())
    say(worker, request.key, token_ids)
    chunks = [chunk async for chunk in await soon(creating)]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == ANSWER
    assert chunks[-1].usage == answer.usage


async def test_the_sdk_lists_models_and_gets_completions(
    sdk: openai.AsyncOpenAI, worker: NullWorker, words: Text
) -> None:
    assert [model.id async for model in sdk.models.list()] == ["tiny"]
    creating = asyncio.ensure_future(sdk.completions.create(model="tiny", prompt="hi", max_tokens=40, logprobs=None))
    say(worker, (await soon(worker.submits.get())).key, words.encode(ANSWER))
    assert (await soon(creating)).choices[0].text == ANSWER


async def test_a_page_whose_origin_is_configured_may_ask(router: RunningRouter) -> None:
    async with httpx.AsyncClient(base_url=router.http, trust_env=False) as http:
        headers = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
        asked = [
            await http.options("/v1/chat/completions", headers={**headers, "origin": origin})
            for origin in (PAGE, "https://other.example.org")
        ]
    assert [(answer.status_code, answer.headers.get("access-control-allow-origin")) for answer in asked] == [
        (200, PAGE),
        (400, None),
    ]


async def test_the_sdk_raises_the_error_that_was_meant(sdk: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="model must be one of tiny"):
        await sdk.chat.completions.create(model="gpt", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError, match="max_tokens must be an integer of at least 1, got 0"):
        await sdk.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=0)
    with pytest.raises(openai.BadRequestError, match="maximum context length is 4096 tokens") as caught:
        await sdk.completions.create(model="tiny", prompt=[1] * 4097)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")


async def test_case_45_the_sdk_raises_when_the_worker_dies_mid_stream(
    checkpoint: pathlib.Path, tmp_path: pathlib.Path, words: Text
) -> None:
    async with (
        NullWorker(null_info(checkpoint)) as worker,
        before(checkpoint, tmp_path, worker) as router,
        sdk_of(router) as sdk,
    ):
        creating = asyncio.ensure_future(sdk.chat.completions.create(model="tiny", messages=MESSAGES, stream=True))
        request = await soon(worker.submits.get())
        say(worker, request.key, words.encode(ANSWER)[:5], end=False)
        stream = await soon(creating)
        await soon(anext(stream))
        await worker.die()

        async def drain() -> None:
            async for chunk in stream:
                assert chunk.choices[0].finish_reason is None

        with pytest.raises(openai.APIError):
            await soon(drain())


@pytest.mark.parametrize("stream", [True, False])
async def test_case_44_a_client_that_goes_away_cancels_its_request(
    router: RunningRouter, worker: NullWorker, words: Text, stream: bool
) -> None:
    async with httpx.AsyncClient(base_url=router.http, trust_env=False, timeout=30) as client:
        body = {"model": "tiny", "messages": MESSAGES, "stream": stream}

        async def ask() -> None:
            async with client.stream("POST", "/v1/chat/completions", json=body) as response:
                async for _ in response.aiter_raw():
                    started.set()

        started = asyncio.Event()
        asking = asyncio.ensure_future(ask())
        request = await soon(worker.submits.get())
        if stream:
            say(worker, request.key, words.encode(ANSWER)[:1], end=False)
            await soon(started.wait())
        asking.cancel()
        await asyncio.wait([asking])
    assert (await soon(worker.cancels.get())).request_id == request.key.request_id


async def test_case_44_a_client_that_goes_away_before_the_first_token_of_a_stream(
    router: RunningRouter, worker: NullWorker
) -> None:
    async with AsyncClient(router.grpc) as client:
        parts = client.generate("hi")
        asking = asyncio.ensure_future(anext(parts))
        request = await soon(worker.submits.get())
        asking.cancel()
        await asyncio.wait([asking])
    assert (await soon(worker.cancels.get())).request_id == request.key.request_id


async def test_case_48_bad_requests_leave_twenty_good_streams_alone(
    sdk: openai.AsyncOpenAI, worker: NullWorker, words: Text
) -> None:
    token_ids = words.encode(ANSWER)

    async def good() -> str:
        stream = await sdk.completions.create(model="tiny", prompt="hi", stream=True, max_tokens=len(token_ids))
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def bad(**change: Any) -> None:
        with pytest.raises(openai.BadRequestError):
            await sdk.completions.create(**{"model": "tiny", "prompt": "hi", "max_tokens": 3, **change})

    streams = [asyncio.ensure_future(good()) for _ in range(20)]
    requests: list[Request] = [await soon(worker.submits.get()) for _ in streams]
    for request in requests:
        say(worker, request.key, token_ids[:3], end=False)
    await soon(
        asyncio.gather(
            bad(logit_bias={"500": 1}),
            bad(logit_bias={"AI": -100}),
            bad(extra_body={"top_k": 0.01}),
            bad(temperature=1e9),
            bad(prompt=[999_999]),
            bad(stop=[""]),
            bad(stop=["x"] * 100_000),
        )
    )
    for request in requests:
        say(worker, request.key, token_ids[3:], start=3)
    assert await soon(asyncio.gather(*streams)) == [ANSWER] * 20


async def test_case_59_a_silent_worker_makes_the_router_unready_but_not_dead(
    checkpoint: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    async with (
        NullWorker(null_info(checkpoint)) as worker,
        before(checkpoint, tmp_path, worker, silent_seconds=1.0) as router,
        httpx.AsyncClient(base_url=router.http, trust_env=False, timeout=30) as client,
    ):
        worker.muted = True
        await until_health(router, health_pb2.HealthCheckResponse.NOT_SERVING)
        ready = await client.get("/ready")
        assert (ready.status_code, ready.text) == (503, "no worker that decodes is connected (0 connected in all)\n")
        assert (await client.get("/health")).status_code == 200


async def test_case_10_twenty_prompts_beyond_the_context_cost_the_next_one_nothing(
    sdk: openai.AsyncOpenAI, worker: NullWorker, words: Text
) -> None:
    for _ in range(20):
        with pytest.raises(openai.BadRequestError, match="maximum context length is 4096 tokens"):
            await sdk.completions.create(model="tiny", prompt=[5] * 4097)
    assert worker.submits.empty()
    creating = asyncio.ensure_future(sdk.completions.create(model="tiny", prompt="hi", max_tokens=40))
    say(worker, (await soon(worker.submits.get())).key, words.encode(ANSWER))
    assert (await soon(creating)).choices[0].text == ANSWER


async def test_case_57_a_thousand_unknown_models_leave_the_metrics_as_many_as_they_were(router: RunningRouter) -> None:
    async def num_series() -> int:
        lines = (await http.get("/metrics")).text.splitlines()
        return sum(not line.startswith("#") for line in lines)

    async def ask(name: str) -> None:
        answer = await http.post("/v1/completions", json={"model": name, "prompt": "hi"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
        with pytest.raises(ModelNotFound):
            await anext(ours.generate("hi", model=name))

    async with httpx.AsyncClient(base_url=router.http, trust_env=False) as http, AsyncClient(router.grpc) as ours:
        await ask("the first")
        before = await num_series()
        for number in range(500):
            await ask(f"unknown-{number}")
        assert await num_series() == before


async def test_case_60_sigterm_lets_live_streams_end_and_refuses_new_ones(
    checkpoint: pathlib.Path, tmp_path: pathlib.Path, worker: NullWorker, words: Text
) -> None:
    token_ids = words.encode(ANSWER)
    async with (
        before(checkpoint, tmp_path, worker) as router,
        sdk_of(router, max_retries=0) as sdk,
        AsyncClient(router.grpc, model="tiny") as ours,
    ):
        creating = asyncio.ensure_future(sdk.chat.completions.create(model="tiny", messages=MESSAGES, stream=True))
        http_request = await soon(worker.submits.get())
        say(worker, http_request.key, token_ids[:1], end=False)
        stream = await soon(creating)
        parts = ours.generate("hi")
        first = asyncio.ensure_future(anext(parts))
        grpc_request = await soon(worker.submits.get())
        say(worker, grpc_request.key, token_ids[:1], end=False)
        text = (await soon(first)).text

        router.terminate()
        await until_health(router, health_pb2.HealthCheckResponse.NOT_SERVING)
        with pytest.raises(openai.InternalServerError, match="shutting down"):
            await sdk.chat.completions.create(model="tiny", messages=MESSAGES)
        with pytest.raises(Unavailable, match="shutting down"):
            await anext(ours.generate("hi"))

        for request in (http_request, grpc_request):
            say(worker, request.key, token_ids[1:], start=1)
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER
        assert text + "".join([part.text async for part in parts]) == ANSWER
        assert await soon(router.process.wait()) == 0


async def test_case_50_an_idle_connection_is_kept_as_long_as_configured(
    checkpoint: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """The server keeps it between requests, and closes it at last: after keep_alive_seconds, 120 where none are given."""
    assert RouterConfig().keep_alive_seconds == http_config(Starlette(), 120, 2).timeout_keep_alive == 120
    async with running_router(checkpoint, tmp_path / "h.yaml", [], keep_alive_seconds=1) as router:
        host, port = router.http.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        for _ in range(2):
            writer.write(b"GET /health HTTP/1.1\r\nHost: router\r\n\r\n")
            assert (await reader.readuntil(b"ok\n")).startswith(b"HTTP/1.1 200")
        assert await soon(reader.read()) == b""
        writer.close()


async def test_the_context_is_what_the_workers_have_and_not_what_the_checkpoint_says(
    checkpoint: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    info = null_info(checkpoint)
    info = replace(info, capacity=replace(info.capacity, max_context_tokens=100))
    async with (
        NullWorker(info) as worker,
        before(checkpoint, tmp_path, worker) as router,
        httpx.AsyncClient(base_url=router.http, trust_env=False) as http,
    ):
        listed = (await http.get("/v1/models")).json()
        body = {"model": "tiny", "prompt": [5] * 60, "max_tokens": 60}
        refused = await http.post("/v1/completions", json=body)
    assert [model["max_model_len"] for model in listed["data"]] == [100]
    assert refused.status_code == 400
    assert "100" in refused.json()["error"]["message"]


async def test_a_worker_with_another_tokenizer_is_not_used(checkpoint: pathlib.Path, tmp_path: pathlib.Path) -> None:
    async with (
        NullWorker() as stranger,
        running_router(checkpoint, tmp_path / "h.yaml", [stranger.address], silent_seconds=0.5) as router,
        AsyncClient(router.grpc) as client,
    ):
        with pytest.raises(Unavailable, match="no worker that decodes is ready"):
            await anext(client.generate("hi"))


async def test_a_router_that_cannot_start_says_why(checkpoint: pathlib.Path, tmp_path: pathlib.Path) -> None:
    async def last_words(key: str, value: int) -> str:
        file = tmp_path / f"{key}.yaml"
        write_config(checkpoint, file, **{key: value})
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "router", str(file)), stderr=asyncio.subprocess.PIPE
        )
        _, said = await process.communicate()
        assert process.returncode == 1
        return said.decode()

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        http, grpc, colour = await asyncio.gather(
            last_words("http_port", port), last_words("grpc_port", port), last_words("colour", 1)
        )
    assert f"router.http_port: cannot listen on 127.0.0.1:{port}" in http
    assert f"router.grpc_port: cannot listen on 127.0.0.1:{port}" in grpc
    assert "router.colour: unknown key" in colour
