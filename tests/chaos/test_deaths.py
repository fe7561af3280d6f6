"""Workers that die, freeze or fail in the middle of something: a detour, or a clear error; never a fake end."""

import asyncio
import signal
from itertools import count

import grpc
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace import metrics
from tests.chaos.stage import MARKS, SILENT_SECONDS, STALL_SECONDS, Fault, Stage, prompt, text_of, until

pytestmark = MARKS


async def serving(address: str) -> bool:
    async with grpc.aio.insecure_channel(address) as channel:
        reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=20)
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


async def not_ready(stage: Stage) -> bool:
    return (await stage.http.get(f"{stage.router.http}/ready")).status_code == 503


async def test_case_45_a_decode_worker_killed_in_mid_stream_is_an_error_and_no_end(stage: Stage) -> None:
    """To the SDK, and on the wire: the error, and no [DONE]."""
    await stage.d0.faults(Fault(point="step", action="delay", seconds=0.02))
    body = {"model": "tiny", "prompt": prompt("raw", 20), "max_tokens": 300, "stream": True, "ignore_eos": True}
    stream = await stage.ask("killed", 20, max_tokens=300, stream=True)
    await anext(stream)
    lines: list[str] = []

    async def read() -> None:
        async for chunk in stream:
            assert all(choice.finish_reason is None for choice in chunk.choices)

    async with stage.http.stream("POST", f"{stage.router.http}/v1/completions", json=body) as response:
        async for line in response.aiter_lines():
            lines += [line] if line else []
            if len(lines) == 5:
                stage.d0.kill()
    with pytest.raises(openai.APIError, match="d0 is lost"):
        await asyncio.wait_for(read(), 20)
    assert response.status_code == 200
    assert lines[-1].startswith('data: {"error":')
    assert not any("[DONE]" in line for line in lines)
    await stage.respawn("d0")


async def test_case_59_a_frozen_worker_makes_the_router_unready_within_its_bound(stage: Stage) -> None:
    stage.d0.kill(signal.SIGSTOP)
    try:
        await until(lambda: not_ready(stage), SILENT_SECONDS + 3)
        answer = await stage.http.get(f"{stage.router.http}/ready")
        assert "no worker that decodes is connected" in answer.text
        assert not await serving(stage.router.grpc)
        assert (await stage.http.get(f"{stage.router.http}/health")).status_code == 200
        with pytest.raises(openai.InternalServerError, match="no worker that decodes is ready"):
            await stage.ask("nobody")
    finally:
        stage.d0.kill(signal.SIGCONT)
    await stage.until_ready()
    assert await serving(stage.router.grpc)
    assert (await stage.ask("again")).choices[0].finish_reason == "length"


async def test_case_59_a_worker_that_stands_still_says_so_within_its_bound_and_the_router_names_it(
    stage: Stage,
) -> None:
    await stage.d0.faults(Fault(point="step", action="delay", seconds=0.05))
    stream = await stage.ask("stands", 20, max_tokens=60, stream=True)
    await anext(stream)
    await stage.d0.faults(Fault(point="step", action="pause"))

    async def not_serving() -> bool:
        return not await serving(stage.d0.process.address)

    await until(not_serving, STALL_SECONDS + 3)
    assert "no step finished" in (await stage.d0.describe()).unhealthy_reason
    await until(lambda: not_ready(stage), 3)
    assert "d0: no step finished" in (await stage.http.get(f"{stage.router.http}/ready")).text
    assert not await serving(stage.router.grpc)
    assert (await stage.http.get(f"{stage.router.http}/health")).status_code == 200
    await stage.d0.faults()
    chunks = [chunk async for chunk in stream]
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["length"]
    await stage.until_ready()
    await until(lambda: serving(stage.d0.process.address), 5)


async def test_case_59_a_step_that_raises_ends_the_worker_and_tells_its_requests(stage: Stage) -> None:
    await stage.d0.faults(Fault(point="step", action="delay", seconds=0.02))
    asking = [asyncio.create_task(stage.ask(f"raised{number}", 20, max_tokens=300)) for number in range(3)]

    async def all_decode() -> bool:
        return (await stage.router_samples())[metrics.IN_FLIGHT, "decode"] == 3

    await until(all_decode)
    await stage.d0.faults(Fault(point="step", action="raise"))
    done = await asyncio.gather(*asking, return_exceptions=True)
    assert all(isinstance(error, openai.InternalServerError) for error in done), done
    assert await asyncio.wait_for(stage.d0.process.process.wait(), 10) == 1
    await until(lambda: not_ready(stage), 5)
    assert await serving(stage.p0.process.address), "its own health does not depend on its peers"
    await stage.respawn("d0")


async def test_case_12_52_requests_parked_on_a_frozen_prefill_worker_free_their_slots(stage: Stage) -> None:
    """More than may run at once wait for a prefill worker that is frozen: all are computed alone in the end."""
    await stage.ask("warm", 20)
    stage.p0.kill(signal.SIGSTOP)
    try:
        asking = [asyncio.create_task(stage.ask(f"parked{number}", 40)) for number in range(12)]
        done = await asyncio.wait_for(asyncio.gather(*asking), 30)
        assert all(answer.choices[0].finish_reason == "length" for answer in done)
        assert await serving(stage.d0.process.address)
        assert (await stage.ask("behind", 40)).choices[0].finish_reason == "length"
        assert not await not_ready(stage)
    finally:
        stage.p0.kill(signal.SIGCONT)
    await stage.until_ready()


async def test_a_prefill_worker_that_restarts_in_mid_prompt_costs_only_time(stage: Stage) -> None:
    async with stage.decoding():
        await stage.p0.faults(Fault(point="step", action="pause"))
        name, asking = await stage.hand_over(60)
        stage.p0.kill()
        answer = await asyncio.wait_for(asking, 20)
    await stage.respawn("p0")
    await stage.reset_caches()
    assert text_of(answer) == text_of(await stage.ask(name, 60))


async def test_a_ticket_that_never_came_is_noticed_long_before_any_deadline(stage: Stage) -> None:
    async def num_failed() -> float:
        return (await stage.worker_samples("d0")).get((metrics.HANDOFF_FAILURES, "TransferFailed"), 0.0)

    before = await num_failed()
    numbers = count()

    async def one_was_lost() -> bool:
        answer = await asyncio.wait_for(stage.ask(f"unheard{next(numbers)}", 60), 10)
        assert answer.choices[0].finish_reason == "length"
        return await num_failed() > before

    async with stage.decoding(Fault(point="ticket", action="drop", times=1)):
        await until(one_was_lost, 30)
