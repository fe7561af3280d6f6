"""Blocks that the decode worker holds and the prefill worker lacks are pulled by it, not computed; or else computed."""

import asyncio
from dataclasses import replace

import pytest

from headrace.errors import LinkClosed, StaleBlocks
from headrace.v1 import control_pb2
from headrace.values import Request, RequestKey, Role
from tests.session import Answer, Router
from tests.unit.workers.rig import BLOCK_SIZE, HANDOFF, Rig, a_pair, a_request, a_worker, answer_alone, prompt

Fault = control_pb2.Fault
HISTORY, REST = 5 * BLOCK_SIZE, 30
QUICK = HANDOFF.model_copy(update={"transfer_seconds": 1.0})


def a_turn(prefill: Rig, name: str = "turn") -> Request:
    """The next turn of a conversation whose HISTORY the decode worker holds."""
    return replace(a_request(name, length=HISTORY + REST, prefill=prefill.target), offer_held=True)


async def remember(router: Router) -> None:
    """The decode worker alone has computed the history."""
    first = replace(a_request("first", max_tokens=1), prompt_token_ids=(*prompt(HISTORY), 5))
    assert (await router.submit(first).end()).error is None


async def both_idle(*rigs: Rig) -> None:
    async with asyncio.timeout(10):
        for rig in rigs:
            await rig.idle()


def cached(answer: Answer) -> int:
    assert answer.error is None, answer.error
    assert answer.usage is not None
    return answer.usage.cached_tokens


