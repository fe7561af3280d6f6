"""A router's report says what its requests did."""

import asyncio

import pytest

from headrace.errors import Overloaded, QuotaExceeded
from headrace.reports import ClassCounts
from headrace.values import DEFAULT_TENANT, FinishReason, Timeline, Usage
from router.decisions.admission import Rules
from router.decisions.quotas import Quotas
from router.decisions.tenants import Targets, Tenant
from tests.null_worker import NullWorker, worker_info
from tests.unit.router.stage import begin, collect, ids, job, pair, stage

LENGTH = FinishReason.LENGTH


async def test_counts_follow_requests_from_their_arrival_to_their_end() -> None:
    p, d = pair()
    async with p, d, stage(p, d) as on:
        slow = Targets(ttft_seconds=1e-9)
        task, request = await begin(on, d, max_tokens=3, service_class="chat", targets=slow)
        report = on.requests.report()
        assert (report.arrivals, report.prompt_tokens, report.max_tokens) == (1, 10, 3)
        assert (report.in_flight, report.queued, report.ended) == (1, 0, 0)
        timeline = Timeline(prefill_worker="p")
        d.emit(request.key, ids("abc"), num_generated=3, finish=LENGTH, usage=Usage(10, 3, 4), timeline=timeline)
        await task
        task, request = await begin(on, d, max_tokens=1)
        d.emit(request.key, ids("a"), num_generated=1, finish=LENGTH, usage=Usage(10, 1), timeline=Timeline())
        await task
        report = on.requests.report()
        assert (report.arrivals, report.ended, report.in_flight) == (2, 2, 0)
        assert (report.cached_tokens, report.computed_tokens, report.generated_tokens) == (4, 16, 4)
        assert report.ttft_seconds > 0
        assert report.classes == {"chat": ClassCounts(missed_ttft=1), "": ClassCounts(met=1)}
        assert report.pairs == {("p", "d"): 1, ("", "d"): 1}
        on.requests.forget("p")
        assert on.requests.report().pairs == {("", "d"): 1}, "a worker that is gone is not spoken of"


async def test_who_waits_is_said_and_who_is_refused_has_arrived_and_failed() -> None:
    async with NullWorker(worker_info(max_num_seqs=1)) as worker, stage(worker, rules=Rules(1)) as on:
        running, _ = await begin(on, worker)
        queued = []
        refused = 0
        while not refused:
            stream = on.requests.stream(job(f"q{len(queued)}"))
            waits = asyncio.ensure_future(collect(stream))
            await asyncio.sleep(0)
            if waits.done():
                with pytest.raises(Overloaded):
                    await waits
                refused += 1
            else:
                queued.append(waits)
        report = on.requests.report()
        assert report.arrivals == len(queued) + 2
        assert (report.queued, report.queued_tokens) == (1, 10)
        assert report.oldest_queued_seconds >= 0
        assert report.classes[""] == ClassCounts(failed=1)
        for task in (running, *queued):
            task.cancel()


async def test_who_is_beyond_a_quota_is_denied_and_missed_no_target() -> None:
    quotas = Quotas([Tenant(DEFAULT_TENANT, max_concurrent=1)])
    async with NullWorker(worker_info()) as worker, stage(worker, quotas=quotas) as on:
        running, _ = await begin(on, worker)
        with pytest.raises(QuotaExceeded):
            await collect(on.requests.stream(job("beyond")))
        report = on.requests.report()
        assert (report.arrivals, report.denied, report.denied_tokens) == (2, 1, 10)
        assert report.classes == {}
        running.cancel()
