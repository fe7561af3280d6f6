"""The HTTP edge over a real app and a scripted core: the shapes of answers, streamed and whole, and a drain."""

import asyncio
import json
import pathlib
import threading
from typing import Any

import httpx
import pytest

from headrace.clock import ManualClock
from router.edge.openai import OpenAi
from router.text.vocabulary import Text
from tests.unit.router.checkpoints import sentencepiece, write
from tests.unit.router.edge.edges import ANSWER, CHAT, COMPLETION, client_of, events
from tests.unit.router.scripted import Scripted, make_edge


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


async def test_case_32_what_a_client_gives_the_template_reaches_it(client: httpx.AsyncClient, core: Scripted) -> None:
    for given in ({}, {"add_generation_prompt": False}):
        answer = await client.post("/v1/chat/completions", json={**CHAT, "chat_template_kwargs": given})
        assert answer.status_code == 200
        rendered = core.text.render(CHAT["messages"], None, given)
        assert list(core.jobs[-1].prompt_token_ids) == core.text.encode(rendered, add_special_tokens=False)
    assert core.jobs[-1].prompt_token_ids != core.jobs[-2].prompt_token_ids


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


@pytest.mark.parametrize("prompts", [["hi"], ["hi", "The fox"]])
async def test_case_46_continuous_usage_counts_tokens_and_grows_to_the_last(
    client: httpx.AsyncClient, core: Scripted, prompts: list[str]
) -> None:
    """Tokens, not pieces: those of a step that came together are one piece."""
    core.cached_tokens, core.tokens_per_piece = 2, 3
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {**COMPLETION, "prompt": prompts, "stream": True, "stream_options": options}
    *chunks, last, _ = events(await client.post("/v1/completions", json=body))
    total = len(core.text.encode(ANSWER)) * len(prompts)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts[0] == 3
    assert counts == sorted(counts)
    assert chunks[-1]["usage"] == last["usage"]
    assert last["usage"]["completion_tokens"] == total > len(chunks)
    for chunk in chunks:
        assert chunk["usage"]["prompt_tokens"] == sum(len(job.prompt_token_ids) for job in core.jobs)
    cached = [chunk["usage"]["prompt_tokens_details"]["cached_tokens"] for chunk in chunks]
    assert cached[0] == 2, "of the one that has said something"
    assert cached[-1] == 2 * len(prompts)


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


async def test_models_are_listed_and_found(client: httpx.AsyncClient) -> None:
    listed = (await client.get("/v1/models")).json()
    assert [(entry["id"], entry["object"], entry["max_model_len"]) for entry in listed["data"]] == [
        ("tiny", "model", 64)
    ]
    assert (await client.get("/v1/models/tiny")).json() == listed["data"][0]
    assert (await client.get("/v1/models/a/b")).status_code == 404


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


async def test_case_59_readiness_names_its_reason_while_liveness_holds(core: Scripted, clock: ManualClock) -> None:
    async with client_of(core, clock, unready="no decode worker is connected") as client:
        ready = await client.get("/ready")
        assert (ready.status_code, ready.text) == (503, "no decode worker is connected\n")
        assert (await client.get("/health")).status_code == 200


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
