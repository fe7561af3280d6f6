"""A prefill worker that is killed, frozen or told to fail, as its decode worker lives through it. Real processes."""

import asyncio
import os
import pathlib
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from headrace.errors import WorkerLost
from headrace.v1 import control_pb2
from headrace.values import Request, RequestKey, SamplingParams
from tests.session import Router, open_session
from tests.tiny import make_checkpoint
from tests.worker_process import WorkerProcess, a_worker_process

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]

OPTIONS = (
    *("--block-size", "8", "--max-step-tokens", "16", "--num-blocks", "64", "--fault-hooks"),
    *("--transfer-seconds", "2", "--pin-seconds", "2"),
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"))


def request(name: str) -> Request:
    tokens = tuple((sum(name.encode()) * 13 + 7 * i) % 200 for i in range(60))
    return Request(RequestKey(name), tokens, SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True))


def children_of(pid: int) -> list[int]:
    """Of all its threads."""
    listed = pathlib.Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for children in listed for child in children.read_text().split()]


@asynccontextmanager
async def a_pair(
    checkpoint: pathlib.Path, folder: pathlib.Path
) -> AsyncIterator[tuple[WorkerProcess, WorkerProcess, Router]]:
    async with (
        a_worker_process(checkpoint, folder, "p0", "--role", "prefill", *OPTIONS) as prefill,
        a_worker_process(checkpoint, folder, "d0", "--role", "decode", *OPTIONS) as decode,
        open_session(decode.address) as router,
    ):
        yield prefill, decode, router


async def free_again(worker: WorkerProcess) -> None:
    """Returns when nothing is held; the answers to Describe are what is waited for."""
    async with worker.control() as control, asyncio.timeout(10):
        while True:
            described = await control.Describe(control_pb2.DescribeRequest())
            if described.blocks.free + described.blocks.cached == 64:
                assert described.unhealthy_reason == ""
                return


@pytest.mark.parametrize("how", ["killed", "frozen"])
async def test_case_08_a_prefill_worker_that_is_gone_costs_a_request_only_time(
    how: str, checkpoint: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    async with a_pair(checkpoint, tmp_path) as (prefill, decode, router):
        warm = await router.submit(replace(request("warm"), prefill=prefill.target)).end()
        assert warm.error is None
        async with prefill.control() as control:
            pause = control_pb2.Fault(point="step", action="pause")
            await control.Faults(control_pb2.FaultsRequest(faults=[pause]))
        answers = [router.submit(replace(request(f"q{i}"), prefill=prefill.target)) for i in range(3)]
        await router.ping()
        prefill.process.send_signal(signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        async with asyncio.timeout(10):
            for answer in answers:
                await answer.until(lambda answer: answer.lost)
                router.place(RequestKey(answer.lost[0].key.request_id, 2), None)
                assert (await answer.end()).error is None
        alone = [await router.submit(request(f"a{i}")).end() for i in range(1)]
        assert all(answer.error is None for answer in alone)
        await free_again(decode)


async def test_case_13_a_transfer_that_fails_at_a_block_is_told_and_placed_again(
    checkpoint: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    async with a_pair(checkpoint, tmp_path) as (prefill, decode, router):
        alone = await router.submit(request("q")).end()
        async with decode.control() as control:
            await control.CacheReset(control_pb2.CacheResetRequest())
            fail = control_pb2.Fault(point="transfer.block", action="raise", at=3, times=1)
            await control.Faults(control_pb2.FaultsRequest(faults=[fail]))
        answer = router.submit(replace(request("q"), prefill=prefill.target))
        await answer.until(lambda answer: answer.lost)
        router.place(RequestKey("q", 2), prefill.target)
        got = await answer.end()
        assert got.tokens == alone.tokens
        assert got.timeline is not None
        assert got.timeline.prefill_worker == "p0"
        await free_again(prefill)
        await free_again(decode)


async def test_case_59_a_lost_rank_ends_the_worker_with_an_error(
    checkpoint: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    async with (
        a_worker_process(checkpoint, tmp_path, "w0", "--tp", "2", *OPTIONS) as worker,
        open_session(worker.address) as router,
    ):
        endless = replace(request("q"), sampling=SamplingParams(max_tokens=190, temperature=0.0, ignore_eos=True))
        answer = await router.submit(endless).until(lambda answer: answer.tokens[0])
        (child,) = children_of(worker.process.pid)
        os.kill(child, signal.SIGKILL)
        await answer.end()
        assert isinstance(answer.error, WorkerLost)
        async with asyncio.timeout(20):
            assert await worker.process.wait() == 1
