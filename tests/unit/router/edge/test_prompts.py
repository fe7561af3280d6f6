"""What a chat or a prompt becomes before any worker sees it, the same at both edges."""

import pathlib
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from tokenizers import processors

from headrace.client import AsyncClient
from headrace.clock import ManualClock
from router.edge.common import INLINE_CHARACTERS, encode
from router.text.vocabulary import Text
from tests.unit.router.checkpoints import SPECIAL, byte_level, write
from tests.unit.router.edge.edges import CHAT, COMPLETION, client_of, collected, serving
from tests.unit.router.scripted import Scripted, make_edge

BOS, BOS_ID = SPECIAL[0], 0
TEMPLATE = (
    "{{ '" + BOS + "' }}{% for tool in tools or [] %}[{{ tool['function']['name'] }}]{% endfor %}"
    "{{ messages[0]['content'] }}"
)
TOOLS = [{"type": "function", "function": {"name": "paris", "parameters": {"type": "object"}}}]
MESSAGES = CHAT["messages"]
Ask = Callable[..., Awaitable[list[int]]]


@pytest.fixture
def core(tmp_path: pathlib.Path) -> Scripted:
    """Its tokenizer begins every text with a BOS where it may, and so does its template."""
    tokenizer = byte_level()
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, BOS_ID)])
    return Scripted(Text.load(write(tmp_path, tokenizer, TEMPLATE)))


@pytest.fixture(params=["http", "grpc"])
def ask(request: pytest.FixtureRequest, core: Scripted, clock: ManualClock) -> Ask:
    """The prompt that a call becomes: a chat, or a completion where `prompt` is given."""

    async def over_http(prompt: str | None = None, **fields: Any) -> list[int]:
        path, body = ("/v1/chat/completions", CHAT) if prompt is None else ("/v1/completions", COMPLETION)
        async with client_of(core, clock) as client:
            answer = await client.post(path, json={**body, **({} if prompt is None else {"prompt": prompt}), **fields})
        assert answer.status_code == 200, answer.text
        return list(core.jobs[-1].prompt_token_ids)

    async def over_grpc(prompt: str | None = None, **fields: Any) -> list[int]:
        async with serving(core) as address, AsyncClient(address) as client:
            await collected(client.chat(MESSAGES, **fields) if prompt is None else client.generate(prompt, **fields))
        return list(core.jobs[-1].prompt_token_ids)

    return over_http if request.param == "http" else over_grpc


async def test_case_32_tools_reach_the_template(ask: Ask, core: Scripted) -> None:
    prompt = await ask(tools=TOOLS)
    assert prompt == core.text.encode(f"{BOS}[paris]hi", add_special_tokens=False)
    assert await ask() == core.text.encode(f"{BOS}hi", add_special_tokens=False)


async def test_tools_that_may_not_be_called_are_none_to_the_template(core: Scripted, clock: ManualClock) -> None:
    async with client_of(core, clock) as client:
        for choice in ("none", "auto"):
            await client.post("/v1/chat/completions", json={**CHAT, "tools": TOOLS, "tool_choice": choice})
    shown = [core.text.render(MESSAGES, tools) for tools in (None, TOOLS)]
    assert [list(job.prompt_token_ids) for job in core.jobs] == [
        core.text.encode(text, add_special_tokens=False) for text in shown
    ]


async def test_a_chat_has_the_bos_of_its_template_alone(ask: Ask) -> None:
    assert (await ask()).count(BOS_ID) == 1


async def test_a_prompt_has_the_bos_of_the_tokenizer(ask: Ask, core: Scripted) -> None:
    prompt = await ask(prompt="hi")
    assert prompt == [BOS_ID, *core.text.encode("hi", add_special_tokens=False)]


@pytest.mark.parametrize("characters", [1, INLINE_CHARACTERS + 1])
async def test_a_bos_is_added_where_it_is_asked_for_to_short_texts_and_to_long_ones(
    core: Scripted, clock: ManualClock, characters: int
) -> None:
    """These are encoded on a thread."""
    model = make_edge(core.text, core, clock=clock).models.get("tiny")
    plain = await encode(model, "a" * characters, add_special_tokens=False)
    assert BOS_ID not in plain
    assert await encode(model, "a" * characters, add_special_tokens=True) == [BOS_ID, *plain]
