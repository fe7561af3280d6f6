"""More than there is room for: refused early, or served late; what waits is no fault, and memory stays flat."""

import asyncio
import pathlib
from collections.abc import AsyncIterator

import openai
import pytest
import pytest_asyncio

from headrace import metrics
from tests.chaos.stage import MAX_QUEUE, Fault, Stage, a_stage, sdk_of, until

pytestmark = [pytest.mark.torch, pytest.mark.redis, pytest.mark.timeout(120), pytest.mark.asyncio(loop_scope="session")]


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


async def test_case_54_beyond_the_queue_all_is_refused_with_a_time_to_come_back(stage: Stage) -> None:
    await stage.d0.faults(Fault(point="step", action="delay", seconds=0.005))
    router = stage.router.process.pid
    refused: list[openai.RateLimitError] = []

    async def ask(number: int) -> bool:
        try:
            return (await stage.ask(f"burst{number}", 20)).choices[0].finish_reason == "length"
        except openai.RateLimitError as error:
            refused.append(error)
            return False

    await asyncio.gather(*(ask(number) for number in range(64)))
    before = resident_bytes(router)
    done = await asyncio.wait_for(asyncio.gather(*(ask(number) for number in range(10 * MAX_QUEUE))), 60)
    assert sum(done) >= MAX_QUEUE
    assert len(refused) >= 2 * MAX_QUEUE
    assert all(float(error.response.headers["retry-after"]) >= 1 for error in refused)
    assert resident_bytes(router) - before < 64 * 2**20

    patient = sdk_of(stage.router, max_retries=8, timeout=60)
    async with patient:
        crowd = [asyncio.create_task(ask(number)) for number in range(2 * MAX_QUEUE)]
        answer = await patient.completions.create(model="tiny", prompt=[5] * 20, max_tokens=4)
        assert answer.choices[0].finish_reason is not None
        await asyncio.gather(*crowd)


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
