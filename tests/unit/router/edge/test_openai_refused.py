"""What the HTTP edge cannot serve: bad parameters and bodies, unknown models, errors before and after the first token."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.errors import Overloaded, WorkerLost
from router.edge.openai_models import ONLY_DEFAULT, ChatBody, CompletionBody
from tests.unit.router.edge.edges import CHAT, COMPLETION, events
from tests.unit.router.scripted import Scripted


@pytest.mark.parametrize(
    ("change", "param", "said"),
    [
        ({"max_tokens": 0}, "max_tokens", "an integer of at least 1, got 0"),
        ({"max_tokens": -1}, "max_tokens", "got -1"),
        ({"max_tokens": 10**9}, "max_tokens", "maximum context length is 64 tokens"),
        ({"max_completion_tokens": 3}, "max_completion_tokens", "equal to max_tokens (40), got 3"),
        ({"temperature": "hot"}, "temperature", "a finite number, got 'hot'"),
        ({"top_k": 0.01}, "top_k", "an integer from 0"),
        ({"stream": "yes"}, "stream", "a valid boolean, got 'yes'"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream must be true"),
        ({"stream": True, "stream_options": {"colour": 1}}, "stream_options.colour", "not a parameter"),
        ({"max_token": 5}, "max_token", "max_token is not a parameter of this endpoint"),
        ({"response_format": {"type": "json_object"}}, "response_format", "nothing else is served"),
        ({"tool_choice": "required"}, "tool_choice", '"none" or "auto"'),
        ({"top_logprobs": 2}, "logprobs", "logprobs must be true for top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "an integer from 0 to 20, got 21"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "a string or a list of text parts"),
        ({"messages": [{"role": "user", "content": "\ud83d"}]}, "messages", "without lone surrogates"),
        ({"model": 5}, "model", "a valid string, got 5"),
        ({"model": None}, "model", "model is required"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs", "without messages"),
        ({"stop": [""]}, "stop[0]", "a string of 1 to 256 characters"),
        ({"\ud83d": 1}, None, "the name of a parameter must be Unicode text, got '\\ud83d'"),
    ],
)
async def test_case_48_a_bad_parameter_costs_a_400_and_no_job(
    client: httpx.AsyncClient, core: Scripted, change: dict[str, Any], param: str | None, said: str
) -> None:
    response = await client.post("/v1/chat/completions", content=json.dumps({**CHAT, **change}))
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert (error["param"], said in error["message"]) == (param, True), error
    assert core.jobs == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"prompt": ""}, "prompt must be at least 1 character"),
        ({"prompt": []}, "prompt must be at least 1 token"),
        ({"prompt": None}, "prompt must be a string or a list of token ids, got None"),
        ({"prompt": ["a", ""]}, "prompt must be at least 1 character"),
        ({"prompt": ["a", 5]}, "prompt must be a string or a list of token ids, got 5"),
        ({"prompt": [999_999]}, "prompt[0] must be token ids from 0 to 499, got 999999"),
        ({"prompt": [1, "a"]}, "prompt[1] must be token ids from 0 to 499, got 'a'"),
        ({"prompt": {"a": 1}}, "prompt must be a string or a list of token ids"),
        ({"prompt": ["a"] * 1025}, "prompt must be at most 1024 prompts"),
        ({"prompt": ["a"] * 9, "n": 128}, "n must be at most 1024 choices over all prompts"),
        ({"echo": True, "logprobs": 1}, "echo must be false with logprobs"),
        ({"best_of": 2}, "best_of must be absent or equal to n (1), got 2"),
        ({"suffix": "x"}, "suffix must be absent or"),
        ({"logprobs": 6.5}, "logprobs must be an integer from 0 to 20"),
    ],
)
async def test_case_47_completions_refuse_what_they_cannot_serve(
    client: httpx.AsyncClient, core: Scripted, change: dict[str, Any], said: str
) -> None:
    response = await client.post("/v1/completions", json={**COMPLETION, **change})
    assert (response.status_code, said in response.json()["error"]["message"]) == (400, True), response.text
    assert core.jobs == []


@pytest.mark.parametrize("value", [None, "absent"])
async def test_case_47_max_tokens_null_or_absent_takes_the_default(
    client: httpx.AsyncClient, core: Scripted, value: Any
) -> None:
    body = {key: val for key, val in CHAT.items() if key != "max_tokens"} | ({} if value else {"max_tokens": None})
    assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    assert core.jobs[0].sampling.max_tokens == 16


async def test_what_clients_commonly_send_and_nulls_are_accepted(client: httpx.AsyncClient, core: Scripted) -> None:
    extra = {"user": "u", "store": False, "metadata": {}, "parallel_tool_calls": True, "service_tier": "auto"}
    nulls = {"temperature": None, "logit_bias": None, "response_format": None, "anything": None}
    defaults = {"response_format": {"type": "text"}, "modalities": ["text"]}
    body = {**CHAT, **nulls, **extra, **defaults}
    assert (await client.post("/v1/chat/completions", json=body)).status_code == 200


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"", "the body must be JSON"),
        (b"{", "the body must be JSON"),
        (b"\xff\xfe", "the body must be JSON"),
        (b"[]", "the body must be a JSON object, got an array"),
        (b"null", "the body must be a JSON object, got null"),
        (b"3", "the body must be a JSON object, got a number"),
        (b'"x"', "the body must be a JSON object, got a string"),
        (b"[" * 4000, "the body must be JSON"),
        (b'{"model": "tiny", "n": ' + b"9" * 5000 + b"}", "the body must be JSON"),
        (b'{"temperature": ' + b"[" * 900 + b"]" * 900 + b"}", "nested at most 128 deep"),
        (b"{}", "model is required"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_body_that_is_no_json_object_is_a_400(
    client: httpx.AsyncClient, path: str, raw: bytes, said: str
) -> None:
    response = await client.post(path, content=raw)
    assert (response.status_code, said in response.json()["error"]["message"]) == (400, True), response.text


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
FIELDS = sorted((ChatBody.model_fields | CompletionBody.model_fields).keys() | ONLY_DEFAULT.keys())


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=120)
@given(change=st.dictionaries(st.sampled_from(FIELDS), JSON, min_size=1, max_size=2), chat=st.booleans())
async def test_case_48_whatever_is_sent_is_answered_with_200_or_a_4xx(
    client: httpx.AsyncClient, change: dict[str, Any], chat: bool
) -> None:
    path, body = ("/v1/chat/completions", CHAT) if chat else ("/v1/completions", COMPLETION)
    response = await client.post(path, content=json.dumps({**body, **change}))
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


async def test_case_57_an_unknown_model_is_a_404_and_no_label(client: httpx.AsyncClient) -> None:
    for number in range(20):
        response = await client.post("/v1/chat/completions", json={**CHAT, "model": f"m{number}"})
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "model_not_found"
    exposition = (await client.get("/metrics")).text
    assert 'headrace_answers_total{model="unknown",outcome="ModelNotFound"}' in exposition
    assert "m19" not in exposition


async def test_unknown_paths_methods_and_large_bodies_have_error_bodies_too(client: httpx.AsyncClient) -> None:
    answers = [
        await client.get("/v1/nothing"),
        await client.get("/v1/completions"),
        await client.post("/v1/completions", content=b" " * 10_001),
    ]
    assert [answer.status_code for answer in answers] == [404, 405, 413]
    assert [answer.json()["error"]["code"] for answer in answers] == [
        "not_found",
        "method_not_allowed",
        "body_too_large",
    ]
    assert answers[2].json()["error"]["message"] == "the body must be at most 10000 bytes, got 10001"
    assert answers[2].headers["connection"] == "close", "the rest of the body is not read"


async def test_a_body_that_says_it_is_too_large_is_refused_before_it_comes(client: httpx.AsyncClient) -> None:
    async def never() -> AsyncIterator[bytes]:
        pytest.fail("it was asked for")
        yield b""

    answer = await client.post("/v1/completions", content=never(), headers={"content-length": "10001"})
    assert answer.status_code == 413


async def test_a_body_of_unknown_length_is_refused_as_soon_as_it_is_too_large(client: httpx.AsyncClient) -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            sent += 4000
            yield b" " * 4000

    answer = await client.post("/v1/completions", content=endless())
    assert answer.status_code == 413
    assert "at most 10000 bytes, got 12000 so far" in answer.json()["error"]["message"]
    assert sent <= 16_000


async def test_an_error_before_the_first_token_is_an_http_error_with_retry_after(
    client: httpx.AsyncClient, core: Scripted
) -> None:
    core.error = Overloaded("the queue is full", retry_after_seconds=2.2)
    for stream in (False, True):
        response = await client.post("/v1/chat/completions", json={**CHAT, "stream": stream})
        assert (response.status_code, response.headers["retry-after"]) == (429, "3")
        assert response.json()["error"] == {
            "message": "the queue is full",
            "type": "rate_limit_error",
            "param": None,
            "code": "rate_limit_exceeded",
        }


async def test_case_45_an_error_after_the_first_token_is_an_event_without_done(
    client: httpx.AsyncClient, core: Scripted
) -> None:
    core.error, core.fail_after = WorkerLost("the worker is gone"), 3
    response = await client.post("/v1/chat/completions", json={**CHAT, "stream": True})
    assert response.status_code == 200
    *chunks, last = events(response)
    assert last == {
        "error": {"message": "the worker is gone", "type": "server_error", "param": None, "code": "worker_lost"}
    }
    assert not any(chunk["choices"][0]["finish_reason"] for chunk in chunks)
    whole = await client.post("/v1/chat/completions", json=CHAT)
    assert whole.status_code == 503


async def test_an_unforeseen_failure_is_a_500_that_says_nothing_of_the_inside(
    client: httpx.AsyncClient, core: Scripted, caplog: pytest.LogCaptureFixture
) -> None:
    core.error, core.fail_after = KeyError("secret"), 1  # type: ignore[assignment]
    response = await client.post("/v1/chat/completions", json=CHAT)
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "internal error: KeyError"
    assert "secret" in caplog.text


async def test_a_bad_request_id_is_refused(client: httpx.AsyncClient) -> None:
    response = await client.get("/v1/models", headers={"X-Request-Id": "x" * 200})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "x-request-id")
    assert response.headers["x-request-id"] not in ("", "x" * 200), "every answer has an id, a refusal too"
