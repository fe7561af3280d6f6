"""What tenants, quotas, classes and a bounded queue do to the life of a request, before scripted workers."""

import asyncio
from typing import Any

import pytest

from headrace import metrics
from headrace.clock import ManualClock
from headrace.costmodel import CostModel
from headrace.errors import InternalError, InvalidRequest, Overloaded, QuotaExceeded
from headrace.values import Load, Usage
from router.decisions.admission import Rules
from router.decisions.quotas import Quotas
from router.decisions.room import WORKER_BACKLOG
from router.decisions.tenants import Targets, Tenancy, Tenant
from tests.null_worker import NullWorker, worker_info
from tests.unit.router.stage import LENGTH, Stage, begin, collect, ids, job, metric, stage

COST = CostModel(prefill_base_seconds=0.0, prefill_token_seconds=1e-4)


def tenancy_of(*tenants: Tenant) -> Any:
    return {"tenancy": Tenancy({tenant.name: tenant for tenant in tenants}), "quotas": Quotas(tenants)}


async def test_a_tenants_quota_is_what_its_requests_came_to_and_each_decision_is_counted() -> None:
    tenant = Tenant("frugal", tokens_per_minute=100)
    asked = {"tenant": "frugal", "prompt": 10, "max_tokens": 60}
    outcomes = ("admitted", "quota_tokens")
    before = {outcome: metric(metrics.ADMISSIONS, tenant="frugal", outcome=outcome) for outcome in outcomes}
    async with NullWorker() as worker, stage(worker, **tenancy_of(tenant)) as on:
        task, request = await begin(on, worker, **asked)
        with pytest.raises(QuotaExceeded) as caught:
            await collect(on.requests.stream(job("late", **asked)))
        assert caught.value.numbers == {"quota": "tokens", "limit": "100", "needed": "70", "left": "30"}
        assert caught.value.retry_after_seconds is not None
        assert 20 <= caught.value.retry_after_seconds <= 24
        worker.emit(request.key, ids("ab"), num_generated=2, finish=LENGTH, usage=Usage(10, 2, 4))
        await task
        task, request = await begin(on, worker, **asked)  # 12 of 100 are spent
        worker.emit(request.key, ids("a"), num_generated=1, finish=LENGTH, usage=Usage(10, 1))
        await task
    after = {outcome: metric(metrics.ADMISSIONS, tenant="frugal", outcome=outcome) for outcome in outcomes}
    assert {outcome: after[outcome] - before[outcome] for outcome in outcomes} == {"admitted": 2, "quota_tokens": 1}
    kinds = {
        kind: metric(metrics.TENANT_TOKENS, tenant="frugal", kind=kind) for kind in ("prompt", "cached", "generated")
    }
    assert kinds == {"prompt": 20, "cached": 4, "generated": 3}


async def test_a_request_that_every_worker_refuses_costs_no_tokens_and_one_that_fails_its_prompt() -> None:
    quotas = tenancy_of(Tenant("frugal", tokens_per_minute=100))
    async with NullWorker() as worker, stage(worker, **quotas) as on:
        for error, left in ((Overloaded("full"), 100), (InternalError("broken"), 90)):
            task, request = await begin(on, worker, tenant="frugal", prompt=10)
            worker.reject(request.key, error)
            with pytest.raises(type(error)):
                await task
            (tokens,) = quotas["quotas"].slices("frugal")
            assert left <= tokens.balance < left + 1


@pytest.mark.parametrize("end", ["finished", "failed", "left", "left the queue"])
async def test_a_slot_comes_back_whichever_way_a_request_ends(end: str) -> None:
    info = worker_info(max_num_seqs=1)
    async with NullWorker(info) as worker, stage(worker, **tenancy_of(Tenant("one", max_concurrent=1))) as on:
        others = []
        if end == "left the queue":
            others = [asyncio.create_task(collect(on.requests.stream(job(f"o{at}")))) for at in range(9)]
            for _ in others:
                await asyncio.wait_for(worker.submits.get(), 10)
        task = asyncio.create_task(collect(on.requests.stream(job("a", tenant="one"))))
        if not others:
            request = await asyncio.wait_for(worker.submits.get(), 10)
        else:
            await asyncio.sleep(0)
        with pytest.raises(QuotaExceeded):
            await collect(on.requests.stream(job("b", tenant="one")))
        if end == "finished":
            worker.emit(request.key, ids("a"), num_generated=1, finish=LENGTH, usage=Usage(10))
        elif end == "failed":
            worker.reject(request.key, InvalidRequest("no", field="x"))
        else:
            task.cancel()
        await asyncio.wait([task])
        for other in others:
            other.cancel()
        await asyncio.wait([task, *others])
        again, request = await begin(on, worker, tenant="one")
        worker.emit(request.key, ids("a"), num_generated=1, finish=LENGTH, usage=Usage(10))
        assert (await again)[-1].text == "a"


