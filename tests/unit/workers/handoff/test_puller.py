import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import grpc
import pytest

from headrace import wire
from headrace.clock import ManualClock
from headrace.errors import (
    DeadlineExceeded,
    Draining,
    IncompatiblePeer,
    InvalidRequest,
    LinkClosed,
    Overloaded,
    StaleBlocks,
    TransferFailed,
)
from headrace.v1 import control_pb2, transfer_pb2, transfer_pb2_grpc
from headrace.values import FinishReason, PrefillTarget, RequestKey, Role, SequenceOutput, Ticket
from tests.session import Answer, Router
from tests.unit.workers.memory import MemoryExecutor
from tests.unit.workers.rig import (
    BLOCK_SIZE,
    COMPATIBILITY,
    ENGINE,
    HANDOFF,
    IDENTITY,
    Rig,
    a_pair,
    a_request,
    a_worker,
    answer_alone,
)
from workers.handoff import messages
from workers.handoff.puller import Announced
from workers.kv.links.base import BlockPull, PeerRanks, PullReceipt
from workers.scheduling.scheduler import ChunkDone, Expected
from workers.streams import RouterStream

Fault = control_pb2.Fault
WITH_DIGESTS = HANDOFF.model_copy(update={"digests": True})


# -- what is announced


def chunk(first: int, count: int, *, last: bool = False) -> ChunkDone:
    return ChunkDone(RequestKey("q"), first, tuple((first + i, 1) for i in range(count)), last)


def test_announcements_in_order_become_one_read() -> None:
    announced = Announced(Expected(held_blocks=2, remaining=30, num_prompt_blocks=7))
    todo = announced.take([chunk(2, 2), chunk(4, 1)])
    assert (todo.first_block, len(todo.blocks), todo.last) == (2, 3, None)
    todo = announced.take([chunk(5, 2, last=True)])
    assert (todo.first_block, len(todo.blocks)) == (5, 2)
    assert todo.last is not None


@pytest.mark.parametrize(
    "chunks",
    [
        [chunk(3, 1)],
        [chunk(0, 4)],
        [chunk(2, 2), chunk(2, 2)],
        [chunk(2, 6)],
        [chunk(2, 2, last=True)],
        [chunk(2, 2), replace(chunk(4, 1), digests=(b"digested",))],
    ],
    ids=["hole", "already held", "twice", "too many", "too few", "some digested"],
)
def test_announcements_that_do_not_add_up_fail_the_transfer(chunks: list[ChunkDone]) -> None:
    with pytest.raises(TransferFailed):
        Announced(Expected(held_blocks=2, remaining=30, num_prompt_blocks=7)).take(chunks)


# -- the same answer


def said(answer: Answer) -> object:
    assert answer.error is None, answer.error
    return dict(answer.tokens), dict(answer.finishes), dict(answer.logprobs), answer.usage


async def both_idle(*rigs: Rig) -> None:
    async with asyncio.timeout(10):
        for rig in rigs:
            await rig.idle()


