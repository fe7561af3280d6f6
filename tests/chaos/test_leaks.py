"""After two hundred requests of every kind: as many tasks, open files and blocks as before."""

import asyncio
from contextlib import suppress

import openai

from headrace import metrics
from tests.chaos.stage import MARKS, Stage, num_fds, sdk_of, until

pytestmark = MARKS


async def mixed(stage: Stage, count: int) -> None:
    """Whole answers, streams, streams left in the middle, calls left at once, and bad requests, over connections of its
    own."""
    async with sdk_of(stage.router, max_retries=0, timeout=60) as sdk:
        limit = asyncio.Semaphore(12)

        async def one(number: int) -> None:
            body = {"model": "tiny", "prompt": [number % 200 + 3] * (10 + number % 60), "max_tokens": 6}
            async with limit:
                with suppress(openai.APIError, TimeoutError):
                    match number % 5:
                        case 0:
                            await sdk.completions.create(**body)
                        case 1:
                            async for _ in await sdk.completions.create(**body, stream=True):
                                pass
                        case 2:
                            stream = await sdk.completions.create(**{**body, "max_tokens": 300}, stream=True)
                            await anext(stream)
                            await stream.close()
                        case 3:
                            async with asyncio.timeout(0.01 * (number % 7)):
                                await sdk.completions.create(**body)
                        case _:
                            await sdk.completions.create(**body, temperature=99)

        await asyncio.gather(*(one(number) for number in range(count)))


async def test_case_03_two_hundred_mixed_requests_leave_nothing_behind(stage: Stage) -> None:
    await mixed(stage, 40)
    await stage.settled()
    pids = {"router": stage.router.process.pid, **{name: member.pid for name, member in stage.workers.items()}}

    async def count() -> dict[str, float]:
        tasks = {"router": (await stage.router_samples())[metrics.TASKS, ""]}
        tasks |= {name: (await stage.worker_samples(name))[metrics.TASKS, ""] for name in stage.workers}
        return {f"{name} tasks": n for name, n in tasks.items()} | {
            f"{name} files": num_fds(pid) for name, pid in pids.items()
        }

    before = await count()
    now: dict[str, float] = {}

    async def as_before() -> bool:
        nonlocal now
        now = await count()
        return all(now[what] <= before[what] + 1 for what in now)  # who scrapes is a task and a socket too

    await mixed(stage, 200)
    await stage.settled()
    try:
        await until(as_before, 10)
    except TimeoutError:
        raise AssertionError(f"{before} before, {now} after") from None
