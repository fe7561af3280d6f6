"""The self-check against a worker that a test speaks for, and the index that it publishes to a real Valkey."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import pytest

from headrace.clock import SystemClock
from headrace.errors import Draining, HeadraceError, Overloaded
from headrace.keys import Keys
from headrace.values import FinishReason, Load, Request, Usage
from router.decisions.caches import Caches
from router.decisions.costs import Costs
from router.decisions.health import Health
from router.decisions.ledger import Ledger
from router.decisions.self_check import Checks, Outcome, Reason, Result, Verdict, decode_result, encode_result
from router.decisions.truth import Fallback
from router.decisions.view import View, class_of
from router.decisions.views import worker_view
from router.mailbox import Pacer
from router.self_check import LOOK_SECONDS, LOWEST_PRIORITY, NUM_BLOCKS, SelfCheck
from router.sessions import Sessions
from tests.null_worker import NullWorker
from tests.unit.router.following import KEYS, Scene, scene
from tests.unit.router.publisher import Publisher

pytestmark = pytest.mark.redis
BLOCK = 32
WHOLE = NUM_BLOCKS * BLOCK
PASSED = Verdict(Outcome.PASSED)


class Heard(Checks):
    """Checks that can be waited for."""

    def __init__(self) -> None:
        super().__init__(0.01, 0.01)
        self.results: asyncio.Queue[Result] = asyncio.Queue()
        self.looked = asyncio.Event()
        self.num_looks = 0

    def begin(self, now: float, ready: Callable[[str, bool], bool]) -> Iterator[tuple[str, int, int]]:
        self.num_looks += 1
        yield from super().begin(now, ready)
        self.looked.set()

    def ended(self, worker: str, result: Result, now: float) -> bool:
        counts = super().ended(worker, result, now)
        self.results.put_nowait(result)
        return counts

    async def next(self) -> Verdict:
        return (await asyncio.wait_for(self.results.get(), 20)).verdict


@dataclass
class Checked:
    worker: NullWorker
    publisher: Publisher
    sessions: Sessions
    scene: Scene
    caches: Caches
    checks: Heard

    def chain(self, request: Request, **changes: Any) -> list[Any]:
        same = class_of(self.worker.info.compatibility)._replace(**changes)
        return list(same.hasher(request.cache_salt).chain(request.prompt_token_ids))

    async def asked(self) -> Request:
        return await asyncio.wait_for(self.worker.submits.get(), 20)

    def answer(self, request: Request, cached_tokens: int) -> None:
        usage = Usage(request.num_prompt_tokens, 0, cached_tokens)
        self.worker.emit(request.key, [65], num_generated=1, finish=FinishReason.LENGTH, usage=usage)

    async def serve(self, cached: Sequence[int] = (0, WHOLE), **changes: Any) -> list[Request]:
        """Both prompts of a check: the blocks are published with the first, as a hash class with `changes` names them."""
        asked = []
        for number, cached_tokens in enumerate(cached):
            asked.append(await self.asked())
            if not number:
                await self.publisher.store_blocks(self.chain(asked[0], **changes))
            self.answer(asked[-1], cached_tokens)
        return asked

    def view(self) -> View:
        info = self.worker.info
        return View((worker_view(info, None, Ledger(), Health(), Costs()),))

    def predicted(self, request: Request) -> tuple[int, tuple[Fallback, ...]]:
        """How much of a prompt placement would count on."""
        found = self.caches.predict(request.prompt_token_ids, request.cache_salt, self.view(), 0.0)
        return found.cached_tokens.get("null", 0), found.fallbacks


@asynccontextmanager
async def checking(redis_url: str, *, reports: bool = True, known: Result | None = None) -> AsyncIterator[Checked]:
    clock = SystemClock()
    sessions = Sessions("t", clock, heartbeat_seconds=0.5, silent_seconds=5.0)
    async with NullWorker() as worker, scene(redis_url, sessions, budget_seconds=5.0, scan_seconds=0.25) as on_scene:
        publisher = Publisher(on_scene.redis, KEYS, "null", address=worker.address)
        await publisher.lease()
        await publisher.rewrite()
        if known is not None:
            await on_scene.redis.set(KEYS.self_check("null"), encode_result(known))
        caches, checks = Caches(on_scene.index), Heard()
        checked = Checked(worker, publisher, sessions, on_scene, caches, checks)
        check = SelfCheck(
            router_id="t",
            checks=checks,
            sessions=sessions,
            index=on_scene.index,
            caches=caches,
            followed=on_scene.follow,
            view=checked.view,
            store=on_scene.store,
            keys=KEYS,
            pacer=Pacer(0.0, asyncio.get_running_loop()),
            clock=clock,
            randomness=Random(1),
        )
        live = asyncio.Event()
        sessions.listen(lambda worker_id: live.set())
        tasks = [asyncio.create_task(each.run()) for each in (sessions, on_scene.follow, check)]
        try:
            await asyncio.wait_for(live.wait(), 20)
            if reports:
                worker.report(Load())
            yield checked
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)


async def test_a_sound_worker_passes_by_two_cheap_prompts_that_are_nobodys(redis_url: str) -> None:
    async with checking(redis_url) as checked:
        first, second = await checked.serve()
        assert await checked.checks.next() == PASSED
        assert first.prompt_token_ids == second.prompt_token_ids
        assert first.cache_salt == second.cache_salt
        assert first.cache_salt.startswith("\0"), "a client could name it"
        assert (first.priority, first.sampling.max_tokens, first.prefill) == (LOWEST_PRIORITY, 1, None)
        assert first.num_prompt_tokens == WHOLE + 1
        told = decode_result(await checked.scene.redis.get(KEYS.self_check("null")))
        assert told == Result(1, 1, PASSED, "t")
        assert await checked.scene.redis.ttl(KEYS.self_check("null")) > 0
        assert not await checked.scene.redis.exists(KEYS.self_check_claim("null"))
        assert checked.worker.submits.empty()
        assert checked.worker.cancels.empty()


async def test_case_31_34_a_worker_that_names_its_blocks_otherwise_is_caught_and_back_once_it_passes(
    redis_url: str,
) -> None:
    """Its probe in the hello is right, its events are not: of another block size or seed than it says."""
    async with checking(redis_url) as checked:
        await checked.serve(revision="other")
        asked = await checked.serve(revision="other")  # once may be chance
        assert await checked.checks.next() == Verdict(Outcome.FAILED, Reason.KEYS)
        await checked.publisher.store_blocks(checked.chain(asked[0]))
        while checked.scene.index.num_blocks("null") < 2 * NUM_BLOCKS:
            checked.scene.index.applied.clear()
            await checked.scene.index.applied.wait()
        assert checked.predicted(asked[0]) == (0, (Fallback.SELF_CHECK,))
        await checked.serve()
        assert await checked.checks.next() == PASSED
        assert checked.predicted(asked[0]) == (WHOLE, ())


@pytest.mark.parametrize(
    ("cached", "reason"),
    [((0, 0), Reason.CACHED_TOKENS), ((0, BLOCK), Reason.CACHED_TOKENS), ((BLOCK, WHOLE), Reason.COLD_HIT)],
)
async def test_a_worker_that_lies_of_its_cached_tokens_is_caught(
    redis_url: str, cached: tuple[int, int], reason: Reason
) -> None:
    async with checking(redis_url) as checked:
        for _ in range(1 if reason is Reason.COLD_HIT else 2):
            await checked.serve(cached)
        assert await checked.checks.next() == Verdict(Outcome.FAILED, reason)


async def test_a_worker_without_a_prefix_cache_says_so_and_is_sound(redis_url: str) -> None:
    async with checking(redis_url) as checked:
        for _ in range(2):
            checked.answer(await checked.asked(), 0)
        assert await checked.checks.next() == Verdict(Outcome.UNCACHED)


@pytest.mark.parametrize("error", [Draining("it drains"), Overloaded("it is full")])
async def test_a_worker_that_is_full_or_drains_is_asked_again(redis_url: str, error: HeadraceError) -> None:
    async with checking(redis_url) as checked:
        checked.worker.reject((await checked.asked()).key, error)
        assert await checked.checks.next() == Verdict(Outcome.UNDECIDED, Reason.REFUSED)
        (first, _) = await checked.serve()
        assert await checked.checks.next() == PASSED
        assert checked.predicted(first) == (WHOLE, ())


async def test_blocks_that_were_evicted_before_they_were_asked_for_prove_nothing(redis_url: str) -> None:
    async with checking(redis_url) as checked:
        first = await checked.asked()
        chain = checked.chain(first)
        await checked.publisher.store_blocks(chain)
        checked.answer(first, 0)
        second = await checked.asked()
        for block in chain:
            await checked.publisher.remove([int.from_bytes(block, "big")])
        while checked.scene.index.num_blocks("null"):
            checked.scene.index.applied.clear()
            await checked.scene.index.applied.wait()
        checked.answer(second, 0)
        assert await checked.checks.next() == Verdict(Outcome.UNDECIDED, Reason.EVICTED)


async def test_case_blocks_that_were_evicted_and_came_again_unseen_are_no_failure(redis_url: str) -> None:
    """In a cache under pressure: the mirror holds them before and after, and the worker computed them between."""
    async with checking(redis_url) as checked:
        await checked.serve((0, 0))
        await checked.serve()
        assert await checked.checks.next() == PASSED


async def test_case_a_worker_that_says_what_cannot_be_ends_no_router(redis_url: str) -> None:
    async with checking(redis_url, reports=False) as checked:
        session = checked.sessions.find("null")
        assert session is not None
        session.info = replace(session.info, capacity=replace(session.info.capacity, vocab_size=0))
        checked.worker.report(Load())
        assert await checked.checks.next() == Verdict(Outcome.UNDECIDED, Reason.REFUSED)
        assert checked.worker.submits.empty()


async def test_case_reports_of_workers_that_cannot_be_checked_yet_are_not_each_looked_at(redis_url: str) -> None:
    """A thousand workers report 2,000 times a second: where Redis is away none can be checked, and each look is at all."""
    async with checking(redis_url, reports=False) as checked:
        session = checked.sessions.find("null")
        assert session is not None
        busy = Load(num_waiting=1, waiting_prefill_tokens=500)
        checked.worker.report(busy)
        while session.report is None:
            checked.checks.looked.clear()
            await asyncio.wait_for(checked.checks.looked.wait(), 20)
        heard = asyncio.Event()
        checked.sessions.listen(lambda worker_id: heard.set())
        before, began = checked.checks.num_looks, SystemClock().now()
        for number in range(1, 200):
            checked.worker.report(replace(busy, num_waiting=number))
        while session.report.total.num_waiting < 199:
            heard.clear()
            await asyncio.wait_for(heard.wait(), 20)
        seconds = SystemClock().now() - began
        assert checked.checks.num_looks - before <= seconds / LOOK_SECONDS + 2


async def test_a_worker_is_asked_once_it_takes_requests_and_has_nothing_else_to_do(redis_url: str) -> None:
    async with checking(redis_url, reports=False) as checked:
        session = checked.sessions.find("null")
        assert session is not None
        busy = Load(num_waiting=1, waiting_prefill_tokens=500)
        for load, draining in ((Load(), True), (busy, False)):
            checked.worker.report(load, draining=draining)
            while session.report is None or (session.report.total, session.report.draining) != (load, draining):
                checked.checks.looked.clear()
                await asyncio.wait_for(checked.checks.looked.wait(), 20)
            assert not any(task.get_name() == "self-check of null" for task in asyncio.all_tasks())
        checked.worker.report(Load())
        await checked.serve()
        assert await checked.checks.next() == PASSED


async def test_what_another_router_found_is_taken_over_without_a_prompt(redis_url: str) -> None:
    failed = Result(1, 1, Verdict(Outcome.FAILED, Reason.KEYS), "other")
    async with checking(redis_url, known=failed) as checked:
        assert await checked.checks.next() == failed.verdict
        assert checked.worker.submits.empty()
        await checked.serve()  # its own turn, later
        assert await checked.checks.next() == PASSED
    async with checking(redis_url, known=Result(1, 3, PASSED, "other")) as checked:
        assert await checked.checks.next() == PASSED
        assert checked.worker.submits.empty()


async def test_of_another_generation_nothing_is_taken_over(redis_url: str) -> None:
    async with checking(redis_url, known=Result(2, 1, PASSED, "other")) as checked:
        await checked.serve()
        assert await checked.checks.next() == PASSED


async def test_without_redis_nothing_is_asked_and_nobody_is_doubted(redis_url: str) -> None:
    async with checking(redis_url, reports=False) as checked:
        await checked.scene.redis.hset(Keys("test").self_check("null"), mapping={"what": "is this"})
        checked.worker.report(Load())
        assert await checked.checks.next() == Verdict(Outcome.UNDECIDED, Reason.UNFOLLOWED)
        assert checked.worker.submits.empty()
