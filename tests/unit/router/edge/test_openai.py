"""The HTTP edge over a real app and a scripted core: shapes, bad input, errors before and after the first token."""

import asyncio
import json
import pathlib
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.clock import ManualClock
from headrace.errors import Overloaded, QuotaExceeded, WorkerLost
from headrace.values import Role, Timeline, Usage
from router.decisions.codec import decode
from router.decisions.placement import Ask, place
from router.decisions.tenants import Targets, Tenancy, Tenant
from router.decisions.view import View
from router.edge.openai import OpenAi
from router.edge.openai_models import ONLY_DEFAULT, ChatBody, CompletionBody
from router.explanations import Explanation
from router.stages import RequestTimeline
from router.text.vocabulary import Text
from tests.unit.router.checkpoints import sentencepiece, write
from tests.unit.router.decisions.test_placement import worker
from tests.unit.router.scripted import Scripted, make_edge

ANSWER = "The quick brown fox"
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 40}
COMPLETION = {"model": "tiny", "prompt": "hi", "max_tokens": 40}


def client_of(core: Scripted, clock: ManualClock, max_body_bytes: int = 10_000, **edge: Any) -> httpx.AsyncClient:
    app = OpenAi(make_edge(core.text, core, clock=clock, **edge), max_body_bytes, lambda: 1_700_000_000.0).app()
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router")


@pytest.fixture
def core(tiny: Text) -> Scripted:
    return Scripted(tiny, ANSWER)


@pytest.fixture
async def client(core: Scripted, clock: ManualClock) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(core, clock) as client:
        yield client


def events(response: httpx.Response) -> list[Any]:
    lines = response.text.split("\n\n")
    assert lines.pop() == ""
    assert all(line.startswith("data: ") for line in lines)
    return [line[6:] if line == "data: [DONE]" else json.loads(line[6:]) for line in lines]


async def test_a_whole_chat_answer_has_the_fields_of_openai(client: httpx.AsyncClient, core: Scripted) -> None:
    core.cached_tokens = 4
    response = await client.post("/v1/chat/completions", json=CHAT, headers={"X-Request-Id": "mine-1"})
    assert response.status_code == 200
    assert response.headers["x-request-id"] == "mine-1"
    num_prompt, num_answer = len(core.jobs[0].prompt_token_ids), len(core.text.encode(ANSWER))
    assert response.json() == {
        "id": "chatcmpl-mine-1",
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": "tiny",
        "system_fingerprint": "fp_r1",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": ANSWER, "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_answer,
            "total_tokens": num_prompt + num_answer,
            "prompt_tokens_details": {"cached_tokens": 4},
        },
    }


async def test_the_prompt_of_a_chat_is_the_rendered_template(client: httpx.AsyncClient, core: Scripted) -> None:
    await client.post("/v1/chat/completions", json=CHAT)
    rendered = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert list(core.jobs[0].prompt_token_ids) == core.text.encode(rendered, add_special_tokens=False)


async def test_a_chat_stream_says_its_role_first_and_ends_with_done(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/chat/completions", json={**CHAT, "stream": True})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *chunks, done = events(response)
    assert done == "[DONE]"
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert not any("usage" in chunk for chunk in chunks)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": "", "refusal": None}
    assert "".join(delta.get("content", "") for delta in deltas) == ANSWER
    finishes = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert finishes == [None] * (len(chunks) - 1) + ["stop"]


async def test_case_46_usage_of_a_stream_is_that_of_the_whole(client: httpx.AsyncClient, core: Scripted) -> None:
    core.cached_tokens = 3
    whole = await client.post("/v1/chat/completions", json={**CHAT, "max_tokens": 1})
    stream = await client.post(
        "/v1/chat/completions",
        json={**CHAT, "max_tokens": 1, "stream": True, "stream_options": {"include_usage": True}},
    )
    *chunks, last, _ = events(stream)
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"] == whole.json()["usage"]
    assert last["usage"]["completion_tokens"] == 1
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}


async def test_case_46_continuous_usage_grows_to_the_last(client: httpx.AsyncClient) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = await client.post("/v1/completions", json={**COMPLETION, "stream": True, "stream_options": options})
    *chunks, last, _ = events(stream)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == last["usage"]["completion_tokens"]


