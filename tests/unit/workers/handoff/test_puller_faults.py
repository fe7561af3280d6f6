"""What fails while a prompt is handed over, and what comes of it."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest

from headrace.clock import ManualClock
from headrace.errors import (
    DeadlineExceeded,
    IncompatiblePeer,
    InternalError,
    LinkClosed,
    StaleBlocks,
    TransferFailed,
)
from headrace.v1 import control_pb2
from headrace.values import RequestKey, Role
from tests.session import Answer
from tests.unit.workers.handoff.ends import answer_to_peer_lost, both_idle, said
from tests.unit.workers.rig import (
    BLOCK_SIZE,
    ENGINE,
    HANDOFF,
    Rig,
    a_pair,
    a_request,
    a_worker,
    answer_alone,
)
from workers.kv.links.base import BlockPull, PeerRanks, PullReceipt

Fault = control_pb2.Fault


async def failing(rig: Rig, how: str) -> None:
    match how:
        case "drop of block 3":
            await rig.faults(Fault(point="transfer.block", action="drop", at=3, times=1))
        case "raise in block 3":
            await rig.faults(Fault(point="transfer.block", action="raise", at=3, times=1))
        case "stale blocks":
            rig.executor.pull_error = StaleBlocks("epoch moved")
        case "link closed":
            rig.executor.pull_error = LinkClosed("reset by peer")
        case "link refused":
            rig.executor.pull_error = IncompatiblePeer("cut must be what it is here", field="cut")
        case "a read that never ends":
            rig.executor.go_pulls.clear()


@pytest.mark.parametrize(
    "how",
    ["drop of block 3", "raise in block 3", "stale blocks", "link closed", "link refused", "a read that never ends"],
)
@pytest.mark.parametrize("then", ["another", "alone"])
async def test_case_08_13_a_failed_transfer_is_placed_again(how: str, then: str) -> None:
    quick = HANDOFF.model_copy(update={"transfer_seconds": 0.4})
    asked = a_request(length=30, max_tokens=7)
    expected = await answer_alone(asked)
    async with (
        a_worker("p1", role=Role.PREFILL) as spare,
        a_pair(decode_handoff=quick, decode_engine=ENGINE.model_copy(update={"stall_seconds": 0.2})) as (
            prefill,
            decode,
        ),
        decode.router() as router,
    ):
        await failing(decode, how)
        answer = router.submit(replace(asked, prefill=prefill.target))
        await answer.until(lambda answer: answer.lost)
        decode.executor.pull_error = None
        decode.executor.go_pulls.set()
        await answer_to_peer_lost(router, answer, spare.target if then == "another" else None)
        got = await answer.end()
        assert said(got)[0] == said(expected)[0]  # type: ignore[index]
        assert got.keys == {RequestKey("q", 2)}
        assert got.timeline is not None
        assert got.timeline.prefill_worker == ("p1" if then == "another" else "")
        assert got.timeline.retry_seconds > 0, "what the attempt that failed took is neither queue nor prefill"
        await both_idle(prefill, decode, spare)


async def test_a_read_whose_link_another_requests_trouble_closed_is_made_again() -> None:
    async with a_pair() as (prefill, decode), decode.router() as router:
        pull, num_asked = decode.executor.pull, 0

        def once_closed(peer: PeerRanks, blocks: Sequence[BlockPull], after_step: int = 0) -> Future[PullReceipt]:
            nonlocal num_asked
            num_asked += 1
            decode.executor.pull_error = LinkClosed("closed from this side") if num_asked == 1 else None
            return pull(peer, blocks, after_step)

        decode.executor.pull = once_closed  # type: ignore[method-assign]
        asked = a_request(length=BLOCK_SIZE, max_tokens=7)
        answer = router.submit(replace(asked, prefill=prefill.target))
        assert said(await answer.end())[0] == said(await answer_alone(asked))[0]  # type: ignore[index]
        assert (num_asked, answer.lost) == (2, [])
        await both_idle(prefill, decode)


async def test_a_hand_off_for_which_no_block_becomes_free_is_computed_here_and_nobody_is_asked() -> None:
    quick = HANDOFF.model_copy(update={"transfer_seconds": 0.2})
    asked = a_request(length=30, max_tokens=7)
    async with a_pair(decode_handoff=quick) as (prefill, decode), decode.router() as router, asyncio.timeout(20):
        prefill.executor.go_steps.clear()
        answer = router.submit(replace(asked, prefill=prefill.target))
        while not prefill.worker.num_requests:
            await prefill.worker.changed()
        await decode.faults(Fault(point="pool", action="shrink", at=1))
        prefill.executor.go_steps.set()
        while decode.worker.load().claimed_tokens:
            await decode.worker.changed()
        await decode.faults()
        got = await answer.end()
        assert said(got)[0] == said(await answer_alone(asked))[0]  # type: ignore[index]
        assert (got.lost, got.timeline and got.timeline.prefill_worker) == ([], "")
        await both_idle(prefill, decode)


async def test_a_router_that_says_nothing_leaves_the_request_to_be_computed_here() -> None:
    quick = HANDOFF.model_copy(update={"transfer_seconds": 0.2})
    asked = a_request(length=30, max_tokens=40)
    async with a_pair(handoff=quick) as (prefill, decode), decode.router() as router:
        await failing(decode, "stale blocks")
        answer = router.submit(replace(asked, prefill=prefill.target))
        got = await answer.end()
        assert len(got.lost) == 1
        assert got.keys == {RequestKey("q", 1)}
        assert got.tokens == (await answer_alone(asked)).tokens
        await both_idle(prefill, decode)


async def test_an_answer_that_comes_too_late_renames_the_request() -> None:
    quick = HANDOFF.model_copy(update={"transfer_seconds": 0.2})
    async with a_pair(handoff=quick) as (prefill, decode), decode.router() as router:
        await failing(decode, "stale blocks")
        answer = router.submit(a_request(length=30, max_tokens=200, prefill=prefill.target))
        await answer.until(lambda answer: answer.tokens[0])
        decode.executor.go_steps.clear()
        router.place(RequestKey("q", 2), prefill.target)
        await router.ping()
        decode.executor.go_steps.set()
        got = await answer.end()
        assert got.keys == {RequestKey("q", 1), RequestKey("q", 2)}
        assert len(got.tokens[0]) == 200


async def test_a_place_for_what_is_over_is_refused() -> None:
    async with a_worker() as rig, rig.router() as router:
        answer = router.answers["gone"] = Answer()
        router.place(RequestKey("gone", 2), None)
        assert isinstance((await answer.end()).error, TransferFailed)


@pytest.mark.parametrize("side", ["decode", "prefill"])
async def test_a_read_that_cannot_even_begin_keeps_no_block(side: str) -> None:
    """There is no thread left for it, say."""

    def pull(peer: PeerRanks, blocks: Sequence[BlockPull], after_step: int = 0) -> Future[PullReceipt]:
        raise RuntimeError("can't start new thread")

    async with a_pair() as (prefill, decode), decode.router() as router:
        await router.submit(a_request("first", length=21)).end()
        failing = decode if side == "decode" else prefill
        failing.executor.pull = pull  # type: ignore[method-assign]
        asked = replace(a_request(length=41, prefill=prefill.target), offer_held=True)
        answer = await router.submit(asked).end()
        assert isinstance(answer.error, InternalError) == (side == "decode")
        await both_idle(prefill, decode)


async def test_case_14_waiting_in_the_peers_queue_is_not_peer_death() -> None:
    """What waits to be computed is not announced, however long that takes; nor is what ends with its first token, of
    which nothing is read ahead, before it is computed."""
    loop = asyncio.get_running_loop()
    brief = HANDOFF.model_copy(update={"pin_seconds": 0.2})
    async with a_pair(handoff=brief) as (prefill, decode), decode.router() as router:
        decode.worker._puller._transfer_seconds = 0.02
        prefill.executor.go_steps.clear()
        answer = router.submit(a_request(length=20, max_tokens=1, prefill=prefill.target))
        while not prefill.worker.num_requests:
            await prefill.worker.changed()
        told = loop.time()
        while loop.time() < told + 0.1:
            await router.ping()
        assert not answer.lost
        decode.worker._puller._transfer_seconds = HANDOFF.transfer_seconds
        prefill.executor.go_steps.set()
        assert (await answer.end()).error is None
        assert answer.timeline is not None
        assert answer.timeline.prefill_worker == "p0"


async def test_a_read_may_wait_for_its_step_for_longer_than_for_its_bytes() -> None:
    """It was asked for when the step was launched: how long that computes is no fault of the link's."""
    loop = asyncio.get_running_loop()
    async with a_pair() as (prefill, decode), decode.router() as router, asyncio.timeout(20):
        decode.worker._puller._reads._transfer_seconds = 0.02
        prefill.executor.go_steps.clear()
        answer = router.submit(a_request(length=2 * BLOCK_SIZE, prefill=prefill.target))
        while not decode.executor.asked_ahead:
            await decode.worker.changed()
        told = loop.time()
        while loop.time() < told + 0.1:
            await router.ping()
        prefill.executor.go_steps.set()
        assert (await answer.end()).error is None
        assert not answer.lost
        await both_idle(prefill, decode)


