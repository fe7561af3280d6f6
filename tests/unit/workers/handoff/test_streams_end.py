"""Streams between workers that end, or whose other end falls silent."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace

import grpc
import pytest

from headrace.errors import HeadraceError, TransferFailed
from headrace.v1 import control_pb2
from headrace.values import PrefillTarget, RequestKey, Role
from tests.unit.workers.handoff.ends import a_puller, answer_to_peer_lost, both_idle, said
from tests.unit.workers.rig import HANDOFF, a_pair, a_request, a_worker, answer_alone
from workers.kv.links.base import BlockPull, PeerRanks, PullReceipt
from workers.scheduling.scheduler import ChunkDone
from workers.streams import RouterStream

Fault = control_pb2.Fault


@pytest.mark.parametrize("max_tokens", [6, 1])
async def test_case_08_a_dead_prefill_worker_is_noticed_at_once(max_tokens: int) -> None:
    """While its blocks are read, or while nothing is announced yet: what ends with its first token is not read ahead."""
    asked = a_request(length=20, max_tokens=max_tokens)
    async with a_worker("d0") as decode, decode.router() as router:
        async with a_worker("p0") as prefill:
            prefill.executor.go_steps.clear()
            answer = router.submit(replace(asked, prefill=prefill.target))
            while not prefill.worker.num_requests:
                await prefill.worker.changed()
        await answer_to_peer_lost(router, answer, None)
        assert answer.lost[0].error.type == TransferFailed.__name__
        assert said(await answer.end())[0] == said(await answer_alone(asked))[0]  # type: ignore[index]
        assert decode.counts.quarantined == 0


async def test_case_12_a_decode_worker_stays_well_without_prefill_workers() -> None:
    nobody = PrefillTarget("p9", 1, "127.0.0.1:1")
    async with a_worker("d0") as decode, decode.router() as router:
        answer = router.submit(a_request(length=20, prefill=nobody))
        await answer.until(lambda answer: answer.lost)
        described = await decode.control.Describe(control_pb2.DescribeRequest())
        assert described.unhealthy_reason == ""
        await answer_to_peer_lost(router, answer, None)
        assert (await answer.end()).error is None


class Bereft(RouterStream):
    """A session that hears of a lost peer."""

    def __init__(self) -> None:
        super().__init__("r1")
        self.lost = asyncio.Event()

    def send_peer_lost(self, key: RequestKey, target: PrefillTarget, error: HeadraceError) -> None:
        self.lost.set()


async def test_case_08_a_request_that_comes_in_the_moment_in_which_its_peers_stream_ends_hears_of_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All others have been told by then, and the stream is still the one that is found: nobody would have told it, and its
    room would have stayed promised."""
    async with a_worker("d0") as decode, decode.router() as router:
        intake, session = decode.worker._intake, Bereft()
        async with a_worker("p0") as prefill:
            await router.submit(a_request("first", prefill=prefill.target)).end()
            late = a_request("late", length=20, seed=2, prefill=prefill.target)
            (link,) = decode.worker.peers
            fail = link.fail

            def fails(error: HeadraceError) -> None:
                fail(error)
                if not intake.keys():
                    intake.submit(session, late)

            monkeypatch.setattr(link, "fail", fails)
        async with asyncio.timeout(10):
            await session.lost.wait()
        intake.cancel(session, late.key)
        await both_idle(decode)


async def test_what_was_announced_by_a_peer_whose_stream_has_ended_is_not_asked_of_it() -> None:
    """A link to it would be formed, which nobody closes."""
    async with a_worker("d0") as decode, decode.router() as router:
        async with a_worker("p0") as prefill:
            await decode.faults(Fault(point="pull", action="pause", times=1))
            answer = router.submit(a_request(length=20, prefill=prefill.target))
            while decode.counts.active < 2:
                await decode.worker.changed()
            (link,) = decode.worker.peers
        while link in decode.worker.peers:
            await router.ping()
        await decode.faults()
        await answer_to_peer_lost(router, answer, None)
        assert (await answer.end()).error is None
        assert not decode.executor.peers
        await both_idle(decode)


