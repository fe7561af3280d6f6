"""What the index promises of workers, and what requests make of it."""

import asyncio

from prometheus_client import REGISTRY

from headrace import metrics
from headrace.values import (
    Load,
    Role,
    Timeline,
    Usage,
)
from tests.null_worker import NullWorker, worker_info
from tests.unit.router.stage import LENGTH, begin, collect, ids, job, metric, promise, stage

TRUTH = (metrics.PREDICTED_CACHED_TOKENS, metrics.ACTUAL_CACHED_TOKENS)


async def test_a_worker_that_lacks_what_its_index_promises_is_routed_by_load_alone() -> None:
    """And each placement that passes over the index says so in a counter."""
    liar, honest = NullWorker(worker_info("liar", block_size=4)), NullWorker(worker_info("honest", block_size=4))
    async with liar, honest, stage(liar, honest) as on:
        promise(on, liar, range(400))
        promise(on, honest, ())
        before = metric(metrics.INDEX_FALLBACKS, reason="distrusted")

        async def answer(worker: NullWorker) -> None:
            while True:
                request = await worker.submits.get()
                worker.emit(request.key, ids("a"), num_generated=1, finish=LENGTH, usage=Usage(400))

        answering = [asyncio.create_task(answer(worker)) for worker in (liar, honest)]
        for number in range(4):
            await asyncio.wait_for(collect(on.requests.stream(job(f"r{number}", prompt=400))), 10)
        explanations = [on.requests.why(f"r{number}") for number in range(4)]
        for task in answering:
            task.cancel()
        counted_on = [
            {c.worker_id: c.cached_tokens for c in explanation.whys[0].candidates}["liar"]
            for explanation in explanations
            if explanation is not None
        ]
        assert counted_on == [399, 399, 399, 0]
        assert metric(metrics.INDEX_FALLBACKS, reason="distrusted") == before + 1
        assert metric(metrics.INDEX_ERROR, worker="liar") > 0.9


async def test_no_series_speaks_of_a_worker_that_is_gone() -> None:
    async with NullWorker(worker_info("leaves")) as worker, stage(worker) as on:
        promise(on, worker, range(64))
        task, request = await begin(on, worker, prompt=64)
        worker.emit(request.key, ids("a"), num_generated=1, finish=LENGTH, usage=Usage(64))
        await task
        names = (*TRUTH, metrics.INDEX_ERROR)
        assert None not in [REGISTRY.get_sample_value(name, {"worker": "leaves"}) for name in names]
        on.requests.forget("leaves")
        assert [REGISTRY.get_sample_value(name, {"worker": "leaves"}) for name in names] == [None] * 3


async def test_what_decode_holds_is_offered_to_prefill_and_is_no_news_of_the_index() -> None:
    prefill = NullWorker(worker_info("p", Role.PREFILL, block_size=4))
    decode = NullWorker(worker_info("d", Role.DECODE, block_size=4))
    async with prefill, decode, stage(prefill, decode) as on:
        promise(on, prefill, ())
        promise(on, decode, range(200))
        task, request = await begin(on, decode, prompt=400)
        assert (request.prefill, request.offer_held) == (None, False), "an idle decode worker does the rest alone"
        decode.emit(request.key, ids("a"), num_generated=1, finish=LENGTH, usage=Usage(400, 1, 200))
        await task
        decode.report(Load(num_running=20, context_tokens=400))
        await on.until(lambda: on.sessions.find("d").report is not None)  # type: ignore[union-attr]
        before = [metric(name, worker="p") for name in TRUTH]
        task, request = await begin(on, decode, prompt=400)
        assert request.prefill is not None
        assert request.offer_held
        decode.emit(
            request.key,
            ids("a"),
            num_generated=1,
            finish=LENGTH,
            usage=Usage(400, 1, 200),
            timeline=Timeline(prefill_worker="p"),
        )
        await task
        assert [metric(name, worker="p") for name in TRUTH] == before


async def test_an_equal_prompt_follows_one_that_is_computed_before_its_blocks_are_known() -> None:
    one, other = NullWorker(worker_info("one", block_size=4)), NullWorker(worker_info("other", block_size=4))
    async with one, other, stage(one, other) as on:
        got = [asyncio.create_task(worker.submits.get()) for worker in (one, other)]
        first = on.requests.stream(job("first", prompt=400))
        begun = asyncio.ensure_future(anext(first))
        (done,), (waiting,) = await asyncio.wait(got, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        chosen = (one, other)[got.index(done)]
        chosen.emit(done.result().key, ids("a"), num_generated=1, usage=Usage(400))
        await begun
        second, request = await begin(on, chosen, request_id="second", prompt=400)
        chosen.emit(request.key, ids("a"), num_generated=1, finish=LENGTH, usage=Usage(400))
        await second
        await first.aclose()
