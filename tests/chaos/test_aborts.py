"""Clients that go away, in every phase: what was held for them is free again, and nobody else notices."""

import asyncio
import random
import time
from contextlib import suppress
from typing import Any

import httpx
import openai
import pytest

from headrace import metrics
from tests.chaos.stage import CHUNK, Fault, Stage, prompt, text_of, until

pytestmark = [pytest.mark.torch, pytest.mark.redis, pytest.mark.timeout(120), pytest.mark.asyncio(loop_scope="session")]


async def gone_after(stage: Stage, seconds: float, name: str, **fields: Any) -> None:
    """Asks, and leaves: the connection is closed."""
    with suppress(TimeoutError, openai.APIError):
        async with asyncio.timeout(seconds):
            await stage.ask(name, **fields)


async def goodput(stage: Stage, seconds: float) -> float:
    """Answers a second that four clients get, who ask one after the other."""
    done, end = 0, time.monotonic() + seconds

    async def client(number: int) -> None:
        nonlocal done
        while time.monotonic() < end:
            await stage.ask(f"normal{number}", 20, max_tokens=16)
            done += 1

    began = time.monotonic()
    await asyncio.gather(*(client(number) for number in range(4)))
    return done / (time.monotonic() - began)


async def test_case_06_an_abort_storm_leaves_the_goodput_as_it_was(stage: Stage) -> None:
    await stage.d0.faults(Fault(point="step", action="delay", seconds=0.02))
    await goodput(stage, 1)
    before = await goodput(stage, 4)
    rate, storm = 3 * before, []
    for number in range(int(12 * rate)):
        storm.append(asyncio.create_task(gone_after(stage, 1.0, f"storm{number % 50}", length=20, max_tokens=60)))
        await asyncio.sleep(1 / rate)
    await asyncio.gather(*storm)
    began = time.monotonic()
    await stage.settled(5)
    assert time.monotonic() - began < 2, "decode slots of aborted requests"
    after = await goodput(stage, 4)
    assert after >= 0.9 * before, (before, after)


async def test_case_01_fifty_aborted_loads_and_now_and_then_a_killed_prefill_worker(stage: Stage) -> None:
    rng = random.Random(1)
    respawns: list[asyncio.Task[None]] = []
    async with stage.decoding(Fault(point="pull", action="delay", seconds=0.15), step_seconds=0.03):
        for number in range(50):
            await gone_after(stage, rng.uniform(0.01, 0.2), f"load{number}", length=60)
            if number in (10, 30):
                await asyncio.gather(*respawns)
                stage.p0.kill()
                respawns = [asyncio.create_task(stage.respawn("p0"))]
        await asyncio.gather(*respawns)
    await stage.clear()
    await stage.settled()
    assert (await stage.ask("load51", 60)).choices[0].finish_reason == "length"
    failures = await stage.worker_samples("d0")
    assert not failures.get((metrics.HANDOFF_FAILURES, "InternalError"))


async def test_case_05_an_abort_between_the_chunks_of_a_prompt(stage: Stage) -> None:
    await stage.p0.faults(Fault(point="step", action="delay", seconds=0.15))
    async with stage.decoding():
        await stage.reset_caches()
        name, asking = await stage.hand_over(4 * CHUNK)
        before = (await stage.p0.describe()).num_steps

        async def second_chunk_is_done() -> bool:
            return bool((await stage.p0.describe()).num_steps >= before + 2)

        await until(second_chunk_is_done)
        asking.cancel()
        await asyncio.wait([asking])
    await stage.clear()
    await stage.settled()
    described = await stage.p0.describe()
    assert described.blocks.free + described.blocks.cached == 256
    assert described.blocks.cached <= 3 * CHUNK // 8, "the third chunk may have been under way, the fourth was not"
    again = text_of(await stage.ask(name, 4 * CHUNK))
    await stage.reset_caches()
    assert text_of(await stage.ask(name, 4 * CHUNK)) == again


async def test_case_07_one_cancel_in_mid_transfer_ends_that_request_alone(stage: Stage) -> None:
    async with stage.decoding(Fault(point="pull", action="pause")):
        asking = [(await stage.hand_over(30))[1] for _ in range(3)]

        async def all_in_transfer() -> bool:
            handing = (await stage.worker_samples("d0"))[metrics.IN_FLIGHT, "handoff"]
            return handing == 3 and (await stage.worker_samples("p0"))[metrics.KV_BLOCKS, "pinned"] > 0

        await until(all_in_transfer)
        asking[1].cancel()
        await asyncio.wait([asking[1]])
        await stage.d0.faults()
        done = await asyncio.gather(*asking, return_exceptions=True)
    assert isinstance(done[1], asyncio.CancelledError)
    assert all(answer.choices[0].finish_reason == "length" for answer in (done[0], done[2])), done
    assert stage.d0.process.process.returncode is None
    assert stage.p0.process.process.returncode is None


@pytest.mark.parametrize("stream", [True, False])
async def test_case_44_a_client_that_goes_away_frees_its_slot_at_once(stage: Stage, stream: bool) -> None:
    await stage.d0.faults(Fault(point="step", action="delay", seconds=0.02))
    async with openai.AsyncOpenAI(
        base_url=f"{stage.router.http}/v1", api_key="none", http_client=httpx.AsyncClient(trust_env=False)
    ) as sdk:
        creating = asyncio.create_task(
            sdk.completions.create(
                model="tiny",
                prompt=prompt("leaves", 20),
                max_tokens=400,
                stream=stream,
                extra_body={"ignore_eos": True},
            )
        )
        if stream:
            answer: Any = await creating
            await anext(answer)
            await answer.close()
        else:

            async def decoding() -> bool:
                return bool((await stage.router_samples())[metrics.IN_FLIGHT, "decode"])

            await until(decoding)
            creating.cancel()
            await asyncio.wait([creating])
    began = time.monotonic()
    await stage.settled(4)
    assert time.monotonic() - began < 3, "400 tokens would have taken 8 s"