async def test_case_14_a_burst_beyond_the_batch_is_served_whole() -> None:
    small = ENGINE.model_copy(update={"max_num_seqs": 2})
    async with a_pair(decode_engine=small, decode_num_blocks=24) as (prefill, decode), decode.router() as router:
        answers = [
            router.submit(a_request(f"q{i}", length=13, seed=i, max_tokens=20, prefill=prefill.target))
            for i in range(16)
        ]
        done = [await answer.end() for answer in answers]
        assert [answer.error for answer in done] == [None] * 16
        assert [len(answer.tokens[0]) for answer in done] == [20] * 16
        await both_idle(prefill, decode)


async def test_case_16_what_waits_to_be_pulled_is_bounded_on_the_prefill_side() -> None:
    async with a_pair(prefill_num_blocks=40, decode_num_blocks=64) as (prefill, decode), decode.router() as router:
        decode.executor.go_pulls.clear()
        answers = [router.submit(a_request(f"q{i}", length=17, seed=i, prefill=prefill.target)) for i in range(8)]
        while prefill.counts.pinned < 5:
            await prefill.worker.changed()
        for _ in range(3):
            await router.report(lambda report: True)
            assert prefill.counts.pinned + prefill.counts.active <= 20
        decode.executor.go_pulls.set()
        for answer in answers:
            assert (await answer.end()).error is None
        await both_idle(prefill, decode)