async def test_case_54_one_tenant_cannot_keep_the_others_out_of_a_full_queue() -> None:
    """The last of its own gives way, and its client is told so with a time to come back."""
    info = worker_info(max_num_seqs=1)
    tenants = tenancy_of(Tenant("greedy"), Tenant("modest"))
    async with NullWorker(info) as worker, stage(worker, max_queue=3, **tenants) as on:
        tasks = [asyncio.create_task(collect(on.requests.stream(job(f"g{at}", tenant="greedy")))) for at in range(12)]
        requests = [await asyncio.wait_for(worker.submits.get(), 10) for _ in range(9)]
        modest = asyncio.create_task(collect(on.requests.stream(job("m", tenant="modest"))))
        with pytest.raises(Overloaded, match="another tenant's request") as caught:
            await tasks[-1]
        assert caught.value.retry_after_seconds is not None
        assert metric(metrics.ADMISSIONS, tenant="greedy", outcome="pushed_out") == 1
        for request in requests:
            worker.emit(request.key, ids("a"), num_generated=1, finish=LENGTH, usage=Usage(10))
        for _ in range(3):
            request = await asyncio.wait_for(worker.submits.get(), 10)
            worker.emit(request.key, ids("a"), num_generated=1, finish=LENGTH, usage=Usage(10))
        assert (await modest)[-1].text == "a"
        await asyncio.gather(*tasks[:-1])


async def read(on: Stage, first: asyncio.Event) -> None:
    async for _ in on.requests.stream(job(service_class="fast", targets=Targets(1.0, 0.1), max_tokens=3)):
        first.set()


async def test_how_a_class_is_served_is_counted_by_what_it_missed() -> None:
    def counts() -> dict[str, float]:
        outcomes = ("met", "ttft", "tpot", "both", "failed")
        return {at: metric(metrics.SLO, service_class="fast", outcome=at) for at in outcomes}

    before = counts()
    clock = ManualClock(5.0)
    async with NullWorker() as worker, stage(worker, clock=clock, silent_seconds=1e9) as on:
        for ttft, tpot, outcome in ((0.5, 0.01, "met"), (1.5, 0.01, "ttft"), (0.5, 0.2, "tpot"), (1.5, 0.2, "both")):
            first = asyncio.Event()
            task = asyncio.create_task(read(on, first))
            request = await asyncio.wait_for(worker.submits.get(), 10)
            clock.advance(ttft)
            worker.emit(request.key, ids("a"), num_generated=1, usage=Usage(10))
            await asyncio.wait_for(first.wait(), 10)
            clock.advance(2 * tpot)
            worker.emit(request.key, ids("bc"), num_generated=3, finish=LENGTH)
            await task
            after = counts()
            assert {at for at in after if after[at] > before[at]} == {outcome}
            before = after
        task, request = await begin(on, worker, service_class="fast", targets=Targets(1.0, 0.1))
        worker.reject(request.key, InvalidRequest("no", field="x"))
        await asyncio.wait([task])
        assert counts()["failed"] == before["failed"] + 1


async def test_prompts_wait_here_while_the_workers_have_enough_to_prefill() -> None:
    info = worker_info(cost=COST)
    async with NullWorker(info) as worker, stage(worker, rules=Rules(9, prefill_backlog_seconds=1.0)) as on:
        worker.report(Load(num_waiting=WORKER_BACKLOG, waiting_prefill_tokens=20_000))
        await on.until(lambda: on.requests.view().workers[0].queue_seconds > 1)
        task = asyncio.create_task(collect(on.requests.stream(job())))
        await asyncio.sleep(0)
        assert (on.requests.num_queued, worker.submits.empty()) == (1, True)
        worker.report(Load(num_waiting=WORKER_BACKLOG, waiting_prefill_tokens=5_000))
        request = await asyncio.wait_for(worker.submits.get(), 10)
        worker.emit(request.key, ids("a"), num_generated=1, finish=LENGTH, usage=Usage(10))
        await task