async def test_a_peer_that_announces_what_cannot_be_read_is_lost_to_all_that_wait_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its stream's task ended without a word: who had heard nothing yet would have waited for ever."""

    def unequal(announced: object) -> ChunkDone:
        raise ValueError("3 blocks and 2 epochs")

    async with a_worker("d0") as decode, a_worker("p0") as prefill, decode.router() as router, asyncio.timeout(20):
        prefill.executor.go_steps.clear()
        waits = router.submit(a_request("waits", length=20, max_tokens=1, prefill=prefill.target))
        while not prefill.worker.num_requests:
            await prefill.worker.changed()
        monkeypatch.setattr("workers.handoff.messages.chunk_from_pb", unequal)
        prefill.executor.go_steps.set()
        await waits.until(lambda answer: answer.lost)
        assert "3 blocks and 2 epochs" in waits.lost[0].error.message
        await answer_to_peer_lost(router, waits, None)
        assert (await waits.end()).error is None
        await both_idle(prefill, decode)


async def test_what_was_being_read_as_its_peers_stream_ended_is_not_asked_of_it_again() -> None:
    """As what another request's trouble cut is: a link to it would be formed, which nobody closes."""
    num_asked = 0
    async with a_worker("d0") as decode, decode.router() as router:
        pull = decode.executor.pull

        def counted(peer: PeerRanks, blocks: Sequence[BlockPull], after_step: int = 0) -> Future[PullReceipt]:
            nonlocal num_asked
            num_asked += 1
            return pull(peer, blocks, after_step)

        decode.executor.pull = counted  # type: ignore[method-assign]
        async with a_worker("p0") as prefill:
            decode.executor.go_pulls.clear()
            answer = router.submit(a_request(length=20, prefill=prefill.target))
            while not num_asked:
                await decode.worker.changed()
        await answer_to_peer_lost(router, answer, None)
        assert num_asked == 1
        assert (await answer.end()).error is None
        await both_idle(decode)


async def test_no_link_is_left_to_a_prefill_worker_that_is_gone() -> None:
    async with a_worker("d0") as decode, decode.router() as router:
        async with a_worker("p0") as prefill:
            await router.submit(a_request(length=20, prefill=prefill.target)).end()
            assert decode.executor.peers
        async with asyncio.timeout(10):
            while decode.executor.peers:
                await router.ping()


SOON_SILENT = HANDOFF.model_copy(update={"transfer_seconds": 0.2, "pin_seconds": 60.0})


async def test_a_stream_on_which_nothing_is_asked_stays_for_as_long_as_both_are_there() -> None:
    """Else each lull would cost the next hand-off its links."""
    brief = HANDOFF.model_copy(update={"transfer_seconds": 1.0})
    loop = asyncio.get_running_loop()
    async with a_pair(handoff=brief) as (prefill, decode), decode.router() as router:
        await router.submit(a_request("first", prefill=prefill.target)).end()
        (link,) = decode.worker.peers
        ended = loop.time() + 1.5 * brief.transfer_seconds
        while loop.time() < ended:
            await router.ping()
        assert list(decode.worker.peers) == [link]
        link.check()


async def test_a_puller_that_falls_silent_holds_no_ticket() -> None:
    """It is frozen, or its host is gone: its connection stands. What is not computed yet has no pin that would end."""
    async with a_worker("p0", role=Role.PREFILL, handoff=SOON_SILENT) as rig:
        rig.executor.go_steps.clear()
        call = await a_puller(rig, a_request(length=20))
        while not rig.worker.num_requests:
            await rig.worker.changed()
        async with asyncio.timeout(10):
            while await call.read() is not grpc.aio.EOF:
                pass
            rig.executor.go_steps.set()
            await rig.idle()


async def test_a_puller_that_falls_silent_while_it_is_told_something_holds_no_pin() -> None:
    """It reads nothing either: what is being sent to it is never over."""
    async with a_worker("p0", role=Role.PREFILL, handoff=SOON_SILENT) as rig:
        await rig.faults(Fault(point="announce", action="pause"))
        call = await a_puller(rig, a_request(length=20))
        while not rig.counts.pinned:
            await rig.worker.changed()
        async with asyncio.timeout(10):
            await rig.idle()
        call.cancel()
