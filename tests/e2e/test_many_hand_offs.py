"""A thousand hand-offs between real workers, 64 at a time, of random lengths, from two layouts, a quarter of them
cancelled at some moment: every block has the digest that it was announced with, on each of the ranks that hold it alike,
the others answer as one worker alone does, and nothing is held when all are over."""

import asyncio
import pathlib
import random
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from headrace.v1 import control_pb2
from headrace.values import Request, RequestKey, SamplingParams
from tests.session import Answer, Router, open_session
from tests.tiny import make_variant
from tests.worker_process import WorkerProcess, a_worker_process

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300), pytest.mark.asyncio]

BLOCK, CHUNK, NUM_BLOCKS = 8, 32, 256
SIZES = (
    *("--block-size", str(BLOCK), "--max-step-tokens", str(CHUNK), "--num-blocks", str(NUM_BLOCKS)),
    *("--max-num-seqs", "32", "--transfer-seconds", "60", "--pin-seconds", "60", "--digests"),
)
NUM_HAND_OFFS, CONCURRENCY, NUM_PROMPTS, MAX_LENGTH = 1000, 64, 24, 90
MARGIN = 1e-3


def prompts(draw: random.Random) -> list[Request]:
    sampling = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, num_logprobs=2)
    return [
        Request(RequestKey(f"alone-{number}"), tuple(draw.choices(range(3, 250), k=length)), sampling)
        for number, length in enumerate(draw.randint(1, MAX_LENGTH) for _ in range(NUM_PROMPTS))
    ]


def same(got: Answer, expected: Answer) -> None:
    assert got.error is None
    assert not got.lost
    assert got.finishes == expected.finishes
    for position, (ours, theirs) in enumerate(zip(got.tokens[0], expected.tokens[0], strict=True)):
        if ours != theirs:
            (_, first), (_, second) = expected.logprobs[0][position].top[:2]
            assert first - second < MARGIN
            return


async def nothing_held(worker: WorkerProcess) -> None:
    """Returns when its blocks are free or cached, all of them."""
    async with worker.control() as control, asyncio.timeout(20):
        while True:
            described = await control.Describe(control_pb2.DescribeRequest())
            blocks, load = described.blocks, described.load
            if blocks.free + blocks.cached == NUM_BLOCKS and not load.num_waiting and not load.num_running:
                return


async def test_a_thousand_hand_offs_leave_no_block_behind_and_change_no_answer(tmp_path: pathlib.Path) -> None:
    draw = random.Random(11)
    model = make_variant(tmp_path, "llama-mqa")
    async with AsyncExitStack() as stack:
        roles = {"d0": ("decode",), "p0": ("prefill",), "p1": ("prefill", "--tp", "2", "--pp", "2")}
        starting = [
            a_worker_process(model, tmp_path, name, "--role", role, *layout, *SIZES, forked=True)
            for name, (role, *layout) in roles.items()
        ]
        started = await asyncio.gather(*map(stack.enter_async_context, starting))
        workers = dict(zip(roles, started, strict=True))
        router = await stack.enter_async_context(open_session(workers["d0"].address))
        asked = prompts(draw)
        expected = [await router.submit(replace(each, cache_salt="alone")).end() for each in asked]
        places, num_cancelled = asyncio.Semaphore(CONCURRENCY), 0

        async def hand_off(number: int) -> None:
            nonlocal num_cancelled
            which, prefill = draw.randrange(NUM_PROMPTS), workers[draw.choice(("p0", "p1"))]
            # of one prompt in three what earlier ones left in the caches is found
            salt = draw.choice(("shared", f"own-{number}", f"own-{number}"))
            leaves = draw.choice((None, None, None, draw.randrange(40)))
            key = RequestKey(f"r{number}")
            async with places:
                request = replace(asked[which], key=key, prefill=prefill.target, cache_salt=salt)
                answer = router.submit(request)
                if leaves is None:
                    same(await answer.end(), expected[which])
                else:
                    num_cancelled += 1
                    await leave(router, answer, key, leaves)

        async with asyncio.TaskGroup() as tasks:
            for number in range(NUM_HAND_OFFS):
                tasks.create_task(hand_off(number))
        assert NUM_HAND_OFFS / 5 < num_cancelled < NUM_HAND_OFFS / 3
        for worker in workers.values():
            await nothing_held(worker)


async def leave(router: Router, answer: Answer, key: RequestKey, rounds: int) -> None:
    """Cancels it once the worker has taken so many messages more, whether or not it is over by then."""
    for _ in range(rounds):
        if answer.over:
            return
        await router.ping()
    router.cancel(key.request_id)
    await router.ping()
