"""Workers that are told to go while others still need what they hold."""

import asyncio
import signal

from headrace import metrics
from tests.chaos.stage import MARKS, Fault, Stage, prefilled_by, text_of, until

pytestmark = MARKS


async def test_case_60_a_prefill_worker_that_drains_stays_until_its_pins_are_pulled(stage: Stage) -> None:
    async with stage.decoding(Fault(point="pull", action="pause")):
        name, asking = await stage.hand_over(60)

        async def pinned() -> bool:
            return (await stage.worker_samples("p0"))[metrics.KV_BLOCKS, "pinned"] >= 7

        await until(pinned)
        stage.p0.kill(signal.SIGTERM)

        async def draining() -> bool:
            return bool((await stage.p0.describe()).draining)

        await until(draining)
        await stage.d0.faults()
        answer = await asking
    assert prefilled_by(answer) == "p0"
    assert await asyncio.wait_for(stage.p0.process.process.wait(), 10) == 0
    await stage.respawn("p0")
    await stage.reset_caches()
    assert text_of(await stage.ask(name, 60)) == text_of(answer)


async def test_case_60_a_decode_worker_that_drains_finishes_its_hand_offs_and_streams(stage: Stage) -> None:
    await stage.d0.faults(Fault(point="step", action="delay", seconds=0.01))
    streams = [await stage.ask(f"live{number}", 20, max_tokens=60, stream=True) for number in range(3)]
    waiting = asyncio.create_task(stage.ask("handed", 60))

    async def here() -> bool:
        return (await stage.worker_samples("d0"))[metrics.IN_FLIGHT, "request"] == 4

    await until(here)
    stage.d0.kill(signal.SIGTERM)
    for stream in streams:
        chunks = [chunk async for chunk in stream]
        assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["length"]
    assert (await waiting).choices[0].finish_reason == "length"
    assert await asyncio.wait_for(stage.d0.process.process.wait(), 10) == 0
    await stage.respawn("d0")