async def test_case_08_a_prefill_worker_that_announces_no_more_is_given_up() -> None:
    """Its stream lives, it answers beats, and it knows the ticket: what it computed is on its way for ever."""
    asked = a_request(length=30)
    async with a_pair() as (prefill, decode), decode.router() as router, asyncio.timeout(20):
        decode.worker._puller._transfer_seconds = 0.05
        await prefill.faults(Fault(point="announce", action="delay", times=1), Fault(point="announce", action="drop"))
        answer = router.submit(replace(asked, prefill=prefill.target))
        await answer.until(lambda answer: answer.lost)
        assert "announced nothing more" in answer.lost[0].error.message
        await answer_to_peer_lost(router, answer, None)
        assert said(await answer.end())[0] == said(await answer_alone(asked))[0]  # type: ignore[index]
        await both_idle(prefill, decode)


@pytest.mark.parametrize("how", ["never came", "was dropped"])
async def test_a_lost_ticket_is_noticed_and_placed_again(how: str) -> None:
    """The stream lives and the peer answers beats: only the ticket is gone."""
    patient = HANDOFF.model_copy(update={"pin_seconds": 1.0, "transfer_seconds": 600.0})
    asked = a_request(length=30)
    async with a_pair(handoff=patient) as (prefill, decode), decode.router() as router, asyncio.timeout(20):
        if how == "never came":
            await decode.faults(Fault(point="ticket", action="drop", times=1))
        else:
            prefill.executor.go_steps.clear()
        answer = router.submit(replace(asked, prefill=prefill.target))
        if how == "was dropped":
            while not prefill.worker.num_requests:
                await prefill.worker.changed()
            prefill.worker._source.release(RequestKey("q"))
            prefill.executor.go_steps.set()
        await answer.until(lambda answer: answer.lost)
        assert "is not here" in answer.lost[0].error.message
        await answer_to_peer_lost(router, answer, prefill.target)
        assert said(await answer.end())[0] == said(await answer_alone(asked))[0]  # type: ignore[index]
        await both_idle(prefill, decode)


