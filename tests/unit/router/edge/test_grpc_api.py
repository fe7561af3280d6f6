"""The gRPC edge, over a real channel and through the public client, with a scripted core behind it."""

import asyncio
import json
import pkgutil
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

import grpc
import pytest

from headrace.client import AsyncClient, Client
from headrace.errors import (
    ContextLengthExceeded,
    HeadraceError,
    InternalError,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    Unavailable,
    WorkerLost,
)
from headrace.v1 import inference_pb2, inference_pb2_grpc
from tests.unit.router.edge.edges import ANSWER, MESSAGES, collected, serving
from tests.unit.router.scripted import Scripted


@pytest.fixture
async def client(core: Scripted) -> AsyncIterator[AsyncClient]:
    async with serving(core) as address, AsyncClient(address) as client:
        yield client


async def test_generate_streams_text_ids_and_at_last_usage_and_path(client: AsyncClient, core: Scripted) -> None:
    parts = [part async for part in client.generate("hi", request_id="mine", logprobs=1)]
    assert "".join(part.text for part in parts) == ANSWER
    assert [token for part in parts for token in part.token_ids] == core.text.encode(ANSWER)
    assert {part.request_id for part in parts} == {"mine"}
    assert all(len(part.logprobs) == 1 and len(part.logprobs[0].top) == 1 for part in parts)
    *others, last = parts
    assert not any(part.finish_reason or part.usage or part.path for part in others)
    assert last.finish_reason == "stop"
    assert last.usage is not None
    assert last.usage.completion_tokens == len(parts)
    assert last.path is not None
    assert (last.path.decode_worker, last.path.prefill_worker, last.path.attempts) == ("d1", "p1", 1)


async def test_token_ids_are_a_prompt_too(client: AsyncClient, core: Scripted) -> None:
    assert [part async for part in client.generate([10, 11, 12])]
    assert core.jobs[0].prompt_token_ids == (10, 11, 12)


async def test_case_32_both_edges_render_a_chat_to_the_same_prompt(client: AsyncClient, core: Scripted) -> None:
    assert [part async for part in client.chat(MESSAGES)]
    rendered = core.text.render(MESSAGES)
    assert list(core.jobs[0].prompt_token_ids) == core.text.encode(rendered, add_special_tokens=False)


async def test_every_sampling_parameter_arrives_and_zero_is_not_absent(client: AsyncClient, core: Scripted) -> None:
    sampling: dict[str, Any] = {
        "temperature": 0.0,
        "top_p": 0.5,
        "top_k": 0,
        "min_p": 0.25,
        "presence_penalty": -1.0,
        "frequency_penalty": 1.0,
        "repetition_penalty": 1.5,
        "logit_bias": {7: -1.5},
        "seed": 0,
        "max_tokens": 5,
        "min_tokens": 2,
        "ignore_eos": True,
        "stop_token_ids": [3, 4],
        "stop": ["zz"],
        "logprobs": 0,
        "n": 2,
        "priority": 3,
        "cache_salt": "salt",
    }
    assert [part async for part in client.generate("hi", **sampling)]
    job, got = core.jobs[0], core.jobs[0].sampling
    same = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
    for name in (*same, "seed", "max_tokens", "min_tokens", "ignore_eos"):
        assert getattr(got, name) == sampling[name], name
    assert (got.logit_bias, got.stop_token_ids, got.num_logprobs) == (((7, -1.5),), (3, 4), 0)
    assert (job.n, job.stop, job.priority, job.cache_salt) == (2, ("zz",), 3, "salt")


async def test_silence_leaves_the_defaults(client: AsyncClient, core: Scripted) -> None:
    assert [part async for part in client.generate("hi")]
    got = core.jobs[0].sampling
    assert (got.temperature, got.max_tokens, got.num_logprobs, got.logit_bias) == (1.0, 16, None, ())


@pytest.mark.parametrize(
    ("asked", "kind", "said"),
    [
        ({"temperature": float("nan")}, InvalidRequest, "temperature must be from 0.0 to 100.0, got nan"),
        ({"max_tokens": 0}, InvalidRequest, "max_tokens must be an integer of at least 1, got 0"),
        ({"max_tokens": 100}, ContextLengthExceeded, "maximum context length is 64 tokens"),
        ({"logit_bias": {500: 1.0}}, InvalidRequest, "logit_bias must be token ids"),
        ({"stop": [""]}, InvalidRequest, r"stop\[0\] must be"),
        ({"stop": ["x"] * 100_000}, InvalidRequest, "at most 16 strings"),
        ({"model": "other"}, ModelNotFound, "model must be one of tiny, got 'other'"),
        ({"request_id": "a b"}, InvalidRequest, "request_id must be"),
        ({"colour": 1}, InvalidRequest, "colour"),
    ],
)
async def test_case_48_a_bad_value_comes_back_as_its_own_error(
    client: AsyncClient, core: Scripted, asked: dict[str, Any], kind: type[HeadraceError], said: str
) -> None:
    with pytest.raises(kind, match=said):
        assert [part async for part in client.generate("hi", **asked)]
    assert core.jobs == []