async def test_what_decode_holds_is_pulled_and_counts_as_cached() -> None:
    async with a_pair() as (prefill, decode), decode.router() as router:
        await remember(router)
        asked = a_turn(prefill)
        got = await router.submit(asked).end()
        assert got.tokens == (await answer_alone(asked)).tokens
        assert cached(got) == HISTORY
        assert prefill.executor.num_pulled == HISTORY // BLOCK_SIZE
        assert decode.executor.num_pulled == -(-REST // BLOCK_SIZE)
        again = await router.submit(a_turn(prefill, "again")).end()
        assert again.tokens == got.tokens
        assert prefill.executor.num_pulled == HISTORY // BLOCK_SIZE, "what was pulled is cached here now"
        await both_idle(prefill, decode)


async def test_only_what_prefill_lacks_is_pulled() -> None:
    async with a_pair() as (prefill, decode), decode.router() as router, prefill.router() as other:
        await other.submit(a_request("half", length=2 * BLOCK_SIZE + 1, max_tokens=1)).end()
        await remember(router)
        got = await router.submit(a_turn(prefill)).end()
        assert cached(got) == HISTORY
        assert prefill.executor.num_pulled == 3
        await both_idle(prefill, decode)


async def test_nothing_is_pulled_that_was_not_offered() -> None:
    async with a_pair() as (prefill, decode), decode.router() as router:
        await remember(router)
        got = await router.submit(replace(a_turn(prefill), offer_held=False)).end()
        assert cached(got) == 0
        assert prefill.executor.num_pulled == 0


async def test_a_pool_without_room_computes_instead() -> None:
    async with a_pair(prefill_num_blocks=16) as (prefill, decode), decode.router() as router:
        prefill.executor.go_steps.clear()
        await remember(router)
        first = router.submit(a_request("big", length=50, seed=9, prefill=prefill.target))
        while prefill.worker.load().num_running == 0:
            await prefill.worker.changed()
        turn = router.submit(a_turn(prefill))
        while prefill.worker.num_requests < 2:
            await prefill.worker.changed()
        prefill.executor.go_steps.set()
        assert cached(await turn.end()) == 0
        assert cached(await first.end()) == 0
        await both_idle(prefill, decode)


async def failing(prefill: Rig, how: str) -> None:
    match how:
        case "raise":
            await prefill.faults(Fault(point="transfer.block", action="raise", at=2, times=1))
        case "drop":
            await prefill.faults(Fault(point="pull", action="drop", times=1))
        case "stale":
            prefill.executor.pull_error = StaleBlocks("epoch moved")
        case "closed":
            prefill.executor.pull_error = LinkClosed("reset by peer")
        case "hung":
            prefill.executor.go_pulls.clear()


@pytest.mark.parametrize("how", ["raise", "drop", "stale", "closed", "hung"])
async def test_a_pull_of_an_offer_that_fails_costs_its_computation_and_nothing_else(how: str) -> None:
    async with a_pair(handoff=QUICK) as (prefill, decode), decode.router() as router:
        await remember(router)
        await failing(prefill, how)
        asked = a_turn(prefill)
        got = await router.submit(asked).end()
        assert got.tokens == (await answer_alone(asked)).tokens
        assert cached(got) == 0
        assert not got.lost, "the request never noticed"
        prefill.executor.go_pulls.set()
        await both_idle(prefill, decode)


async def test_a_read_that_outlives_its_request_finds_the_blocks_of_others_and_keeps_nothing() -> None:
    """The decode worker gives the request up, and its blocks away, while the prefill worker is about to read them."""
    async with a_pair(decode_num_blocks=24) as (prefill, decode), decode.router() as router:
        await remember(router)
        prefill.executor.go_pulls.clear()
        router.submit(a_turn(prefill, "gone"))
        while not prefill.counts.active:
            await prefill.worker.changed()
        router.cancel("gone")
        while decode.worker.num_requests:
            await decode.worker.changed()
        while not prefill.counts.quarantined:
            await prefill.worker.changed()
        await router.submit(a_request("other", length=80, seed=4, max_tokens=12)).end()
        prefill.executor.go_pulls.set()
        await both_idle(prefill, decode)
        assert (prefill.executor.num_pulled, prefill.counts.cached) == (0, 0)


async def test_an_offer_of_a_request_that_ends_frees_what_it_was_pulled_into() -> None:
    async with a_pair() as (prefill, decode), decode.router() as router:
        await remember(router)
        prefill.executor.go_pulls.clear()
        for moment in range(20):
            router.submit(a_turn(prefill, f"q{moment}"))
            for _ in range(8 * moment):
                await asyncio.sleep(0)
            router.cancel(f"q{moment}")
        await router.ping()
        prefill.executor.go_pulls.set()
        await both_idle(prefill, decode)
        assert cached(await router.submit(a_turn(prefill)).end()) in (0, HISTORY)


async def test_a_decode_worker_that_dies_during_the_pull_of_its_offer_leaves_nothing_held() -> None:
    async with a_pair(handoff=QUICK) as (prefill, decode):
        async with decode.router() as router:
            await remember(router)
            prefill.executor.go_pulls.clear()
            router.submit(a_turn(prefill))
            while not prefill.counts.active:
                await prefill.worker.changed()
        decode.running.cancel()
        await decode.worker.close()
        await both_idle(prefill)
        assert prefill.counts.cached == 0


async def test_no_link_is_left_to_a_decode_worker_that_is_gone() -> None:
    async with a_worker("p0", role=Role.PREFILL) as prefill, prefill.router() as other:
        async with a_worker("d0", role=Role.DECODE) as decode, decode.router() as router:
            await remember(router)
            assert cached(await router.submit(a_turn(prefill)).end()) == HISTORY
            assert prefill.executor.peers
        async with asyncio.timeout(10):
            while prefill.executor.peers:
                await other.ping()


async def test_after_a_lost_peer_the_next_prefill_worker_is_offered_the_blocks_too() -> None:
    async with a_pair() as (prefill, decode), decode.router() as router:
        await remember(router)
        await decode.faults(Fault(point="transfer.block", action="raise", at=HISTORY // BLOCK_SIZE, times=1))
        answer = router.submit(a_turn(prefill))
        await answer.until(lambda answer: answer.lost)
        router.place(RequestKey("turn", 2), prefill.target)
        assert cached(await answer.end()) >= HISTORY
        await both_idle(prefill, decode)