@pytest.mark.parametrize("length", [1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 8, 9, 31, 60])
async def test_a_handed_over_prompt_is_answered_as_alone(length: int) -> None:
    asked = a_request(length=length, max_tokens=9, num_logprobs=2)
    expected = await answer_alone(asked)
    async with a_pair() as (prefill, decode), decode.router() as router:
        got = await router.submit(replace(asked, prefill=prefill.target)).end()
        assert said(got) == said(expected)
        assert got.timeline is not None
        assert got.timeline.prefill_worker == "p0"
        assert got.timeline.blocks_moved == -(-length // BLOCK_SIZE)
        assert decode.executor.num_pulled == got.timeline.blocks_moved
        await both_idle(prefill, decode)


async def test_blocks_are_asked_for_while_the_step_that_fills_them_runs() -> None:
    asked = a_request(length=8, max_tokens=4)
    expected = await answer_alone(asked)
    async with a_pair() as (prefill, decode), decode.router() as router:
        prefill.executor.go_steps.clear()
        answer = router.submit(replace(asked, prefill=prefill.target))
        async with asyncio.timeout(10):
            while not decode.executor.asked_ahead:
                await decode.worker.changed()
        assert decode.executor.num_pulled == 0
        prefill.executor.go_steps.set()
        assert said(await answer.end()) == said(expected)
        await both_idle(prefill, decode)


async def test_what_is_over_with_its_first_token_is_not_read_ahead() -> None:
    async with a_pair() as (prefill, decode), decode.router() as router:
        got = await router.submit(replace(a_request(length=8, max_tokens=1), prefill=prefill.target)).end()
        assert got.error is None
        assert (decode.executor.asked_ahead, decode.executor.num_pulled) == (0, 0)
        await both_idle(prefill, decode)


async def test_many_at_once_are_answered_as_alone() -> None:
    asked = [a_request(f"q{i}", length=3 + 5 * i, seed=i % 4, max_tokens=12) for i in range(10)]
    expected = [said(await answer_alone(request)) for request in asked]
    async with a_pair(decode_num_blocks=48) as (prefill, decode), decode.router() as router:
        answers = [router.submit(replace(request, prefill=prefill.target)) for request in asked]
        for answer, oracle, request in zip(answers, expected, asked, strict=True):
            tokens, finishes, *_ = said(await answer.end())  # type: ignore[misc]
            assert (tokens, finishes) == oracle[:2], request.key  # type: ignore[index]
        await both_idle(prefill, decode)


class Leaving(RouterStream):
    """A session that ends its request as soon as it hears of it: before whatever else waits for its turn."""

    def __init__(self, cancel: Callable[[RouterStream], None]) -> None:
        super().__init__("r0")
        self._cancel = cancel
        self.heard = asyncio.Event()

    def send_outputs(self, outputs: list[tuple[int, SequenceOutput]]) -> None:
        if not self.heard.is_set():
            self.heard.set()
            asyncio.get_running_loop().call_soon(self._cancel, self)


async def test_case_3_a_request_that_is_cancelled_in_the_moment_of_its_arrival_is_not_computed_for_nobody() -> None:
    """Its hand-off is over by then, and nobody has taken note of that."""
    async with a_pair() as (prefill, decode):
        asked = a_request(length=21, max_tokens=200, prefill=prefill.target)
        intake = decode.worker._intake
        session = Leaving(lambda session: intake.cancel(session, asked.key))
        intake.submit(session, asked)
        await asyncio.wait_for(session.heard.wait(), 10)
        await both_idle(prefill, decode)
        assert decode.executor.num_steps < 20


async def test_a_ticket_says_the_time_that_is_left_after_the_wait_for_its_claim(clock: ManualClock) -> None:
    """Deadlines travel as time left: the prefill worker would else work for a client who is told that it is too late."""
    async with a_pair(decode_num_blocks=20, decode_clock=clock) as (prefill, decode), decode.router() as router:
        prefill.executor.go_steps.clear()
        tickets = prefill.worker._source._tickets
        router.submit(a_request("first", length=61, prefill=prefill.target))
        while "first" not in tickets:
            await prefill.worker.changed()
        second = router.submit(a_request("second", length=21, seed=2, seconds_left=10.0, prefill=prefill.target))
        await router.ping()
        clock.advance(4.0)
        router.cancel("first")
        while "second" not in tickets:
            await prefill.worker.changed()
        assert tickets["second"].ticket.request.seconds_left == 6.0
        prefill.executor.go_steps.set()
        assert (await second.end()).error is None


async def test_what_decode_holds_is_not_moved_again() -> None:
    async with a_pair() as (prefill, decode), decode.router() as router:
        await router.submit(a_request("first", length=21, prefill=prefill.target)).end()
        again = await router.submit(a_request("again", length=21, prefill=prefill.target)).end()
        assert again.timeline is not None
        assert again.timeline.blocks_moved == 1
        assert again.tokens == router.answers["first"].tokens


async def test_a_short_rest_is_prefilled_here_and_said_so() -> None:
    async with a_pair() as (prefill, decode), decode.router() as router:
        asked = replace(a_request(length=21, prefill=prefill.target), local_prefill_max_tokens=21)
        answer = await router.submit(asked).end()
        assert said(answer)[0] == said(await answer_alone(asked))[0]  # type: ignore[index]
        assert answer.timeline is not None
        assert answer.timeline.prefill_worker == ""
        assert prefill.executor.num_steps == 0


# -- first tokens and tiny outputs


async def test_case_21_max_tokens_one_yields_one_token_and_moves_nothing() -> None:
    async with a_pair() as (prefill, decode), decode.router() as router:
        answer = await router.submit(a_request(length=6, max_tokens=1, prefill=prefill.target)).end()
        assert len(answer.tokens[0]) == 1
        assert answer.finishes == {0: FinishReason.LENGTH}
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 1
        assert decode.executor.num_pulled == 0
        await both_idle(prefill, decode)


@pytest.mark.parametrize("sampling", [{}, {"ignore_eos": True}, {"min_tokens": 3}])
async def test_case_23_the_first_token_meets_every_stop_rule(sampling: dict[str, object]) -> None:
    asked = a_request(length=9, max_tokens=5)
    first = (await answer_alone(asked)).tokens[0][0]
    identity = replace(IDENTITY, eos_ids=(first,))
    asked = a_request(length=9, max_tokens=5, **sampling)
    expected = await answer_alone(asked, identity=identity)
    async with a_pair(identity=identity) as (prefill, decode), decode.router() as router:
        got = await router.submit(replace(asked, prefill=prefill.target)).end()
        assert said(got) == said(expected)
    if not sampling:
        assert got.finishes == {0: FinishReason.STOP}
        assert got.tokens[0] == [first]


@pytest.mark.parametrize("length", [8, 10])
async def test_case_24_25_n_samples_with_their_first_logprobs(length: int) -> None:
    asked = a_request(length=length, n=3, temperature=0.9, num_logprobs=5, max_tokens=6)
    expected = await answer_alone(asked)
    async with a_pair() as (prefill, decode), decode.router() as router:
        got = await router.submit(replace(asked, prefill=prefill.target)).end()
        assert said(got) == said(expected)
        assert got.finishes.keys() == {0, 1, 2}
        assert all(len(got.logprobs[i]) == len(got.tokens[i]) == 6 for i in range(3))
        assert got.usage is not None
        assert got.usage.prompt_tokens == length
        await both_idle(prefill, decode)


# -- cancel, whenever


async def test_case_03_cancelled_at_any_moment_nothing_stays_held() -> None:
    async with a_pair() as (prefill, decode), decode.router() as router:
        for moment in range(40):
            answer = router.submit(
                a_request(f"q{moment}", length=45, seed=moment, max_tokens=30, prefill=prefill.target)
            )
            for _ in range(8 * moment):
                await asyncio.sleep(0)
            router.cancel(f"q{moment}")
            assert answer.error is None
        await router.submit(a_request("last", prefill=prefill.target)).end()
        await both_idle(prefill, decode)


async def test_case_01_a_cancel_during_the_read_keeps_its_blocks_from_others_until_it_is_over() -> None:
    async with a_pair() as (prefill, decode), decode.router() as router:
        decode.executor.go_pulls.clear()
        router.submit(a_request("gone", length=45, prefill=prefill.target))
        while not decode.counts.quarantined and not decode.counts.active:
            await decode.worker.changed()
        router.cancel("gone")
        while not decode.counts.quarantined or decode.counts.active:
            await decode.worker.changed()
        other = await router.submit(a_request("other", length=30, seed=9)).end()
        decode.executor.go_pulls.set()
        assert other.tokens == (await answer_alone(a_request(length=30, seed=9))).tokens
        await both_idle(prefill, decode)


async def test_case_05_an_abort_between_chunks_frees_the_prefill_side_once() -> None:
    async with a_pair() as (prefill, decode), decode.router() as router:
        router.submit(a_request("q", length=60, prefill=prefill.target))
        while prefill.executor.num_steps < 2:
            await prefill.worker.changed()
        router.cancel("q")
        await both_idle(prefill, decode)
        assert (await router.submit(a_request("next", prefill=prefill.target)).end()).error is None


async def test_case_07_a_cancel_while_the_release_is_on_its_way_hurts_nobody() -> None:
    async with a_pair() as (prefill, decode), decode.router() as router:
        await decode.faults(Fault(point="release", action="delay", seconds=0.2))
        others = [router.submit(a_request(f"o{i}", seed=i, prefill=prefill.target)) for i in range(3)]
        answer = router.submit(a_request("q", length=20, seed=7, max_tokens=50, prefill=prefill.target))
        await answer.until(lambda answer: answer.tokens[0])
        router.cancel("q")
        for other in others:
            assert (await other.end()).error is None
        await both_idle(prefill, decode)


# -- failures


async def answer_to_peer_lost(router: Router, answer: Answer, target: PrefillTarget | None) -> None:
    await answer.until(lambda answer: answer.lost)
    router.place(RequestKey(answer.lost[0].key.request_id, answer.lost[0].key.attempt + 1), target)


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
        case "a read that never ends":
            rig.executor.go_pulls.clear()


@pytest.mark.parametrize(
    "how", ["drop of block 3", "raise in block 3", "stale blocks", "link closed", "a read that never ends"]
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


@pytest.mark.parametrize("length", [1, BLOCK_SIZE + 1, 30])
async def test_with_digests_every_block_that_came_is_what_was_announced(length: int) -> None:
    asked = a_request(length=length, max_tokens=7)
    expected = await answer_alone(asked)
    async with a_pair(handoff=WITH_DIGESTS) as (prefill, decode), decode.router() as router:
        got = await router.submit(replace(asked, prefill=prefill.target)).end()
        assert said(got)[0] == said(expected)[0]  # type: ignore[index]
        assert not got.lost
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


async def test_case_08_a_dead_prefill_worker_is_noticed_at_once() -> None:
    async with a_worker("d0") as decode, decode.router() as router:
        async with a_worker("p0") as prefill:
            prefill.executor.go_steps.clear()
            answer = router.submit(a_request(length=20, prefill=prefill.target))
            while not prefill.worker.num_requests:
                await prefill.worker.changed()
        await answer_to_peer_lost(router, answer, None)
        assert answer.lost[0].error.type == TransferFailed.__name__
        assert said(await answer.end())[0] == said(await answer_alone(a_request(length=20)))[0]  # type: ignore[index]
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


async def test_case_14_waiting_in_the_peers_queue_is_not_peer_death() -> None:
    quick = HANDOFF.model_copy(update={"transfer_seconds": 0.2, "pin_seconds": 0.2})
    async with a_pair(handoff=quick) as (prefill, decode), decode.router() as router:
        prefill.executor.go_steps.clear()
        answer = router.submit(a_request(length=20, prefill=prefill.target))
        for _ in range(3):
            await router.report(lambda report: True)
        assert not answer.lost
        prefill.executor.go_steps.set()
        assert (await answer.end()).error is None
        assert answer.timeline is not None
        assert answer.timeline.prefill_worker == "p0"


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


@pytest.mark.parametrize("how", ["never came", "was dropped"])
async def test_a_lost_ticket_is_noticed_and_placed_again(how: str) -> None:
    """The stream lives and the peer answers beats: only the ticket is gone."""
    patient = HANDOFF.model_copy(update={"transfer_seconds": 600.0})
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


async def test_a_puller_that_falls_silent_holds_no_ticket() -> None:
    """It is frozen, or its host is gone: its connection stands. What is not computed yet has no pin that would end."""
    executor = MemoryExecutor()
    executor.go_steps.clear()
    handoff = HANDOFF.model_copy(update={"transfer_seconds": 0.2, "pin_seconds": 60.0})
    async with a_worker("p0", role=Role.PREFILL, executor=executor, handoff=handoff) as rig:
        call = transfer_pb2_grpc.TransferStub(rig.channel).Link()
        hello = replace(rig.worker._hello, worker_id="d0")
        await call.write(transfer_pb2.PullerMessage(hello=messages.hello_to_pb(hello)))
        ticket = Ticket(a_request(length=20), 0, "r0")
        await call.write(transfer_pb2.PullerMessage(ticket=wire.ticket_to_pb(ticket)))
        while not rig.worker.num_requests:
            await rig.worker.changed()
        async with asyncio.timeout(10):
            while await call.read() is not grpc.aio.EOF:
                pass
            executor.go_steps.set()
            await rig.idle()


DIFFERENT: dict[str, object] = {
    "revision": "r2",
    "kv_dtype": "float8",
    "slab_version": 9,
    "tokenizer": "t2",
    "protocol_version": 1,
}


@pytest.mark.parametrize("field", DIFFERENT)
async def test_case_61_unequal_workers_refuse_each_other_by_name(field: str) -> None:
    other = replace(IDENTITY, compatibility=replace(COMPATIBILITY, **{field: DIFFERENT[field]}))
    async with a_pair(prefill_identity=other) as (prefill, decode), decode.router() as router:
        answer = router.submit(a_request(length=20, prefill=prefill.target))
        await answer.until(lambda answer: answer.lost)
        assert answer.lost[0].error.type == IncompatiblePeer.__name__
        assert answer.lost[0].error.numbers["field"] == field
        await answer_to_peer_lost(router, answer, None)
        assert (await answer.end()).error is None
        assert prefill.executor.num_steps == 0


async def test_another_generation_at_the_address_is_not_the_worker_that_was_meant() -> None:
    async with a_pair() as (prefill, decode), decode.router() as router:
        answer = router.submit(a_request(length=20, prefill=replace(prefill.target, generation=2)))
        await answer.until(lambda answer: answer.lost)
        assert "generation" in answer.lost[0].error.message
        router.cancel("q")
        await both_idle(prefill, decode)


async def test_a_full_prefill_worker_refuses_tickets_as_overloaded() -> None:
    full = ENGINE.model_copy(update={"max_num_seqs": 1, "max_waiting": 1})
    async with a_pair(prefill_engine=full) as (prefill, decode), decode.router() as router:
        prefill.executor.go_steps.clear()
        early = [router.submit(a_request(f"q{i}", seed=i, prefill=prefill.target)) for i in range(2)]
        for number, _ in enumerate(early, start=1):
            while prefill.worker.num_requests < number:
                await prefill.worker.changed()
        late = router.submit(a_request("late", prefill=prefill.target))
        await answer_to_peer_lost(router, late, None)
        assert late.lost[0].error.type == Overloaded.__name__
        assert late.lost[0].error.numbers["limit"] == "1"
        assert (await late.end()).error is None
        prefill.executor.go_steps.set()
        assert [(await answer.end()).error for answer in early] == [None, None]


async def test_a_prompt_that_no_pool_of_the_prefill_worker_holds_is_refused_by_it_as_invalid() -> None:
    async with a_pair(prefill_num_blocks=4) as (prefill, decode), decode.router() as router:
        answer = router.submit(a_request(length=30, prefill=prefill.target))
        await answer_to_peer_lost(router, answer, None)
        assert answer.lost[0].error.type == InvalidRequest.__name__
        assert answer.lost[0].error.numbers["limit"] == "4"
        assert (await answer.end()).error is None


async def test_a_draining_prefill_worker_refuses_tickets_and_stays_until_its_pins_are_pulled() -> None:
    async with a_pair() as (prefill, decode), decode.router() as router:
        decode.executor.go_pulls.clear()
        early = router.submit(a_request("early", length=10, prefill=prefill.target))
        while not prefill.counts.pinned:
            await prefill.worker.changed()
        draining = asyncio.ensure_future(prefill.control.Drain(control_pb2.DrainRequest(grace_seconds=20)))
        while not prefill.worker.draining:
            await prefill.worker.changed()
        late = router.submit(a_request("late", length=10, seed=3, prefill=prefill.target))
        await late.until(lambda answer: answer.lost)
        assert late.lost[0].error.type == Draining.__name__
        assert not draining.done()
        decode.executor.go_pulls.set()
        assert (await early.end()).error is None
        assert (await draining).drained
        await answer_to_peer_lost(router, late, None)
        assert (await late.end()).error is None


async def test_prefill_load_is_told_to_the_router_whose_request_it_is() -> None:
    async with (
        a_pair() as (prefill, decode),
        decode.router("mine") as router,
        prefill.router("mine") as mine,
        prefill.router("other") as other,
    ):
        prefill.executor.go_steps.clear()
        router.submit(a_request(length=20, prefill=prefill.target))
        report = await mine.report(lambda report: report.total.num_running + report.total.num_waiting == 1)
        assert report.yours == report.total
        report = await other.report(lambda report: report.total.num_running + report.total.num_waiting == 1)
        assert report.yours.num_running + report.yours.num_waiting == 0
        prefill.executor.go_steps.set()


async def test_links_are_described() -> None:
    async with a_pair() as (prefill, decode), decode.router() as router:
        await router.submit(a_request(length=20, prefill=prefill.target)).end()
        described = await decode.control.Describe(control_pb2.DescribeRequest())
        (link,) = described.links
        assert (link.worker_id, link.kind, link.state) == ("p0", "memory", "open")
        assert link.bytes == 5 * MemoryExecutor.block_bytes
        assert described.num_handoffs_in == 1
        assert (await prefill.control.Describe(control_pb2.DescribeRequest())).num_handoffs_out == 1
