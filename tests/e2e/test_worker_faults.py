"""A worker that is killed, frozen or told to fail at any phase of a hand-off, as the other side lives through it. Real
processes."""

import asyncio
import os
import pathlib
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any

import pytest
import pytest_asyncio

from headrace.errors import WorkerLost
from headrace.v1 import control_pb2
from headrace.values import Request, RequestKey, SamplingParams
from tests.session import Answer, Router, open_session
from tests.tiny import make_checkpoint
from tests.worker_process import WorkerProcess, a_worker_process

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]

Fault = control_pb2.Fault
SERVES_AGAIN_SECONDS = 2.0  # what was promised
TIMES_THE_USUAL = 40  # on a machine that has other things to do, where an answer takes 50 ms or more without any fault

OPTIONS = (
    *("--block-size", "8", "--max-step-tokens", "16", "--num-blocks", "64", "--fault-hooks"),
    *("--transfer-seconds", "2", "--pin-seconds", "2", "--digests"),
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


@dataclass(frozen=True)
class Pair:
    """Two workers that outlive what is done to their peers."""

    prefill: WorkerProcess
    decode: WorkerProcess

    def session(self) -> AbstractAsyncContextManager[Router]:
        return open_session(self.decode.address)

    async def free_again(self) -> None:
        await free_again(self.prefill)
        await free_again(self.decode)


async def started(
    stack: AsyncExitStack, checkpoint: pathlib.Path, folder: pathlib.Path, role: str, names: Sequence[str]
) -> list[WorkerProcess]:
    """Workers of one role, side by side; they end with the stack."""
    starting = (a_worker_process(checkpoint, folder, name, "--role", role, *OPTIONS, forked=True) for name in names)
    return list(await asyncio.gather(*map(stack.enter_async_context, starting)))


async def faults(worker: WorkerProcess, *faults: Any) -> None:
    """From now on these and no others."""
    async with worker.control() as control:
        await control.Faults(control_pb2.FaultsRequest(faults=faults))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(checkpoint: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    async with AsyncExitStack() as stack:
        folder = tmp_path_factory.mktemp("pair")
        (prefill,) = await started(stack, checkpoint, folder, "prefill", ["p0"])
        (decode,) = await started(stack, checkpoint, folder, "decode", ["d0"])
        yield Pair(prefill, decode)


async def free_again(worker: WorkerProcess) -> None:
    """Returns when nothing is held; the answers to Describe are what is waited for."""
    async with worker.control() as control, asyncio.timeout(10):
        while True:
            described = await control.Describe(control_pb2.DescribeRequest())
            if described.blocks.free + described.blocks.cached == 64:
                assert described.unhealthy_reason == ""
                return


@dataclass(frozen=True)
class Phase:
    """A hand-off is held here, by a fault in the worker that decodes. `there`: as (Describe of decode, of prefill, answer)
    have it then."""

    fault: Any
    there: Callable[[Any, Any, Answer], bool]


# Blocks of 8, chunks of 16 tokens, a prompt of 60: eight blocks, two a chunk.
PHASES = {
    "before the ticket": Phase(
        Fault(point="ticket", action="pause"), lambda decode, prefill, _: bool(decode.requests) and not prefill.tickets
    ),
    "in mid-chunk": Phase(
        Fault(point="transfer.block", action="pause", at=3),
        lambda decode, prefill, _: bool(prefill.tickets) and decode.blocks.active >= 4,
    ),
    "after the last chunk": Phase(
        Fault(point="transfer.block", action="pause", at=7),
        lambda decode, prefill, _: prefill.blocks.pinned > 0 and decode.blocks.active == 8,
    ),
    "before the release": Phase(
        Fault(point="release", action="pause"), lambda decode, prefill, answer: answer.over and bool(prefill.tickets)
    ),
}


async def reach(phase: Phase, decode: WorkerProcess, prefill: WorkerProcess, answer: Answer) -> None:
    """Returns when the hand-off is held in the phase; the answers to Describe are what is waited for."""
    async with decode.control() as of_decode, prefill.control() as of_prefill, asyncio.timeout(20):
        while True:
            described = [await control.Describe(control_pb2.DescribeRequest()) for control in (of_decode, of_prefill)]
            if phase.there(*described, answer):
                return


async def seconds_to_serve(router: Router, prompt: Request) -> float:
    """How long an answer takes now, in good health."""
    began = time.monotonic()
    assert (await router.submit(prompt).end()).error is None
    return time.monotonic() - began


def serves_again(usual_seconds: float) -> asyncio.Timeout:
    return asyncio.timeout(max(SERVES_AGAIN_SECONDS, TIMES_THE_USUAL * usual_seconds))


async def test_a_prefill_worker_killed_at_any_phase_costs_a_request_only_time(
    pair: Pair, checkpoint: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    async with AsyncExitStack() as stack:
        names = [f"p-{name.replace(' ', '-')}" for name in PHASES]
        victims = await started(stack, checkpoint, tmp_path, "prefill", names)
        router = await stack.enter_async_context(pair.session())
        for (name, phase), victim in zip(PHASES.items(), victims, strict=True):
            async with asyncio.timeout(60):
                prompt, decode = request(f"killed {name}"), pair.decode
                before = replace(request(f"before {name}"), prefill=pair.prefill.target)
                usual_seconds = await seconds_to_serve(router, before)
                await faults(decode, phase.fault)
                answer = router.submit(replace(prompt, prefill=victim.target))
                await reach(phase, decode, victim, answer)
                victim.process.kill()
                await victim.process.wait()
                await faults(decode)
                if name != "before the release":
                    await answer.until(lambda answer: answer.lost)
                    router.place(RequestKey(prompt.key.request_id, 2), pair.prefill.target)
                assert (await answer.end()).error is None, name
                async with serves_again(usual_seconds):
                    again = replace(prompt, key=RequestKey(f"after {name}"), prefill=pair.prefill.target)
                    assert (await router.submit(again).end()).tokens == answer.tokens, name
                await pair.free_again()


async def test_a_decode_worker_killed_at_any_phase_leaves_its_prefill_worker_serving(
    pair: Pair, checkpoint: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    async with AsyncExitStack() as stack:
        names = [f"d-{name.replace(' ', '-')}" for name in PHASES]
        victims = await started(stack, checkpoint, tmp_path, "decode", names)
        survivor = await stack.enter_async_context(pair.session())
        for (name, phase), victim in zip(PHASES.items(), victims, strict=True):
            async with asyncio.timeout(60), open_session(victim.address) as router:
                prompt, prefill = request(f"cut {name}"), pair.prefill
                before = replace(request(f"uncut {name}"), prefill=prefill.target)
                usual_seconds = await seconds_to_serve(survivor, before)
                await faults(victim, phase.fault)
                answer = router.submit(replace(prompt, prefill=prefill.target))
                await reach(phase, victim, prefill, answer)
                victim.process.kill()
                await router.ended.wait()
                assert answer.over == (name == "before the release"), "the router hears of the end, and of no answer"
                async with serves_again(usual_seconds):
                    again = await survivor.submit(replace(prompt, prefill=prefill.target)).end()
                    assert again.error is None, name
                await pair.free_again()


async def test_a_decode_worker_stopped_in_mid_pull_and_woken_after_every_deadline_reads_nothing_of_anybody_else(
    pair: Pair, checkpoint: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """What it was told of has other content by then: its read fails, and every block that comes later has its digest."""
    async with (
        a_worker_process(checkpoint, tmp_path, "stopped", "--role", "decode", *OPTIONS, forked=True) as victim,
        open_session(victim.address) as router,
        pair.session() as others,
        asyncio.timeout(60),
    ):
        prompt, phase = request("stopped"), PHASES["in mid-chunk"]
        await faults(victim, phase.fault)
        answer = router.submit(replace(prompt, prefill=pair.prefill.target))
        await reach(phase, victim, pair.prefill, answer)
        victim.process.send_signal(signal.SIGSTOP)
        await free_again(pair.prefill)
        for number in range(9):  # all 64 blocks of the prefill worker change hands
            other = await others.submit(replace(request(f"other{number}"), prefill=pair.prefill.target)).end()
            assert (other.error, other.lost) == (None, [])
        victim.process.send_signal(signal.SIGCONT)
        await faults(victim)
        await answer.until(lambda answer: answer.lost)
        router.place(RequestKey("stopped", 2), pair.prefill.target)
        alone = await others.submit(replace(prompt, key=RequestKey("alone"))).end()
        assert (await answer.end()).tokens == alone.tokens
        await pair.free_again()
        await free_again(victim)


async def test_case_08_a_prefill_worker_that_is_frozen_costs_a_request_only_time(
    pair: Pair, checkpoint: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """Frozen in mid-pull, or before. It wakes after every deadline, when what it was to be read into is others'."""
    async with (
        a_worker_process(checkpoint, tmp_path, "frozen", "--role", "prefill", *OPTIONS, forked=True) as prefill,
        pair.session() as router,
    ):
        warm = await router.submit(replace(request("warm"), prefill=prefill.target)).end()
        assert warm.error is None
        await faults(pair.decode, PHASES["in mid-chunk"].fault)
        answers = [router.submit(replace(request("pulled"), prefill=prefill.target))]
        await reach(PHASES["in mid-chunk"], pair.decode, prefill, answers[0])
        await faults(prefill, Fault(point="step", action="pause"))
        answers += [router.submit(replace(request(f"f{i}"), prefill=prefill.target)) for i in range(3)]
        await router.ping()
        prefill.process.send_signal(signal.SIGSTOP)
        await faults(pair.decode)
        async with asyncio.timeout(10):
            for answer in answers:
                await answer.until(lambda answer: answer.lost)
                router.place(RequestKey(answer.lost[0].key.request_id, 2), None)
                assert (await answer.end()).error is None
        assert (await router.submit(request("fa")).end()).error is None
        await free_again(pair.decode)
        others = [await router.submit(request(f"other{number}")).end() for number in range(7)]
        prefill.process.send_signal(signal.SIGCONT)
        await faults(prefill)
        await free_again(prefill)
        woken = await router.submit(replace(request("warm"), key=RequestKey("woken"), prefill=prefill.target)).end()
        assert (woken.tokens, woken.lost) == (warm.tokens, [])
        for number, other in enumerate(others):
            prompt = request(f"other{number}")
            again = await router.submit(replace(prompt, key=RequestKey(f"again{number}"))).end()
            assert (again.tokens, again.usage and again.usage.cached_tokens) == (other.tokens, 56)


async def test_case_13_a_transfer_that_fails_at_a_block_is_told_and_placed_again(
    pair: Pair,
) -> None:
    async with pair.session() as router:
        alone = await router.submit(request("q")).end()
        async with pair.decode.control() as control:
            await control.CacheReset(control_pb2.CacheResetRequest())
        await faults(pair.decode, Fault(point="transfer.block", action="raise", at=3, times=1))
        answer = router.submit(replace(request("q"), prefill=pair.prefill.target))
        await answer.until(lambda answer: answer.lost)
        router.place(RequestKey("q", 2), pair.prefill.target)
        got = await answer.end()
        assert got.tokens == alone.tokens
        assert got.timeline is not None
        assert got.timeline.prefill_worker == "p0"
        await pair.free_again()


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