@pytest.mark.parametrize("stop", ["own fox", "quick", "The", "fox jumps"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_case_41_stream_and_whole_say_the_same_before_a_stop(
    client: httpx.AsyncClient, path: str, stop: str
) -> None:
    body = {**(CHAT if "chat" in path else COMPLETION), "stop": stop}
    whole = (await client.post(path, json=body)).json()["choices"][0]
    chunks = events(await client.post(path, json={**body, "stream": True}))[:-1]
    choices = [chunk["choices"][0] for chunk in chunks]
    streamed = "".join(
        choice["delta"].get("content", "") if "delta" in choice else choice["text"] for choice in choices
    )
    text = whole["message"]["content"] if "message" in whole else whole["text"]
    assert streamed == text == ANSWER.partition(stop)[0]
    assert whole["finish_reason"] == choices[-1]["finish_reason"] == "stop"


async def test_case_21_max_tokens_one_yields_one_token(client: httpx.AsyncClient) -> None:
    whole = (await client.post("/v1/completions", json={**COMPLETION, "max_tokens": 1})).json()
    assert whole["usage"]["completion_tokens"] == 1
    assert whole["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
async def test_case_24_n_choices_each_with_one_finish(client: httpx.AsyncClient, stream: bool) -> None:
    body = {**CHAT, "n": 3, "stream": stream, "stream_options": {"include_usage": True} if stream else None}
    response = await client.post("/v1/chat/completions", json=body)
    if not stream:
        whole = response.json()
        assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
        assert {choice["message"]["content"] for choice in whole["choices"]} == {ANSWER}
        usage = whole["usage"]
    else:
        *chunks, last, _ = events(response)
        choices = [chunk["choices"][0] for chunk in chunks]
        for index in range(3):
            mine = [choice for choice in choices if choice["index"] == index]
            assert "".join(choice["delta"].get("content", "") for choice in mine) == ANSWER
            assert [choice["finish_reason"] for choice in mine if choice["finish_reason"]] == ["stop"]
        usage = last["usage"]
    assert usage["prompt_tokens"] < usage["completion_tokens"]
    assert usage["completion_tokens"] % 3 == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_case_25_every_token_has_its_logprobs_in_every_choice(client: httpx.AsyncClient, stream: bool) -> None:
    body = {**CHAT, "n": 2, "logprobs": True, "top_logprobs": 2, "stream": stream}
    response = await client.post("/v1/chat/completions", json=body)
    choices = [chunk["choices"][0] for chunk in events(response)[:-1]] if stream else response.json()["choices"]
    for index in range(2):
        mine = [choice for choice in choices if choice["index"] == index]
        content = [entry for choice in mine if choice["logprobs"] for entry in choice["logprobs"]["content"]]
        assert "".join(entry["token"] for entry in content) == ANSWER
        assert all(len(entry["top_logprobs"]) == 2 for entry in content)
        assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == ANSWER


async def test_logprobs_of_completions_have_their_older_form(client: httpx.AsyncClient) -> None:
    choice = (await client.post("/v1/completions", json={**COMPLETION, "logprobs": 1})).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == ANSWER
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert ANSWER[offset:].startswith(token)
    assert all(list(top) == [token] for top, token in zip(logprobs["top_logprobs"], logprobs["tokens"], strict=True))


@pytest.mark.parametrize(
    ("prompt", "num_prompts"),
    [("hi", 1), (["hi", "you"], 2), ([10, 11, 12], 1), ([[10, 11], [12]], 2), (["hi"], 1)],
)
async def test_prompts_of_all_four_forms(
    client: httpx.AsyncClient, core: Scripted, prompt: Any, num_prompts: int
) -> None:
    response = await client.post("/v1/completions", json={**COMPLETION, "prompt": prompt, "n": 2, "max_tokens": 2})
    choices = response.json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(2 * num_prompts))
    assert len(core.jobs) == num_prompts
    assert len({job.request_id for job in core.jobs}) == num_prompts
    assert response.json()["usage"]["completion_tokens"] == 4 * num_prompts


async def test_prompts_of_a_stream_come_together(client: httpx.AsyncClient) -> None:
    body = {**COMPLETION, "prompt": ["a", "b", "c"], "stream": True}
    chunks = events(await client.post("/v1/completions", json=body))
    assert chunks.pop() == "[DONE]"
    for index in range(3):
        texts = [c["choices"][0]["text"] for c in chunks if c["choices"][0]["index"] == index]
        assert "".join(texts) == ANSWER


async def test_a_completion_keeps_the_space_that_joins_it_to_its_prompt_and_a_chat_drops_it(
    tmp_path: pathlib.Path, clock: ManualClock
) -> None:
    template = "{{ messages[0]['content'] }}"
    core = Scripted(Text.load(write(tmp_path, sentencepiece(), template)), "The fox")
    async with client_of(core, clock) as client:
        completion = await client.post("/v1/completions", json={**COMPLETION, "prompt": "The"})
        chat = await client.post("/v1/chat/completions", json=CHAT)
    assert completion.json()["choices"][0]["text"] == " The fox"
    assert chat.json()["choices"][0]["message"]["content"] == "The fox"


@pytest.mark.parametrize("prompt", ["hi, ", [[10, 11]]])
async def test_echo_repeats_the_prompt_once(client: httpx.AsyncClient, core: Scripted, prompt: Any) -> None:
    body = {**COMPLETION, "prompt": prompt, "echo": True}
    whole = (await client.post("/v1/completions", json=body)).json()["choices"][0]["text"]
    chunks = events(await client.post("/v1/completions", json={**body, "stream": True}))[:-1]
    shown = prompt if isinstance(prompt, str) else core.text.decode(prompt[0])
    assert whole == "".join(chunk["choices"][0]["text"] for chunk in chunks) == shown + ANSWER


async def test_the_timeline_is_given_to_who_asks(client: httpx.AsyncClient) -> None:
    body = {**CHAT, "headrace": {"timeline": True}}
    timelines = [
        (await client.post("/v1/chat/completions", json=body)).json()["headrace"]["timeline"],
        events(await client.post("/v1/chat/completions", json={**body, "stream": True}))[-2]["headrace"]["timeline"],
    ]
    assert timelines[0] == timelines[1]
    assert timelines[0][0]["decode_worker"] == "d1"
    assert timelines[0][0]["router_queue_seconds"] == 0.25


@pytest.mark.parametrize(
    ("change", "param", "said"),
    [
        ({"max_tokens": 0}, "max_tokens", "an integer of at least 1, got 0"),
        ({"max_tokens": -1}, "max_tokens", "got -1"),
        ({"max_tokens": 10**9}, "max_tokens", "context of 64 tokens"),
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
    ],
)
async def test_case_48_a_bad_parameter_costs_a_400_and_no_job(
    client: httpx.AsyncClient, core: Scripted, change: dict[str, Any], param: str, said: str
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


async def test_models_are_listed_and_found(client: httpx.AsyncClient) -> None:
    listed = (await client.get("/v1/models")).json()
    assert [(entry["id"], entry["object"], entry["max_model_len"]) for entry in listed["data"]] == [
        ("tiny", "model", 64)
    ]
    assert (await client.get("/v1/models/tiny")).json() == listed["data"][0]
    assert (await client.get("/v1/models/a/b")).status_code == 404


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


@pytest.mark.parametrize("big", [{"prompt": [1] * 20_000}, {"messages": [{"role": "user", "content": "hi"}] * 2000}])
async def test_the_event_loop_goes_on_while_a_large_body_is_parsed_and_rendered(
    core: Scripted, clock: ManualClock, big: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What takes long runs on other threads: the loop's own parses and renders nothing of it."""
    threads: dict[str, set[int]] = {"json": set(), "render": set()}
    loads, render, briefly = json.loads, core.text.render, core.text.render_briefly

    def watched_loads(raw: Any) -> Any:
        threads["json"].add(threading.get_ident())
        return loads(raw)

    def watched_render(*given: Any) -> str:
        threads["render"].add(threading.get_ident())
        return render(*given)

    def watched_briefly(*given: Any) -> str | None:
        threads["render"].add(threading.get_ident())
        return briefly(*given)

    async with client_of(core, clock, max_body_bytes=2**20) as client:
        path = "/v1/completions" if "prompt" in big else "/v1/chat/completions"
        content = json.dumps({"model": "tiny", **big})
        monkeypatch.setattr("router.edge.json_input.json.loads", watched_loads)
        monkeypatch.setattr(core.text, "render", watched_render)
        monkeypatch.setattr(core.text, "render_briefly", watched_briefly)
        answer = await client.post(path, content=content)
    assert answer.status_code == 400, "longer than the context"
    assert threads["json"]
    assert threading.get_ident() not in threads["json"] | threads["render"]
    assert bool(threads["render"]) == ("messages" in big)


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


async def test_case_70_keys_guard_the_api_and_nothing_that_probes_ask(core: Scripted, clock: ManualClock) -> None:
    async with client_of(core, clock, api_keys=("k1", "k2")) as client:
        for path in ("/health", "/ready", "/metrics"):
            assert (await client.get(path)).status_code == 200
        for header in ({}, {"Authorization": "Bearer no"}, {"Authorization": "k1"}, {"Authorization": "Basic k1"}):
            response = await client.get("/v1/models", headers=header)
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
        assert (await client.get("/v1/models", headers={"Authorization": "Bearer k2"})).status_code == 200


async def test_case_59_readiness_names_its_reason_while_liveness_holds(core: Scripted, clock: ManualClock) -> None:
    async with client_of(core, clock, unready="no decode worker is connected") as client:
        ready = await client.get("/ready")
        assert (ready.status_code, ready.text) == (503, "no decode worker is connected\n")
        assert (await client.get("/health")).status_code == 200


async def test_a_bad_request_id_is_refused(client: httpx.AsyncClient) -> None:
    response = await client.get("/v1/models", headers={"X-Request-Id": "x" * 200})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "request_id")


@pytest.mark.parametrize("stream", [False, True])
async def test_case_60_draining_refuses_new_requests_and_waits_for_those_in_flight(
    tiny: Text, clock: ManualClock, stream: bool
) -> None:
    core = Scripted(tiny, ANSWER, gate=asyncio.Semaphore(0))
    edge = make_edge(tiny, core, clock=clock)
    app = OpenAi(edge, 10_000, lambda: 0.0).app()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router") as client:
        live = asyncio.ensure_future(client.post("/v1/chat/completions", json={**CHAT, "stream": stream}))
        await core.started.wait()
        drained = asyncio.ensure_future(edge.drain())
        await asyncio.sleep(0)
        assert not drained.done()
        refused = await client.post("/v1/chat/completions", json=CHAT)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert (await client.get("/ready")).text == "draining\n"
        assert core.gate is not None
        for _ in range(64):
            core.gate.release()
        assert (await live).status_code == 200
        await drained


def explanation(request_id: str) -> Explanation:
    ask, view = Ask(1000, 100), View((worker("p", Role.PREFILL), worker("d", Role.DECODE)))
    whys = (place(ask, view, 0.0).why,)
    timeline = RequestTimeline(Timeline(prefill_worker="p"), 0.25, "d", 1)
    return Explanation(request_id, whys, (), "finished", Usage(1000, 2, 32), timeline, 2.0, 1.5, 0.5)


@pytest.mark.parametrize("asked", ["a/b", "chatcmpl-a/b", "cmpl-a/b"])
async def test_why_tells_operators_of_a_request_by_its_id_or_that_of_its_answer(
    core: Scripted, clock: ManualClock, asked: str
) -> None:
    core.explanations["a/b"] = explanation("a/b")
    async with client_of(core, clock) as client:
        response = await client.get(f"/why/{asked}")
        assert response.status_code == 200
        assert decode(Explanation, response.json()) == explanation("a/b")


async def test_a_client_s_own_id_may_begin_like_an_answer_s(core: Scripted, clock: ManualClock) -> None:
    core.explanations = {"cmpl-a": explanation("cmpl-a"), "a": explanation("a")}
    async with client_of(core, clock) as client:
        assert (await client.get("/why/cmpl-a")).json()["request_id"] == "cmpl-a"


async def test_why_of_an_unknown_request_is_a_404_and_needs_a_key_where_there_are_keys(
    core: Scripted, clock: ManualClock
) -> None:
    async with client_of(core, clock, api_keys=("k",)) as client:
        core.explanations["a"] = explanation("a")
        assert (await client.get("/why/a")).status_code == 401
        key = {"Authorization": "Bearer k"}
        assert (await client.get("/why/a", headers=key)).status_code == 200
        missing = await client.get("/why/b", headers=key)
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")


async def test_the_list_of_requests_begins_with_those_that_run_and_holds_no_more_than_was_asked_for(
    core: Scripted, clock: ManualClock
) -> None:
    for number in range(6):
        core.explanations[f"e{number}"] = explanation(f"e{number}")
        core.explanations[f"r{number}"] = replace(explanation(f"r{number}"), outcome="decode")
    async with client_of(core, clock) as client:
        found = (await client.get("/requests?limit=4")).json()["requests"]
        assert [(one["outline"]["request_id"], one["seconds_ago"]) for one in found] == [
            ("r0", None),
            ("r1", None),
            ("e0", 3.0),
            ("e1", 3.0),
        ]
        assert (found[0]["reasons"], found[0]["outline"]["whys"]) == (["pair"], [])
        for limit in ("0", "201", "x", "-1", "٣"):
            refused = await client.get("/requests", params={"limit": limit})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "limit")


async def test_the_list_of_requests_needs_a_key_where_there_are_keys_and_shows_a_tenant_its_own(
    core: Scripted, clock: ManualClock
) -> None:
    core.explanations = {"a": replace(explanation("a"), tenant="acme"), "b": explanation("b")}
    async with client_of(core, clock, api_keys=KEYS, tenancy=TENANCY) as client:
        assert (await client.get("/requests")).status_code == 401
        for key, names in (("acme-1", ["a"]), ("beta-1", []), ("operator", ["a", "b"])):
            found = (await client.get("/requests", headers={"Authorization": f"Bearer {key}"})).json()["requests"]
            assert [one["outline"]["request_id"] for one in found] == names


CHAT_CLASS = Targets(1.0, 0.05)
TENANCY = Tenancy(
    {"default": Tenant(), "acme": Tenant("acme", cache_domain="acme", max_priority=3), "beta": Tenant("beta")},
    {"chat": CHAT_CLASS, "batch": Targets(60.0)},
)
KEYS = {"default": ("operator",), "acme": ("acme-1", "acme-2"), "beta": ("beta-1",)}
ACME = {"Authorization": "Bearer acme-2"}


async def test_a_request_is_its_keys_tenants_with_its_class_time_and_priority(
    core: Scripted, clock: ManualClock
) -> None:
    async with client_of(core, clock, api_keys=KEYS, tenancy=TENANCY) as client:
        headers = {**ACME, "X-Headrace-Timeout": "2.5", "X-Headrace-Class": "batch"}
        body = {**COMPLETION, "service_class": "chat", "priority": 3}
        assert (await client.post("/v1/completions", json=body, headers=headers)).status_code == 200
        assert (await client.post("/v1/chat/completions", json=CHAT, headers=headers)).status_code == 200
        two = {**COMPLETION, "prompt": ["a", "b"]}
        assert (await client.post("/v1/completions", json=two, headers=headers)).status_code == 200
        assert (await client.post("/v1/completions", json={**body, "priority": 4}, headers=headers)).status_code == 400
    first, second, *both = core.jobs
    assert (first.tenant, first.targets, first.priority, first.seconds_left) == ("acme", CHAT_CLASS, 3, 2.5)
    assert first.cache_salt == "\0acme\0"
    assert (second.tenant, second.service_class, second.seconds_left) == ("acme", "batch", 2.5)
    assert [(job.tenant, job.service_class, job.seconds_left) for job in both] == [("acme", "batch", 2.5)] * 2


@pytest.mark.parametrize(
    ("header", "value"), [("X-Headrace-Timeout", "-1"), ("X-Headrace-Timeout", "soon"), ("X-Headrace-Class", "fast")]
)
async def test_a_header_that_means_nothing_is_a_400_that_names_it(
    core: Scripted, clock: ManualClock, header: str, value: str
) -> None:
    async with client_of(core, clock, tenancy=TENANCY) as client:
        response = await client.post("/v1/completions", json=COMPLETION, headers={header: value})
    assert response.status_code == 400
    assert response.json()["error"]["param"] in ("x-headrace-timeout", "service_class")
    assert value in response.json()["error"]["message"]
    assert not core.jobs


async def test_a_quota_that_is_exceeded_is_a_429_with_a_time(client: httpx.AsyncClient, core: Scripted) -> None:
    core.error = QuotaExceeded(
        "the tenant's quota does not hold this", retry_after_seconds=6.2, quota="tokens", limit=9
    )
    response = await client.post("/v1/completions", json=COMPLETION)
    assert (response.status_code, response.headers["retry-after"]) == (429, "7")
    assert response.json()["error"]["code"] == "rate_limit_exceeded"


async def test_why_tells_a_tenant_of_its_own_requests_and_the_operator_of_all(
    core: Scripted, clock: ManualClock
) -> None:
    core.explanations["a"] = replace(explanation("a"), tenant="acme")
    async with client_of(core, clock, api_keys=KEYS, tenancy=TENANCY) as client:
        asked = {
            key: await client.get("/why/a", headers={"Authorization": f"Bearer {key}"})
            for key in ("acme-1", "beta-1", "operator")
        }
    assert {key: response.status_code for key, response in asked.items()} == {
        "acme-1": 200,
        "beta-1": 404,
        "operator": 200,
    }
