"""Requests while there is a canary, before scripted workers over real gRPC."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from prometheus_client import REGISTRY

from headrace import metrics
from headrace.errors import DeadlineExceeded, Draining, HeadraceError, NoWorkers, Overloaded, WorkerLost
from headrace.reports import RevisionCounts
from headrace.revisions import Split
from headrace.values import FinishReason, Role, Timeline, Usage
from router.decisions.revisions import Revisions
from router.jobs import Served
from tests.null_worker import NullWorker, worker_info
from tests.unit.router.stage import Stage, begin, collect, ids, job, stage

LENGTH = FinishReason.LENGTH
ALL = Split(number=1, canary="v2", percent=100.0, beat=1)


@asynccontextmanager
async def two(split: Split = ALL, **canary: int) -> AsyncIterator[tuple[Stage, NullWorker, NullWorker, Revisions]]:
    stable = NullWorker(worker_info("s"))
    other = NullWorker(replace(worker_info("c", **canary), revision="v2"))  # type: ignore[arg-type]
    revisions = Revisions()
    async with stable, other, stage(stable, other, revisions=revisions) as on:
        revisions.told(split, on.clock.now())
        yield on, stable, other, revisions


def diverted(reason: str) -> float:
    return REGISTRY.get_sample_value(metrics.DIVERTED, {"reason": reason}) or 0.0


async def test_a_request_of_the_canary_runs_there_and_says_so() -> None:
    async with two() as (on, _, canary, _):
        served = Served()
        task, request = await begin(on, canary, max_tokens=3, served=served)
        canary.emit(request.key, ids("ab"), num_generated=2)
        canary.emit(request.key, ids("c"), num_generated=3, finish=LENGTH, usage=Usage(10, 3, 4), timeline=Timeline())
        pieces = await task
        assert served.revision == "v2"
        assert pieces[-1].timeline is not None
        assert pieces[-1].timeline.revision == "v2"
        report = on.requests.report()
        counts = report.revisions["v2"]
        assert (report.canary, list(report.revisions)) == (1, ["v2"])
        assert (counts.ended, counts.failed, counts.met) == (1, 0, 1)
        assert (counts.prompt_tokens, counts.cached_tokens, counts.generated_tokens) == (10, 4, 3)
        assert sum(counts.ttft.values()) == sum(counts.tpot.values()) == 1
        why = on.requests.why("r")
        assert why is not None
        assert why.revision == "v2"


async def test_without_a_canary_nothing_is_said_or_counted() -> None:
    async with two(Split()) as (on, _, _, _):
        stream = on.requests.stream(job(served=(served := Served())))
        await stream.aclose()
        assert served.revision == ""
        assert on.requests.report().revisions == {}


async def test_what_a_canary_gives_up_is_answered_by_what_serves_and_is_the_canarys_failure() -> None:
    async with two() as (on, stable, canary, _):
        before = diverted("failed")
        task, request = await begin(on, canary, max_tokens=1)
        canary.reject(request.key, WorkerLost("it computes no more"))
        again = await stable.submits.get()
        stable.emit(again.key, ids("a"), num_generated=1, finish=LENGTH, usage=Usage(10, 1), timeline=Timeline())
        assert (await task)[-1].timeline.revision == "stable"  # type: ignore[union-attr]
        assert on.requests.report().revisions == {"v2": RevisionCounts(ended=1, failed=1)}
        assert diverted("failed") == before + 1


@pytest.mark.parametrize("error", [Overloaded("full"), Draining("its node is taken away")])
async def test_case_a_canary_that_is_full_or_drains_has_no_room_and_did_not_fail(error: HeadraceError) -> None:
    """Eight routers place on one worker: what its queue refuses was the canary's failure, and ended it."""
    async with two() as (on, stable, canary, _):
        before = diverted("no_room")
        task, request = await begin(on, canary, max_tokens=1)
        canary.reject(request.key, error)
        again = await stable.submits.get()
        stable.emit(again.key, ids("a"), num_generated=1, finish=LENGTH, usage=Usage(10, 1), timeline=Timeline())
        await task
        assert diverted("no_room") == before + 1
        assert {name: its.failed for name, its in on.requests.report().revisions.items()} == {"stable": 0}


async def test_case_a_client_whose_own_deadlines_leave_no_time_ends_no_canary() -> None:
    """One conversation that asked for answers within a millisecond failed on the canary alone, and rolled it back."""
    async with two() as (on, _, canary, _):
        for number in range(3):
            task, _ = await begin(on, canary, request_id=f"r{number}", seconds_left=0.02)
            with pytest.raises(DeadlineExceeded):
                await task
        report = on.requests.report()
        assert report.ended == 3
        assert report.revisions == {}, "nor is it a failure of what serves"
        assert sum(its.failed for its in report.classes.values()) == 0, "for which the autoscaler would start workers"


