"""Digests of what is handed over, on both sides: every block, and what comes of one that has another, or none."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace

import pytest

from headrace.errors import TransferFailed
from headrace.v1 import transfer_pb2
from headrace.values import Role
from tests.unit.workers.handoff.ends import a_puller, answer_to_peer_lost, both_idle, said
from tests.unit.workers.rig import BLOCK_SIZE, HANDOFF, a_pair, a_request, a_worker, answer_alone
from workers.handoff import messages
from workers.kv.links.base import BlockPull, PeerRanks, PullReceipt

WITH_DIGESTS = HANDOFF.model_copy(update={"digests": True})


@pytest.mark.parametrize("ahead", [True, False], ids=["announced ahead", "announced when done"])
@pytest.mark.parametrize("length", [1, BLOCK_SIZE + 1, 30])
async def test_with_digests_every_block_that_came_is_checked_to_be_what_was_announced(
    length: int, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not ahead:
        monkeypatch.setattr("workers.kv.links.choice.AWAIT_STEPS", set())
    asked = a_request(length=length, max_tokens=7)
    expected = await answer_alone(asked)
    async with a_pair(handoff=WITH_DIGESTS) as (prefill, decode), decode.router() as router:
        digests, checked = decode.executor.digests, list[tuple[int, int]]()

        def noted(blocks: Sequence[tuple[int, int]]) -> Future[tuple[bytes, ...]]:
            checked.extend(blocks)
            return digests(blocks)

        decode.executor.digests = noted  # type: ignore[method-assign]
        got = await router.submit(replace(asked, prefill=prefill.target)).end()
        assert said(got)[0] == said(expected)[0]  # type: ignore[index]
        assert not got.lost
        assert bool(decode.executor.asked_ahead) == ahead
        assert sum(filled for _, filled in checked) == length
        await both_idle(prefill, decode)


async def test_with_digests_a_block_that_came_as_something_else_is_named_and_placed_again() -> None:
    asked = a_request(length=30, max_tokens=7)
    expected = await answer_alone(asked)
    async with a_pair(handoff=WITH_DIGESTS) as (prefill, decode), decode.router() as router:
        executor, pull = decode.executor, decode.executor.pull

        def spoilt(peer: PeerRanks, blocks: Sequence[BlockPull], after_step: int = 0) -> Future[PullReceipt]:
            done = pull(peer, blocks, after_step)
            done.add_done_callback(lambda _: executor.pool[blocks[-1].target].__iadd__(1))
            return done

        executor.pull = spoilt  # type: ignore[method-assign]
        answer = router.submit(replace(asked, prefill=prefill.target))
        await answer.until(lambda answer: answer.lost)
        assert "digest" in answer.lost[0].error.message
        await answer_to_peer_lost(router, answer, None)
        assert said(await answer.end())[0] == said(expected)[0]  # type: ignore[index]
        await both_idle(prefill, decode)


async def test_with_digests_a_block_that_cannot_be_digested_is_not_announced_and_not_kept() -> None:
    """Ranks that should hold the same differ: whoever read from one of them would never know."""
    asked = a_request(length=30, max_tokens=7)
    async with a_pair(handoff=WITH_DIGESTS) as (prefill, decode), decode.router() as router:
        digests = prefill.executor.digests

        def differing(blocks: Sequence[tuple[int, int]]) -> Future[tuple[bytes, ...]]:
            failed: Future[tuple[bytes, ...]] = Future()
            failed.set_exception(TransferFailed("block 3 is not the same on all ranks"))
            return failed

        prefill.executor.digests = differing  # type: ignore[method-assign]
        answer = router.submit(replace(asked, prefill=prefill.target))
        await answer.until(lambda answer: answer.lost)
        assert "not the same on all ranks" in answer.lost[0].error.message
        assert not decode.executor.num_pulled
        await both_idle(prefill)
        prefill.executor.digests = digests  # type: ignore[method-assign]
        await answer_to_peer_lost(router, answer, prefill.target)
        assert said(await answer.end())[0] == said(await answer_alone(asked))[0]  # type: ignore[index]
        await both_idle(prefill, decode)


async def test_of_a_ticket_that_ends_while_its_blocks_are_digested_nothing_is_said() -> None:
    asked = a_request(length=20)
    async with a_worker("p0", role=Role.PREFILL, handoff=WITH_DIGESTS) as rig, asyncio.timeout(20):
        digesting: list[Future[tuple[bytes, ...]]] = []

        def digests(blocks: Sequence[tuple[int, int]]) -> Future[tuple[bytes, ...]]:
            digesting.append(Future())
            return digesting[-1]

        rig.executor.digests = digests  # type: ignore[method-assign]
        call = await a_puller(rig, asked)
        while len(digesting) < 3:
            await rig.worker.changed()
        await call.write(messages.release(asked.key))
        await rig.idle()
        for each in digesting:
            each.set_result((b"digest",) * 2)
        await asyncio.gather(*(asyncio.wrap_future(each) for each in digesting))
        await call.write(transfer_pb2.PullerMessage(beat=transfer_pb2.Beat()))
        heard = list[str]()
        while not heard or heard[-1] != "beat":
            heard.append((await call.read()).WhichOneof("kind"))
        assert heard == ["hello", "beat"]
        assert rig.worker.num_handoffs == (0, 0)
        call.cancel()
