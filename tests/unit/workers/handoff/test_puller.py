import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from headrace.clock import ManualClock
from headrace.errors import DeadlineExceeded, TransferFailed
from headrace.v1 import control_pb2
from headrace.values import FinishReason, RequestKey, SequenceOutput
from tests.unit.workers.handoff.ends import both_idle, said
from tests.unit.workers.rig import (
    BLOCK_SIZE,
    HANDOFF,
    IDENTITY,
    a_pair,
    a_request,
    answer_alone,
)
from workers.handoff.puller import Announced
from workers.scheduling.scheduler import ChunkDone, Expected
from workers.streams import RouterStream

Fault = control_pb2.Fault


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


async def test_a_request_whose_time_is_up_while_it_waits_for_a_claim_is_offered_none(clock: ManualClock) -> None:
    """Another comes, and asks for all who wait, before its coroutine has noticed."""
    async with a_pair(decode_num_blocks=20, decode_clock=clock) as (prefill, decode), decode.router() as router:
        prefill.executor.go_steps.clear()
        router.submit(a_request("first", length=61, prefill=prefill.target))
        while not prefill.worker.num_requests:
            await prefill.worker.changed()
        late = router.submit(a_request("late", length=21, seed=2, seconds_left=1.0, prefill=prefill.target))
        await router.ping()
        clock.advance(2.0)
        decode.worker._engine.expire(decode.worker)
        decode.worker._puller._grant()
        assert isinstance((await late.end()).error, DeadlineExceeded)


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


@pytest.mark.parametrize("what", ["computed", "read"])
async def test_case_06_an_abort_frees_the_prefill_side_at_once(what: str) -> None:
    """Neither a pin's end nor a deadline is waited for: with many clients that gave up, they would hold all there is."""
    patient = HANDOFF.model_copy(update={"pin_seconds": 600.0, "transfer_seconds": 600.0})
    async with a_pair(handoff=patient) as (prefill, decode), decode.router() as router, asyncio.timeout(20):
        gate = prefill.executor.go_steps if what == "computed" else decode.executor.go_pulls
        gate.clear()
        router.submit(a_request("q", length=21, prefill=prefill.target))
        while not (prefill.worker.num_requests if what == "computed" else prefill.counts.pinned):
            await prefill.worker.changed()
        router.cancel("q")
        while prefill.worker.num_requests or prefill.counts.pinned:
            await prefill.worker.changed()
        gate.set()
        await both_idle(prefill, decode)


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
        (link,) = decode.worker.peers
        assert not link._conversations, "who has ended listens no more"