async def test_case_canaries_that_are_numbered_anew_are_counted_too() -> None:
    """Where Redis was flushed: routers counted none of a lower number than they had known, so that nobody judged it."""
    async with two(replace(ALL, number=5)) as (on, _, canary, revisions):
        late, slow = await begin(on, canary, max_tokens=1)
        for number in (5, 1):
            revisions.told(replace(ALL, number=number), on.clock.now())
            task, request = await begin(on, canary, max_tokens=1)
            canary.emit(request.key, ids("a"), num_generated=1, finish=LENGTH, usage=Usage(10, 1), timeline=Timeline())
            await task
            report = on.requests.report()
            assert (report.canary, report.revisions["v2"].ended) == (number, 1)
        canary.emit(slow.key, ids("a"), num_generated=1, finish=LENGTH, usage=Usage(10, 1), timeline=Timeline())
        await late
        assert on.requests.report().revisions["v2"].ended == 1, "it was of the one before"


async def test_a_canary_that_dies_fails_nobody_before_his_first_token() -> None:
    stable = NullWorker(worker_info("s"))
    revisions = Revisions()
    async with stable:
        async with NullWorker(replace(worker_info("c"), revision="v2")) as canary:
            on_stage = stage(stable, canary, revisions=revisions)
            on = await on_stage.__aenter__()
            revisions.told(ALL, on.clock.now())
            task, _ = await begin(on, canary, max_tokens=1)
        again = await stable.submits.get()
        stable.emit(again.key, ids("a"), num_generated=1, finish=LENGTH, usage=Usage(10, 1), timeline=Timeline())
        assert (await task)[-1].finish == "length"
        await on_stage.__aexit__(None, None, None)


async def test_a_full_canary_holds_up_nobody() -> None:
    async with two(max_num_seqs=1) as (on, stable, canary, _):
        before = diverted("no_room")
        tasks = [(await begin(on, canary))[0] for _ in range(9)]  # its one row, and the backlog that a worker takes
        task, request = await begin(on, stable, max_tokens=1)
        stable.emit(request.key, ids("a"), num_generated=1, finish=LENGTH, usage=Usage(10, 1), timeline=Timeline())
        await task
        assert diverted("no_room") == before + 1
        assert on.requests.num_queued == 0
        for running in tasks:
            running.cancel()


async def test_a_roll_back_lets_what_runs_finish_and_sends_no_more_there() -> None:
    async with two() as (on, stable, canary, revisions):
        running, request = await begin(on, canary, max_tokens=2)
        revisions.told(replace(ALL, percent=0.0, beat=2), on.clock.now())
        later, other = await begin(on, stable, max_tokens=1)
        canary.emit(request.key, ids("ab"), num_generated=2, finish=LENGTH, usage=Usage(10, 2), timeline=Timeline())
        stable.emit(other.key, ids("a"), num_generated=1, finish=LENGTH, usage=Usage(10, 1), timeline=Timeline())
        assert (await running)[-1].finish == (await later)[-1].finish == "length"


async def test_prefill_and_decode_are_of_one_revision_whatever_the_other_would_gain() -> None:
    workers = [NullWorker(worker_info("p", Role.PREFILL)), NullWorker(worker_info("d", Role.DECODE))]
    canary = NullWorker(replace(worker_info("c", Role.DECODE), revision="v2"))
    revisions = Revisions()
    async with workers[0], workers[1], canary, stage(*workers, canary, revisions=revisions) as on:
        revisions.told(ALL, on.clock.now())
        task, request = await begin(on, canary, prompt=200)
        assert request.prefill is None, "p is of another revision, though their KV is alike"
        task.cancel()
        revisions.told(replace(ALL, percent=0.0), on.clock.now())
        task, request = await begin(on, workers[1], prompt=200)
        assert request.prefill is not None
        task.cancel()


async def test_a_rolled_back_canary_serves_nobody_though_nothing_else_is_left() -> None:
    canary = NullWorker(replace(worker_info("c"), revision="v2"))
    revisions = Revisions()
    async with canary, stage(canary, revisions=revisions) as on:
        revisions.told(replace(ALL, percent=0.0), on.clock.now())
        with pytest.raises(NoWorkers):
            await collect(on.requests.stream(job()))
        revisions.told(ALL, on.clock.now())
        task, request = await begin(on, canary, max_tokens=1)
        canary.reject(request.key, WorkerLost("gone"))
        with pytest.raises((WorkerLost, NoWorkers)):
            await task
