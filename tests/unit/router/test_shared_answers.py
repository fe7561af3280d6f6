"""Equal requests, computed once: over a real router core before a scripted worker."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from prometheus_client import REGISTRY

from headrace import metrics
from headrace.clock import ManualClock
from headrace.errors import DeadlineExceeded, Draining, InternalError, Overloaded, QuotaExceeded
from headrace.revisions import Split
from headrace.values import FinishReason, Request, SamplingParams, TokenLogprobs, Usage
from router.decisions.admission import Rules
from router.decisions.quotas import Quotas
from router.decisions.revisions import Revisions
from router.decisions.tenants import Tenancy, Tenant
from router.jobs import Job, Piece, Served
from router.shared_answers import SharedAnswers
from tests.null_worker import NullWorker, worker_info
from tests.unit.router.stage import Stage, collect, job, stage

BOTH = Tenant("both", coalesce=True, cache_results=True)
COALESCE = Tenant("coalesce", coalesce=True)
KEEP = Tenant("keep", cache_results=True)
NEITHER = Tenant("neither")
LIMITED = Tenant("limited", coalesce=True, cache_results=True, requests_per_minute=2, tokens_per_minute=60)
TENANTS = (BOTH, COALESCE, KEEP, NEITHER, LIMITED)


class On:
    def __init__(self, stage: Stage, worker: NullWorker, answers: SharedAnswers, clock: ManualClock) -> None:
        self.stage, self.worker, self.answers, self.clock = stage, worker, answers, clock

    def ask(self, job: Job) -> "asyncio.Task[list[Piece]]":
        return asyncio.create_task(collect(self.answers.stream(job)))

    async def submitted(self) -> Request:
        return await asyncio.wait_for(self.worker.submits.get(), 10)

    def finish(self, request: Request, text: str = "ab") -> None:
        for number in range(1, len(text)):
            self.worker.emit(request.key, [ord(text[number - 1])], num_generated=number)
        last = [ord(text[-1])]
        self.worker.emit(
            request.key, last, num_generated=len(text), finish=FinishReason.LENGTH, usage=Usage(10, len(text))
        )


@asynccontextmanager
async def shared(*, revisions: Revisions | None = None, **options: Any) -> AsyncIterator[On]:
    tenancy = Tenancy({tenant.name: tenant for tenant in TENANTS})
    clock = ManualClock(50.0)
    async with (
        NullWorker() as worker,
        stage(worker, tenancy=tenancy, quotas=Quotas(TENANTS), revisions=revisions) as on,
        asyncio.TaskGroup() as group,
    ):
        yield On(on, worker, SharedAnswers(on.requests, tenancy, clock, group, **options), clock)


def asked(name: str, tenant: Tenant = BOTH, **fields: Any) -> Job:
    return job(name, **{"tenant": tenant.name, "repeatable": True, **fields})


def text(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def count(tenant: str, how: str) -> float:
    return REGISTRY.get_sample_value(metrics.SHARED_ANSWERS, {"tenant": tenant, "how": how}) or 0.0


async def test_equal_requests_in_flight_are_computed_once_and_all_hear_everything() -> None:
    async with shared() as on:
        before = count("coalesce", "coalesced")
        first = on.ask(asked("a", COALESCE))
        request = await on.submitted()
        on.worker.emit(request.key, [ord("x")], num_generated=1)
        second = on.ask(asked("b", COALESCE))
        await asyncio.sleep(0)
        on.worker.emit(request.key, [ord("y")], num_generated=2, finish=FinishReason.LENGTH, usage=Usage(10, 2))
        one, two = await first, await second
        assert text(one) == text(two) == "xy"
        assert one[-1].usage == two[-1].usage == Usage(10, 2)
        assert on.worker.submits.empty()
        assert count("coalesce", "coalesced") == before + 1
        assert on.stage.requests.num_in_flight == 0
        explanation = on.answers.why("b")
        assert explanation is not None
        assert explanation.request_id == "a"


async def test_case_whoever_hears_another_ones_answer_is_told_whose_it_is_too() -> None:
    revisions = Revisions()
    async with shared(revisions=revisions) as on:
        revisions.told(Split(number=1, canary="v2", percent=0.0), on.stage.clock.now())
        served = [Served(), Served()]
        asking = [on.ask(asked(f"r{number}", COALESCE, served=its)) for number, its in enumerate(served)]
        on.finish(await on.submitted())
        await asyncio.gather(*asking)
        assert on.worker.submits.empty()
        assert [its.revision for its in served] == ["stable", "stable"]


@pytest.mark.parametrize(
    "other",
    [
        {"tenant": NEITHER},
        {"tenant": KEEP},
        {"prompt": 11},
        {"max_tokens": 9},
        {"cache_salt": "s"},
        {"stop": ("z",)},
        {"priority": 1},
        {"service_class": "fast"},
        {"n": 2},
        {"repeatable": False},
        {"sampling": SamplingParams(max_tokens=8, temperature=1.0, seed=3)},
    ],
    ids=str,
)
async def test_requests_that_differ_in_anything_are_computed_each(other: dict[str, Any]) -> None:
    async with shared() as on:
        first = on.ask(asked("a", COALESCE))
        request = await on.submitted()
        second = on.ask(asked("b", **{"tenant": COALESCE, **other}))
        another = await on.submitted()
        assert another.key.request_id != request.key.request_id
        on.finish(request)
        assert text(await first) == "ab"
        second.cancel()
        await asyncio.wait([second])


async def test_greedy_requests_are_equal_whatever_seed_was_drawn_for_them() -> None:
    async with shared() as on:
        first = on.ask(asked("a", sampling=SamplingParams(max_tokens=8, temperature=0.0, seed=1)))
        request = await on.submitted()
        second = on.ask(asked("b", sampling=SamplingParams(max_tokens=8, temperature=0.0, seed=2)))
        await asyncio.sleep(0)
        on.finish(request)
        assert text(await first) == text(await second) == "ab"


async def test_who_began_may_leave_and_the_others_hear_on_and_the_last_to_leave_ends_it() -> None:
    async with shared() as on:
        first = on.ask(asked("a"))
        request = await on.submitted()
        second, third = on.ask(asked("b")), on.ask(asked("c"))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait([first])
        assert on.worker.cancels.empty()
        on.worker.emit(request.key, [ord("x")], num_generated=1)
        second.cancel()
        await asyncio.wait([second])
        third.cancel()
        await asyncio.wait([third])
        assert await asyncio.wait_for(on.worker.cancels.get(), 10) == request.key
        late = on.ask(asked("d"))
        another = await on.submitted()
        on.finish(another)
        assert text(await late) == "ab"


async def test_an_error_reaches_all_who_hear_and_nobody_who_comes_later() -> None:
    async with shared() as on:
        first = on.ask(asked("a"))
        request = await on.submitted()
        second = on.ask(asked("b"))
        await asyncio.sleep(0)
        on.worker.emit(request.key, [ord("x")], num_generated=1)
        on.worker.reject(request.key, InternalError("its step failed"))
        for task in (first, second):
            with pytest.raises(InternalError, match="its step failed"):
                await task
        third = on.ask(asked("c"))
        on.finish(await on.submitted())
        assert text(await third) == "ab"


async def test_what_fails_unforeseen_is_logged_and_says_nothing_of_the_inside(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with shared() as on:
        monkeypatch.setattr(on.stage.requests, "_open", lambda job: {}["inside"])
        with pytest.raises(InternalError, match=r"^internal error: KeyError$"):
            await on.ask(asked("a"))
    assert "'inside'" in caplog.text


async def test_a_deadline_ends_the_hearing_of_one_and_not_the_computation() -> None:
    async with shared() as on:
        hasty = on.ask(asked("a", seconds_left=0.05))
        request = await on.submitted()
        assert request.seconds_left is not None
        assert request.seconds_left > 1
        patient = on.ask(asked("b"))
        with pytest.raises(DeadlineExceeded, match=r"0\.05 s"):
            await hasty
        on.finish(request)
        assert text(await patient) == "ab"


async def test_who_would_wait_beyond_its_deadline_is_refused_though_what_it_asks_for_could_be_shared() -> None:
    """Nine run, others wait, and one has its turn every second."""
    clock, tenancy = ManualClock(50.0), Tenancy({COALESCE.name: COALESCE})
    worker = NullWorker(worker_info(max_num_seqs=1))
    async with (
        worker,
        stage(worker, tenancy=tenancy, rules=Rules(32), clock=clock, silent_seconds=1000.0) as on,
        asyncio.TaskGroup() as group,
    ):
        on = On(on, worker, SharedAnswers(on.requests, tenancy, clock, group), clock)
        others = [on.ask(asked(f"r{number}", COALESCE, prompt=20 + number)) for number in range(25)]
        for _ in range(10):
            on.finish(await on.submitted())
            clock.advance(1.0)
        for _ in range(9):
            await on.submitted()
        with pytest.raises(Overloaded, match="its turn would come in about"):
            await on.ask(asked("hasty", COALESCE, prompt=200, seconds_left=0.5))
        for task in others:
            task.cancel()
        await asyncio.wait(others)


async def test_an_answer_is_kept_and_given_again_in_one_piece_a_sample() -> None:
    async with shared() as on:
        before = count("keep", "kept")
        sampling = SamplingParams(max_tokens=8, temperature=0.0, num_logprobs=0)
        first = on.ask(asked("a", KEEP, sampling=sampling, n=2))
        request = await on.submitted()
        for index in (1, 0):
            for number, letter in enumerate("xy", 1):
                on.worker.emit(
                    request.key,
                    [ord(letter)],
                    num_generated=number,
                    index=index,
                    finish=FinishReason.LENGTH if number == 2 else None,
                    usage=Usage(10, 4, cached_tokens=8) if number == 1 else None,
                    logprobs=(TokenLogprobs(ord(letter), -1.0),),
                )
        computed = await first
        again = await on.ask(asked("b", KEEP, sampling=sampling, n=2))
        assert [(piece.index, piece.text, piece.finish) for piece in again] == [
            (1, "xy", "length"),
            (0, "xy", "length"),
        ]
        assert again[-1].usage == computed[-1].usage == Usage(10, 4, 8)
        assert [piece.cached_tokens for piece in again] == [8, 8]
        assert [at.token_id for piece in again for at in piece.logprobs] == [ord(letter) for letter in "xyxy"]
        assert again[-1].timeline is not None
        assert again[-1].timeline.worker.decode_seconds == 0.0
        assert on.worker.submits.empty()
        assert count("keep", "kept") == before + 1


async def test_what_is_kept_is_kept_for_its_time_and_no_failure_is() -> None:
    async with shared(cache_seconds=30.0) as on:
        failing = on.ask(asked("a", KEEP))
        request = await on.submitted()
        on.worker.emit(request.key, [ord("x")], num_generated=1)
        on.worker.reject(request.key, InternalError("broken"))
        with pytest.raises(InternalError):
            await failing
        first = on.ask(asked("b", KEEP))
        on.finish(await on.submitted())
        await first
        on.clock.advance(29.0)
        await on.ask(asked("c", KEEP))
        assert on.worker.submits.empty()
        on.clock.advance(1.5)
        last = on.ask(asked("d", KEEP))
        on.finish(await on.submitted())
        await last


async def test_what_is_kept_is_bounded_and_the_longest_unused_goes_first() -> None:
    async with shared(cache_bytes=9 * 1200) as on:
        for at in range(12):
            task = on.ask(asked(f"r{at}", KEEP, prompt=10 + at))
            on.finish(await on.submitted())
            await task
            if at:
                await on.ask(asked("again", KEEP, prompt=10))
        assert on.worker.submits.empty()
        assert on.answers._kept_bytes <= 9 * 1200
        assert len(on.answers._kept) in (7, 8, 9)
        gone = on.ask(asked("gone", KEEP, prompt=11))
        on.finish(await on.submitted())
        await gone


async def test_an_answer_from_others_tokens_costs_a_request_and_no_tokens() -> None:
    async with shared() as on:
        first = on.ask(asked("a", LIMITED, prompt=10, max_tokens=40))
        on.finish(await on.submitted())
        await first
        assert text(await on.ask(asked("b", LIMITED, prompt=10, max_tokens=40))) == "ab"
        with pytest.raises(QuotaExceeded) as caught:
            await on.ask(asked("c", LIMITED, prompt=10, max_tokens=40))
        assert caught.value.numbers["quota"] == "requests"


async def test_case_45_what_is_ended_under_way_is_an_error_and_no_finished_answer() -> None:
    async with shared() as on:
        task = on.ask(asked("a"))
        request = await on.submitted()
        on.worker.emit(request.key, [ord("x")], num_generated=1)
        on.answers.close()
        assert await asyncio.wait_for(on.worker.cancels.get(), 10) == request.key
        with pytest.raises(Draining):
            await task


async def test_an_answer_that_is_kept_is_given_whoever_is_in_a_hurry() -> None:
    async with shared() as on:
        first = on.ask(asked("a"))
        on.finish(await on.submitted())
        await first
        assert text(await on.ask(asked("b", priority=3, service_class="fast"))) == "ab"
        assert on.worker.submits.empty()
