"""Clients that go away, in every phase: what was held for them is free again, and nobody else notices."""

import asyncio
import time
from typing import Any

import httpx
import openai
import pytest

from headrace import metrics
from tests.chaos.stage import (
    CHUNK,
    MARKS,
    ORDINARY,
    STORM_SECONDS,
    TRANSFER_SECONDS,
    Fault,
    Stage,
    prompt,
    text_of,
    until,
)

pytestmark = MARKS


class Watch:
    """When each request was last seen on the decode or the prefill worker, by the name that workers have for it."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self.last_seen: dict[str, float] = {}

    async def look(self) -> None:
        while True:
            for member in self._stage.workers.values():
                asked_at = time.monotonic()
                described = await member.describe()
                for key in (*described.requests, *described.tickets):
                    self.last_seen[key.request_id] = asked_at
            await asyncio.sleep(0.02)


@pytest.mark.timeout(90 + 2 * STORM_SECONDS)
async def test_case_06_an_abort_storm_holds_no_slot_and_leaves_the_goodput_as_it_was(stage: Stage) -> None:
    """Clients wait a second each, three times as many as can be served come: most leave, before they run or in the middle.
    None of those may be on any worker a second after it left, and the router had its turn."""
    await stage.d0.faults(Fault(point="step", action="delay", seconds=0.02))
    await stage.goodput(1)
    before = await stage.goodput(4)
    rate = 3 * before.a_second
    left: dict[str, tuple[float, float]] = {}

    async def client(number: int) -> None:
        name = f"storm{number}"
        try:
            async with asyncio.timeout(1.0):
                await stage.ask(name, **ORDINARY)
        except TimeoutError:
            left_at, worker_name = time.monotonic(), await stage.worker_name(name)
            left[worker_name] = left_at, time.monotonic()
        except openai.RateLimitError:
            pass

    watch = Watch(stage)
    looking = asyncio.create_task(watch.look())
    await stage.storm(rate, client)
    after = await stage.goodput(4)
    looking.cancel()
    await asyncio.wait([looking])
    seen = [(watch.last_seen[name], *times) for name, times in left.items() if name in watch.last_seen]
    assert len(left) > STORM_SECONDS * rate / 3, "it was no storm"
    num_on_a_worker = sum(last_seen > left_at - 0.1 for last_seen, left_at, _ in seen)
    assert num_on_a_worker > rate / 3, "hardly one was on a worker when its client left"
    assert max(last_seen - heard_at for last_seen, _, heard_at in seen) < 1.0, "a slot was held for nobody"
    assert after.a_step >= 0.9 * before.a_step, (before, after)


TRANSFERS = {
    "a slow transfer": Fault(point="pull", action="delay", seconds=5.0),
    "a transfer that never ends": Fault(point="transfer.block", action="drop", at=3),
}


@pytest.mark.parametrize("transfer", TRANSFERS.values(), ids=TRANSFERS)
async def test_case_01_fifty_loads_aborted_in_mid_transfer_and_now_and_then_a_killed_prefill_worker(
    stage: Stage, transfer: Any
) -> None:
    """Twenty-five of each kind; every one is under way when its client leaves."""
    async with stage.decoding(transfer):

        async def in_transfer() -> bool:
            handing = (await stage.worker_samples("d0"))[metrics.IN_FLIGHT, "handoff"]
            return handing > 0 and (await stage.worker_samples("p0"))[metrics.KV_BLOCKS, "pinned"] > 0

        for number in range(25):
            _, asking = await stage.hand_over(60)
            await until(in_transfer)
            asking.cancel()
            await asyncio.wait([asking])
            assert asking.cancelled()
            if number == 12:
                stage.p0.kill()
                await stage.respawn("p0")
    await stage.clear()
    await stage.settled(2 * TRANSFER_SECONDS)
    assert (await stage.ask("load51", 60)).choices[0].finish_reason == "length"
    failures = await stage.worker_samples("d0")
    assert not failures.get((metrics.HANDOFF_FAILURES, "InternalError"))


async def test_case_05_an_abort_between_the_chunks_of_a_prompt(stage: Stage) -> None:
    async with stage.decoding():
        await stage.reset_caches()
        before = (await stage.p0.describe()).num_steps
        two_chunks = Fault(point="step", action="delay", times=2)
        await stage.p0.faults(two_chunks, Fault(point="step", action="pause"))
        name, asking = await stage.hand_over(4 * CHUNK)

        async def first_chunk_is_done() -> bool:
            """The second is under way then, and the third held."""
            return bool((await stage.p0.describe()).num_steps > before)

        async def ticket_is_gone() -> bool:
            return not (await stage.p0.describe()).tickets

        await until(first_chunk_is_done)
        asking.cancel()
        await asyncio.wait([asking])
        await until(ticket_is_gone)
    await stage.clear()
    await stage.settled()
    described = await stage.p0.describe()
    assert described.blocks.free + described.blocks.cached == 256
    assert described.blocks.cached <= 3 * CHUNK // 8, "the third chunk went on at last, the fourth was never made"
    again = text_of(await stage.ask(name, 4 * CHUNK))
    await stage.reset_caches()
    assert text_of(await stage.ask(name, 4 * CHUNK)) == again


async def finish_of(stream: Any) -> str:
    reasons = [choice.finish_reason async for chunk in stream for choice in chunk.choices]
    return str(reasons[-1])


async def test_case_07_one_cancel_in_mid_transfer_ends_that_request_alone(stage: Stage) -> None:
    """Beside streams that decode. (Many transfers, a quarter cancelled: tests/e2e/test_many_hand_offs.py.)"""
    async with stage.decoding(Fault(point="pull", action="pause")) as live:
        _, cancelled = await stage.hand_over(30)

        async def in_transfer() -> bool:
            handing = (await stage.worker_samples("d0"))[metrics.IN_FLIGHT, "handoff"]
            return handing == 1 and (await stage.worker_samples("p0"))[metrics.KV_BLOCKS, "pinned"] > 0

        await until(in_transfer)
        cancelled.cancel()
        await asyncio.wait([cancelled])
        await stage.d0.faults()
        finishes = [await finish_of(stream) for stream in live]
    assert cancelled.cancelled()
    assert finishes == ["length", "length"]
    assert (await stage.ask("after", 30)).choices[0].finish_reason == "length"
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
