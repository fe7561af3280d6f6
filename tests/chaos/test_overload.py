"""More than there is room for: refused early, or served late; what waits is no fault, and memory stays flat."""

import asyncio
import math
import pathlib
import time
from collections.abc import AsyncIterator

import openai
import pytest
import pytest_asyncio

from headrace import metrics
from router.decisions.room import WORKER_BACKLOG
from tests.chaos.stage import (
    MARKS,
    MAX_NUM_SEQS,
    MAX_QUEUE,
    ORDINARY,
    STORM_SECONDS,
    Fault,
    Stage,
    a_stage,
    sdk_of,
    until,
)

pytestmark = MARKS


async def test_case_14_who_waits_for_a_slot_is_not_dead(stage: Stage) -> None:
    """The last of 32 waits for longer than a peer may be silent."""
    await stage.d0.faults(Fault(point="step", action="delay", seconds=0.01))
    before = await stage.worker_samples("d0")
    asking = [stage.ask(f"wave{number}", 40, max_tokens=40) for number in range(32)]
    done = await asyncio.wait_for(asyncio.gather(*asking), 60)
    assert all(answer.choices[0].finish_reason == "length" for answer in done)
    after = await stage.worker_samples("d0")
    failures = [key for key in after if key[0] == metrics.HANDOFF_FAILURES and after[key] > before.get(key, 0)]
    assert not failures


def resident_bytes(pid: int) -> int:
    return int(pathlib.Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


@pytest.mark.timeout(90 + 2 * STORM_SECONDS)
async def test_case_54_ten_times_what_can_be_served_is_answered_in_time_or_refused_at_once(stage: Stage) -> None:
    """Each outcome is one of two, what is accepted waits no longer than the queue is long, and memory stays flat."""
    await stage.d0.faults(Fault(point="step", action="delay", seconds=0.02))
    await stage.goodput(1)
    capacity = (await stage.goodput(4)).a_second
    asked_at: list[float] = []
    done_at: list[float] = []
    waited: list[float] = []
    refused: list[float] = []
    others: list[Exception] = []
    memory: list[int] = []

    async def client(number: int) -> None:
        began = time.monotonic()
        asked_at.append(began)
        if number % math.ceil(capacity) == 0:
            memory.append(resident_bytes(stage.router.process.pid))
        try:
            answer = await stage.ask(f"burst{number}", **ORDINARY)
            assert answer.choices[0].finish_reason == "length"
            done_at.append(time.monotonic())
            waited.append(done_at[-1] - began)
        except openai.RateLimitError as error:
            refused.append(float(error.response.headers["retry-after"]))
        except Exception as error:
            others.append(error)

    await stage.storm(10 * capacity, client)
    assert not others
    assert len(refused) > 0.5 * (len(done_at) + len(refused)), "it was no overload"
    assert min(refused) >= 1
    num_served = sum(at < asked_at[-1] for at in done_at)
    assert num_served >= 0.5 * capacity * STORM_SECONDS, "those who are refused cost those who are not"
    seconds_each = (done_at[-1] - asked_at[0]) / len(done_at)
    assert max(waited) < 1.5 * (MAX_QUEUE + MAX_NUM_SEQS + WORKER_BACKLOG) * seconds_each + 1
    third = len(memory) // 3
    assert max(memory[third:]) - memory[third] < 16 * 2**20


async def test_case_54_the_sdk_comes_back_when_it_is_told_to(stage: Stage) -> None:
    await stage.d0.faults(Fault(point="step", action="delay", seconds=0.005))
    refused: list[openai.RateLimitError] = []

    async def ask(number: int) -> None:
        try:
            await stage.ask(f"crowd{number}", 20)
        except openai.RateLimitError as error:
            refused.append(error)

    async with sdk_of(stage.router, max_retries=8, timeout=60) as patient:
        crowd = [asyncio.create_task(ask(number)) for number in range(3 * MAX_QUEUE)]
        await until(lambda: answered(refused))
        answer = await patient.completions.create(model="tiny", prompt=[5] * 20, max_tokens=4)
        assert answer.choices[0].finish_reason is not None
        await asyncio.gather(*crowd)


async def answered(refused: list[openai.RateLimitError]) -> bool:
    return bool(refused)


@pytest_asyncio.fixture(loop_scope="session")
async def tight(tmp_path: pathlib.Path) -> AsyncIterator[Stage]:
    """A decode pool a tenth of the prefill pool."""
    async with a_stage(tmp_path, decode={"num-blocks": 25, "max-num-seqs": 8}) as stage:
        yield stage
        await stage.settled()


async def test_case_16_19_a_small_decode_pool_bounds_what_is_pinned_and_all_is_served(tight: Stage) -> None:
    """Pulls wait for blocks, what runs is preempted: the prefill worker's pins stay within their bound."""
    pinned: list[float] = []

    async def all_over() -> bool:
        pinned.append((await tight.worker_samples("p0"))[metrics.KV_BLOCKS, "pinned"])
        return asking.done()

    asking = asyncio.ensure_future(
        asyncio.gather(*(tight.ask(f"steady{number}", 60, max_tokens=60) for number in range(24)))
    )
    await until(all_over, 60)
    done = asking.result()
    assert all(answer.choices[0].finish_reason == "length" for answer in done)
    assert max(pinned) <= 0.5 * 256
    assert (await tight.d0.describe()).num_preemptions > 0
