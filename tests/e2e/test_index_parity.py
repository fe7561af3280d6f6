"""A router and real workers name the same blocks, whatever way a prompt comes and whoever computes it."""

import asyncio
import pathlib
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import httpx
import pytest

from headrace import config_file, metrics, store
from headrace.values import Role
from router.core import running_core
from tests.e2e.many_routers import BLOCK, a_pool, a_router, samples, until_in_step
from tests.e2e.routers import tiny_checkpoint
from tests.unit.router.stage import collect, job, open_text
from tests.unit.workers.rig import COMPATIBILITY, ENGINE, IDENTITY, a_request, a_worker

pytestmark = [pytest.mark.torch, pytest.mark.redis, pytest.mark.timeout(120)]

LONG = "The quick brown fox jumps over the lazy dog. " * 4
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}}
CHATS: dict[str, dict[str, Any]] = {
    "system": {"messages": [{"role": "system", "content": LONG}, {"role": "user", "content": "hi"}]},
    "parts": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": LONG}, {"type": "text", "text": "?"}]}]
    },
    "turns": {
        "messages": [
            {"role": "user", "content": LONG},
            {"role": "assistant", "content": "I see."},
            {"role": "user", "content": "And?"},
        ]
    },
    "tools": {
        "messages": [{"role": "user", "content": LONG}],
        "tools": [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}],
    },
    "arguments": {"messages": [{"role": "user", "content": LONG}], "chat_template_kwargs": {"enable_thinking": False}},
}


async def test_case_32_a_chat_that_is_asked_again_is_found_as_the_router_predicted(
    tmp_path: pathlib.Path, redis_url: str
) -> None:
    checkpoint = tiny_checkpoint(tmp_path)
    async with AsyncExitStack() as ends:
        workers = await ends.enter_async_context(a_pool(checkpoint, redis_url, "parity", num_prefill=1, num_decode=1))
        router = await ends.enter_async_context(a_router(checkpoint, tmp_path, redis_url, "parity", "parity"))
        http = await ends.enter_async_context(httpx.AsyncClient(base_url=router.http, trust_env=False, timeout=30))
        await until_in_step(http, router.http, workers)
        for name, chat in CHATS.items():
            found = []
            for _ in range(2):
                answer = await http.post("/v1/chat/completions", json={"model": "tiny", "max_tokens": 1, **chat})
                assert answer.status_code == 200, (name, answer.text)
                found.append(answer.json()["usage"])
                await until_in_step(http, router.http, workers)
            cached = found[1]["prompt_tokens_details"]["cached_tokens"]
            assert cached == (found[1]["prompt_tokens"] - 1) // BLOCK * BLOCK > 0, name
        counted = await samples(http, router.http)
        predicted = [value for (name, _), value in counted.items() if name == metrics.PREDICTED_CACHED_TOKENS]
        errors = [value for (name, _), value in counted.items() if name == metrics.INDEX_ERROR]
        assert sum(predicted) > 0
        assert not any(errors)


async def test_case_31_workers_of_two_block_sizes_are_each_matched_by_their_own_blocks(redis_url: str) -> None:
    prompt = a_request(length=40).prompt_token_ids
    async with AsyncExitStack() as ends:
        sizes = {"small": 4, "large": 16}
        for name, size in sizes.items():
            rig = await ends.enter_async_context(
                a_worker(
                    name,
                    role=Role.UNIFIED,
                    engine=ENGINE.model_copy(update={"block_size": size}),
                    identity=replace(IDENTITY, compatibility=replace(COMPATIBILITY, block_size=size)),
                    redis_url=redis_url,
                    redis_budget_seconds=2.0,
                    cluster="sizes",
                )
            )
            async with rig.router() as session:
                await session.submit(a_request(length=40, max_tokens=1)).end()
        following = store.connect(redis_url, budget_seconds=2.0)
        ends.push_async_callback(following.close)
        core = await ends.enter_async_context(
            running_core(
                config_file.parse("name: sizes\nmodel: m\npools: {d: {role: unified}}\n"),
                router_id="t",
                open_text=open_text,
                store=following,
            )
        )
        changed = asyncio.Event()
        core.sessions.listen(lambda worker_id: changed.set())
        async with asyncio.timeout(30):
            while any(
                core.sessions.find(name) is None or core.index.num_blocks(name) < 40 // size
                for name, size in sizes.items()
            ):
                changed.clear()
                await changed.wait()
        asked = replace(job("same", max_tokens=1), prompt_token_ids=prompt)
        assert (await collect(core.requests.stream(asked)))[-1].finish == "length"
        explanation = core.requests.why("same")
        assert explanation is not None
        held = {c.worker_id: c.cached_tokens for c in explanation.whys[0].candidates if c.role == "decode"}
        assert held == {"small": 39, "large": 32}