@pytest.mark.parametrize(
    ("prompt", "said"), [("", "at least 1 character"), ([], "at least 1 token"), ([10**6], r"prompt\[0\] must be")]
)
async def test_case_48_a_bad_prompt_is_refused(client: AsyncClient, prompt: Any, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        assert [part async for part in client.generate(prompt)]


async def test_numbers_and_retry_after_travel_with_the_error(client: AsyncClient, core: Scripted) -> None:
    core.error = Overloaded("the queue is full", retry_after_seconds=1.5, limit=7)
    with pytest.raises(Overloaded) as caught:
        assert [part async for part in client.generate("hi")]
    assert (caught.value.retry_after_seconds, caught.value.numbers) == (1.5, {"limit": "7"})
    with pytest.raises(ContextLengthExceeded) as beyond:
        assert [part async for part in client.generate("hi", max_tokens=100)]
    assert (beyond.value.field, beyond.value.numbers["limit"]) == ("max_tokens", "64")


async def test_an_error_mid_stream_ends_the_stream_as_that_error(client: AsyncClient, core: Scripted) -> None:
    core.error, core.fail_after = WorkerLost("the worker is gone"), 2
    parts = client.generate("hi")
    assert [(await anext(parts)).finish_reason for _ in range(2)] == [None, None]
    with pytest.raises(WorkerLost, match="the worker is gone"):
        await anext(parts)


async def test_an_unforeseen_failure_says_nothing_of_the_inside(
    client: AsyncClient, core: Scripted, caplog: pytest.LogCaptureFixture
) -> None:
    core.error, core.fail_after = KeyError("secret"), 1  # type: ignore[assignment]
    with pytest.raises(InternalError, match=r"^internal error: KeyError$"):
        assert [part async for part in client.generate("hi")]
    assert "secret" in caplog.text


@pytest.mark.parametrize("text", ["not json", "[1", ""])
async def test_messages_that_are_no_json_are_named(core: Scripted, text: str) -> None:
    async with serving(core) as address, grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Chat(inference_pb2.ChatRequest(model="tiny", messages_json=text)).read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "messages" in (caught.value.details() or "")


LONG = "word " * 20_000


@pytest.mark.parametrize(
    ("watched", "ask"),
    [
        (
            "router.edge.grpc_api.parse_json",
            lambda client: collected(client.chat([{"role": "user", "content": LONG}])),
        ),
        ("router.text.vocabulary.Text.encode", lambda client: client.tokenize(LONG)),
        ("router.text.vocabulary.Text.decode", lambda client: client.detokenize([5] * 40_000)),
    ],
    ids=["messages", "text", "token ids"],
)
async def test_what_takes_long_runs_on_other_threads(
    client: AsyncClient, monkeypatch: pytest.MonkeyPatch, watched: str, ask: Callable[[AsyncClient], Awaitable[object]]
) -> None:
    threads: set[int] = set()
    path, _, name = watched.rpartition(".")
    owner = pkgutil.resolve_name(path)
    function = getattr(owner, name)

    def noted(*given: Any, **named: Any) -> Any:
        threads.add(threading.get_ident())
        return function(*given, **named)

    monkeypatch.setattr(owner, name, noted)
    with suppress(ContextLengthExceeded, InvalidRequest):
        await ask(client)
    assert threads
    assert threading.get_ident() not in threads


async def test_words_and_models(client: AsyncClient, core: Scripted) -> None:
    token_ids = await client.tokenize("The fox 🙂")
    assert token_ids == core.text.encode("The fox 🙂")
    assert await client.detokenize(token_ids) == "The fox 🙂"
    (model,) = await client.models()
    assert (model.id, model.revision, model.max_context_tokens) == ("tiny", "r1", 64)
    with pytest.raises(InvalidRequest, match=r"token_ids\[0\] must be"):
        await client.detokenize([10**6])


async def test_the_sync_client_speaks_the_same(core: Scripted) -> None:
    def talk(address: str) -> tuple[str, str, list[int]]:
        with Client(address) as client:
            generated = "".join(part.text for part in client.generate("hi"))
            chatted = "".join(part.text for part in client.chat(MESSAGES, tools=None))
            with pytest.raises(InvalidRequest):
                list(client.generate(""))
            next(early := client.generate("hi"))
            early.close()
            return generated, chatted, client.tokenize("fox")

    async with serving(core) as address:
        generated, chatted, token_ids = await asyncio.to_thread(talk, address)
    assert generated == chatted == ANSWER
    assert core.text.decode(token_ids) == "fox"


async def test_a_router_that_is_not_there_is_unavailable() -> None:
    async with AsyncClient("127.0.0.1:1", model="m") as client:
        with pytest.raises(Unavailable):
            assert [part async for part in client.generate("hi")]


async def test_tools_and_template_kwargs_reach_the_template(client: AsyncClient, core: Scripted) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    kwargs = {"add_generation_prompt": False}
    assert [part async for part in client.chat(MESSAGES, tools=[tool], chat_template_kwargs=kwargs)]
    rendered = core.text.render(MESSAGES, [tool], kwargs)
    assert core.text.decode(core.jobs[0].prompt_token_ids) == "user\nhi\n"
    assert list(core.jobs[0].prompt_token_ids) == core.text.encode(rendered, add_special_tokens=False)
    assert json.dumps(tool) not in rendered