async def test_a_pin_whose_announcement_was_lost_ends(clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its puller, who waits for it, asks after the ticket, and must not keep the pin alive by that."""
    brief = HANDOFF.model_copy(update={"pin_seconds": 0.2, "transfer_seconds": 600.0})
    async with (
        a_pair(handoff=brief, prefill_clock=clock) as (prefill, decode),
        decode.router() as router,
        asyncio.timeout(20),
    ):
        source, asked = prefill.worker._source, asyncio.Semaphore(0)
        renew = source.renew

        def noted(*given: Any, **named: Any) -> None:
            renew(*given, **named)
            asked.release()

        monkeypatch.setattr(source, "renew", noted)
        await prefill.faults(Fault(point="announce", action="drop"))
        answer = router.submit(a_request(length=6, prefill=prefill.target))
        while not prefill.counts.pinned:
            await prefill.worker.changed()
        clock.advance(0.15)
        while not asked.locked():
            await asked.acquire()
        await asked.acquire()
        clock.advance(0.1)
        await answer.until(lambda answer: answer.lost)
        await answer_to_peer_lost(router, answer, None)
        await answer.end()
        await both_idle(prefill, decode)


async def test_a_slow_read_keeps_its_pin_by_renewing_it() -> None:
    brief = HANDOFF.model_copy(update={"pin_seconds": 0.2})
    async with a_pair(handoff=brief) as (prefill, decode), decode.router() as router:
        decode.executor.go_pulls.clear()
        answer = router.submit(a_request(length=10, prefill=prefill.target))
        while not prefill.counts.pinned:
            await prefill.worker.changed()
        for _ in range(3):
            await router.report(lambda report: True)
        assert prefill.counts.pinned
        decode.executor.go_pulls.set()
        assert (await answer.end()).error is None
        assert not answer.lost


async def test_case_19_a_preempted_hand_over_is_computed_again_to_the_same_answer() -> None:
    asked = [a_request(f"q{i}", length=12, seed=i, max_tokens=30) for i in range(4)]
    expected = [(await answer_alone(request)).tokens for request in asked]
    async with a_pair(decode_num_blocks=22) as (prefill, decode), decode.router() as router:
        answers = [router.submit(replace(request, prefill=prefill.target)) for request in asked]
        done = [await answer.end() for answer in answers]
        assert [answer.tokens for answer in done] == expected
        assert decode.worker.num_preemptions > 0
        await both_idle(prefill, decode)


async def test_case_52_requests_parked_on_a_dead_prefill_worker_hold_up_nobody() -> None:
    small = ENGINE.model_copy(update={"max_num_seqs": 4})
    async with a_pair(decode_engine=small) as (prefill, decode), decode.router() as router:
        prefill.executor.go_steps.clear()
        parked = [
            router.submit(a_request(f"p{i}", length=9, seed=i, seconds_left=0.3, prefill=prefill.target))
            for i in range(8)
        ]
        local = await router.submit(a_request("local", seed=77)).end()
        assert local.error is None
        for answer in parked:
            assert isinstance((await answer.end()).error, DeadlineExceeded)
        prefill.executor.go_steps.set()
        await both_idle(prefill, decode)
