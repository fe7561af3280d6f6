"""A router process before real workers, asked why: what it says of a request agrees with what the client got, and what it
logged is made again by the command."""

import asyncio
import pathlib
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import pytest

from headrace import metrics
from headrace.values import Usage
from router.decisions.codec import decode
from router.decisions.record import from_line
from router.explanations import Explanation
from tests.e2e.routers import running_router
from tests.tiny import make_checkpoint
from tests.worker_process import a_worker_process

pytestmark = [pytest.mark.torch, pytest.mark.redis, pytest.mark.timeout(300)]

BLOCK = 8
PROMPT = [(7 * at) % 200 for at in range(5 * BLOCK + 3)]


@asynccontextmanager
async def serving(folder: pathlib.Path, redis_url: str, log: pathlib.Path) -> AsyncIterator[httpx.AsyncClient]:
    """1 prefill + 1 decode worker, both known to the router."""
    checkpoint = make_checkpoint(folder / "model")
    sections = {"name": "why", "redis": {"url": redis_url}, "handoff": {"local_prefill_max_tokens": 0}}
    async with AsyncExitStack() as stack:
        for worker, role in (("p0", "prefill"), ("d0", "decode")):
            options = ("--block-size", str(BLOCK), "--num-blocks", "96", "--role", role)
            options += ("--redis-url", redis_url, "--cluster", "why")
            await stack.enter_async_context(a_worker_process(checkpoint, folder, worker, *options))
        router = await stack.enter_async_context(
            running_router(
                checkpoint, folder / "headrace.yaml", [], sections, decision_log={"path": str(log), "fraction": 1.0}
            )
        )
        async with httpx.AsyncClient(base_url=router.http, timeout=60, trust_env=False) as client:
            async with asyncio.timeout(60):
                ready = [f'{metrics.WORKERS_READY}{{role="{role}"}} 1.0' for role in ("prefill", "decode")]
                while not _has(ready, (await client.get("/metrics")).text):
                    pass
            yield client


def _has(lines: list[str], text: str) -> bool:
    return all(line in text for line in lines)


async def ask(client: httpx.AsyncClient, name: str) -> Any:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    response = await client.post(
        "/v1/completions", json={**body, "headrace": {"timeline": True}}, headers={"X-Request-Id": name}
    )
    assert response.status_code == 200, response.text
    return response.json()


async def why(client: httpx.AsyncClient, name: str) -> Explanation:
    response = await client.get(f"/why/{name}")
    assert response.status_code == 200, response.text
    return decode(Explanation, response.json())


async def command(*arguments: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "cluster.cli",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, said.decode()


def predicted(explanation: Explanation) -> int:
    """What was counted on of the worker that prefilled, and of what it was to pull."""
    last, source = (
        explanation.whys[-1],
        explanation.timeline.worker.prefill_worker or explanation.timeline.decode_worker,
    )
    assert last.chosen is not None
    pulled = last.chosen.pulled_tokens if explanation.timeline.worker.prefill_worker else 0
    return pulled + next(one.cached_tokens for one in last.candidates if one.worker_id == source)


async def test_why_agrees_with_the_answer_and_the_log_is_made_again(tmp_path: pathlib.Path, redis_url: str) -> None:
    log = tmp_path / "decisions.jsonl"
    names = []
    async with serving(tmp_path, redis_url, log) as client:
        while True:  # until the caches' events have come
            names.append(f"r{len(names)}")
            answer = await ask(client, names[-1])
            explanation = await why(client, names[-1])
            usage, path = answer["usage"], answer["headrace"]["timeline"][0]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            assert explanation.outcome == "finished"
            assert explanation.usage == Usage(usage["prompt_tokens"], usage["completion_tokens"], cached)
            assert explanation.timeline.decode_worker == path["decode_worker"] == "d0"
            assert explanation.timeline.worker.prefill_worker == path["prefill_worker"]
            assert explanation.ttft_seconds is not None
            assert 0 < explanation.ttft_seconds <= explanation.seconds
            if len(names) == 1:
                chosen = explanation.whys[0].chosen
                assert chosen is not None
                assert (chosen.prefill, chosen.decode, predicted(explanation), cached) == ("p0", "d0", 0, 0)
            elif predicted(explanation):
                assert predicted(explanation) == cached == 5 * BLOCK
                break
        status, said = await command("why", answer["id"], "--router", str(client.base_url))
        assert status == 0, said
        assert f"{names[-1]}  finished: 43 prompt tokens, 6 generated" in said
        assert "what happened" in said
        status, said = await command("why", "nobody", "--router", str(client.base_url))
        assert (status, said) == (1, "headrace: no router knows request 'nobody', or no longer\n")

    logged = [from_line(line) for line in log.read_text(encoding="utf-8").splitlines()]
    assert [decision.request_id for decision in logged] == names
    assert logged[-1].why == explanation.whys[0]
    status, said = await command("replay-decision", str(log))
    assert status == 0, said
    assert said.splitlines()[-1] == f"{len(names)} decisions made again, 0 differ"
