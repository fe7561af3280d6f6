"""What well-known clients send and read: the openai package, langchain-openai, litellm, the AI SDK that agents such as
opencode are built on, and what was written for vLLM's server."""

import pathlib
import re
from typing import Any

import httpx
import pytest

from headrace.clock import ManualClock
from headrace.errors import DeadlineExceeded, HeadraceError, InternalError, Overloaded, WorkerLost
from router.text.vocabulary import Text
from tests.unit.router.checkpoints import byte_level, write
from tests.unit.router.edge.edges import CHAT, COMPLETION, client_of
from tests.unit.router.scripted import Scripted

EFFORT = "{{ reasoning_effort }} {{ messages[0]['content'] }}"


@pytest.mark.parametrize(
    "extra",
    [
        {"prediction": {"type": "content", "content": "The quick"}, "prompt_cache_options": {"ttl": "1h"}},
        {"store": False, "metadata": {"a": "b"}, "safety_identifier": "u", "prompt_cache_key": "k"},
        {"verbosity": "low", "reasoning_effort": "high", "service_tier": "auto", "parallel_tool_calls": False},
        {"temperature": 1, "top_p": 1, "n": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "stop": []},
        {"tools": [], "tool_choice": "auto", "logit_bias": {}, "response_format": {"type": "text"}},
        {"logprobs": False, "top_logprobs": 0},
        {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "length_penalty": 1.0, "bad_words": []},
        {"skip_special_tokens": True, "continue_final_message": False, "return_tokens_as_token_ids": False},
        {"include_reasoning": True, "add_generation_prompt": True, "return_token_ids": False},
    ],
)
async def test_what_changes_nothing_here_is_accepted_and_changes_nothing(
    client: httpx.AsyncClient, core: Scripted, extra: dict[str, Any]
) -> None:
    for body in (CHAT, {**CHAT, **extra}):
        answer = await client.post("/v1/chat/completions", json={**body, "seed": 7})
        assert answer.status_code == 200, answer.text
    plain, given = core.jobs
    assert (given.sampling, given.prompt_token_ids, given.n) == (plain.sampling, plain.prompt_token_ids, plain.n)


@pytest.mark.parametrize(
    "extra",
    [
        {"audio": {"voice": "a", "format": "wav"}},
        {"modalities": ["text", "audio"]},
        {"web_search_options": {}},
        {"moderation": {"model": "m"}},
        {"continue_final_message": True},
        {"bad_words": ["fox"]},
        {"guided_json": {"type": "object"}},
        {"structured_outputs": {"regex": "a"}},
        {"truncate_prompt_tokens": 5},
        {"top_k": -2},
        {"reasoning_effort": 5},
    ],
)
async def test_what_would_change_the_answer_is_refused_by_name(
    client: httpx.AsyncClient, core: Scripted, extra: dict[str, Any]
) -> None:
    answer = await client.post("/v1/chat/completions", json={**CHAT, **extra})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, next(iter(extra)))
    assert core.jobs == []


@pytest.mark.parametrize(
    ("body", "effort"),
    [
        ({"reasoning_effort": "low"}, "low"),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"other": 1}}, "low"),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}}, "high"),
        ({"reasoning_effort": None}, ""),
        ({}, ""),
    ],
)
async def test_a_template_that_reads_the_effort_is_given_it(
    tmp_path: pathlib.Path, clock: ManualClock, body: dict[str, Any], effort: str
) -> None:
    core = Scripted(Text.load(write(tmp_path, byte_level(), EFFORT)))
    async with client_of(core, clock) as client:
        answer = await client.post("/v1/chat/completions", json={**CHAT, **body})
    assert answer.status_code == 200, answer.text
    assert core.text.decode(core.jobs[0].prompt_token_ids) == f"{effort} hi"


@pytest.mark.parametrize("change", [{"prompt": [5] * 64}, {"max_tokens": 64}])
async def test_an_agent_knows_that_its_conversation_is_too_long(
    client: httpx.AsyncClient, change: dict[str, Any]
) -> None:
    """By the code or by one of these phrases, in any case: then it makes it shorter, and tries again."""
    answer = await client.post("/v1/completions", json={**COMPLETION, **change})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
    assert re.search(r"This model's maximum context length is \d+ tokens", error["message"], re.IGNORECASE)
    assert "prompt is too long" in error["message"]


@pytest.mark.parametrize(
    ("error", "status", "retry"),
    [
        (DeadlineExceeded("not finished within 2 s"), 504, "false"),
        (InternalError("internal error"), 500, "false"),
        (Overloaded("the queue is full"), 429, None),
        (WorkerLost("the worker is gone"), 503, None),
    ],
)
async def test_the_openai_package_is_told_what_not_to_send_again(
    client: httpx.AsyncClient, core: Scripted, error: HeadraceError, status: int, retry: str | None
) -> None:
    """It would try anything above 499 twice more, and what ran out of its time would take as long again."""
    core.error = error
    answer = await client.post("/v1/chat/completions", json=CHAT)
    assert (answer.status_code, answer.headers.get("x-should-retry")) == (status, retry)
    assert ("retry-after" in answer.headers) == (retry is None)
