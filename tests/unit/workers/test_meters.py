import asyncio
import sys
import threading
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from headrace import metrics
from headrace.errors import LinkClosed, TransferFailed, WorkerLost
from headrace.values import BlockCounts, Role
from tests.unit.workers.rig import a_pair, a_request
from workers.gpu_figures import watch_gpus
from workers.meters import Meters
from workers.watched import Now


async def test_a_pair_counts_its_steps_tokens_and_bytes() -> None:
    registries = CollectorRegistry(), CollectorRegistry()
    async with (
        a_pair(prefill_registry=registries[0], decode_registry=registries[1]) as (prefill, decode),
        decode.router() as router,
    ):
        await router.submit(a_request(length=20, max_tokens=5, prefill=prefill.target)).end()
        await prefill.idle()
        await decode.idle()
        prefilled, decoded = registries
        assert prefilled.get_sample_value(metrics.SCHEDULED_TOKENS, {"kind": "prefill"}) == 20
        assert decoded.get_sample_value(metrics.SCHEDULED_TOKENS, {"kind": "prefill"}) is None
        assert decoded.get_sample_value(metrics.HANDOFF_BYTES, {"side": "in"}) == 5 * 64
        assert decoded.get_sample_value(metrics.STEPS) == decode.worker.num_steps
        assert decoded.get_sample_value(metrics.KV_BLOCKS, {"state": "active"}) == 0
        assert decoded.get_sample_value(metrics.KV_BLOCKS, {"state": "stranded"}) == 0
        states = ("free", "cached", "active", "pinned", "quarantined", "stranded")
        assert sum(decoded.get_sample_value(metrics.KV_BLOCKS, {"state": state}) or 0 for state in states) == 64
        assert decoded.get_sample_value(metrics.REDIS_BREAKER) == 0
        assert prefilled.get_sample_value(metrics.HANDOFF_BYTES, {"side": "out"}) == 5 * 64
        assert decoded.get_sample_value(metrics.PREEMPTIONS) == 0
        assert decoded.get_sample_value(metrics.PREFILL_BACKLOG) == 0
        assert [s.value for f in decoded.collect() for s in f.samples if s.name == metrics.LINKS] == [1]
        (info,) = [s for f in decoded.collect() for s in f.samples if s.name == metrics.WORKER_INFO]
        assert (info.labels["worker"], info.labels["role"], info.value) == (decode.target.worker_id, "decode", 1)


async def test_case_56_a_prompt_counts_once_on_the_worker_that_computed_it() -> None:
    """So that sums over roles are of requests, and what a panel of decode workers shows is theirs."""
    registries = CollectorRegistry(), CollectorRegistry()
    async with (
        a_pair(prefill_registry=registries[0], decode_registry=registries[1]) as (prefill, decode),
        decode.router() as router,
    ):
        for name in ("a", "b"):
            await router.submit(a_request(name, length=20, max_tokens=2, prefill=prefill.target)).end()
            await prefill.idle()
        prefilled, decoded = registries
        assert prefilled.get_sample_value(metrics.PREFIX_QUERY_TOKENS) == 40
        hit = prefilled.get_sample_value(metrics.PREFIX_HIT_TOKENS, {"tier": "device"})
        assert hit == 16
        assert prefilled.get_sample_value(f"{metrics.WORKER_QUEUE}_count", {"kind": "ticket"}) == 2
        assert decoded.get_sample_value(metrics.PREFIX_QUERY_TOKENS) == 0
        assert decoded.get_sample_value(f"{metrics.WORKER_QUEUE}_count", {"kind": "claim"}) == 2
        await router.submit(a_request("c", length=8, max_tokens=2)).end()
        assert decoded.get_sample_value(metrics.PREFIX_QUERY_TOKENS) == 8
        assert decoded.get_sample_value(f"{metrics.WORKER_QUEUE}_count", {"kind": "local"}) == 1
        for registry, role in ((prefilled, "prefill"), (decoded, "decode")):
            # As a scraper that asks for OpenMetrics reads it, which is stricter.
            families = {
                family.name: family for family in text_string_to_metric_families(openmetrics(registry).decode())
            }
            assert [sample.labels["role"] for sample in families[metrics.WORKER_INFO].samples] == [role]
            assert families[metrics.PREEMPTIONS.removesuffix("_total")].type == "counter"


async def test_case_56_a_worker_whose_role_changes_is_measured_in_the_new_one() -> None:
    async with a_pair(decode_registry=(registry := CollectorRegistry())) as (_, decode):
        for role in (Role.DECODE, Role.PREFILL):
            decode.worker.set_role(role)
            (info,) = [s for f in registry.collect() for s in f.samples if s.name == metrics.WORKER_INFO]
            assert info.labels["role"] == role


def now(**changed: object) -> Now:
    as_it_is = Now("d0", Role.DECODE, "m", BlockCounts(), {"request": 3}, {}, 0, 0, breaker_open=False, tasks=1)
    return replace(as_it_is, **changed)  # type: ignore[arg-type]


async def test_what_a_scrape_shows_is_looked_up_by_the_loop_that_changes_it() -> None:
    """A scrape's own thread met a set while the loop added to it, and the scraper got a server error."""
    looked_in = []

    def look() -> Now:
        looked_in.append(threading.get_ident())
        return now()

    Meters(registry := CollectorRegistry()).watch(look)
    shown = await asyncio.to_thread(generate_latest, registry)
    assert f'{metrics.IN_FLIGHT}{{state="request"}} 3.0' in shown.decode()
    assert looked_in == [threading.get_ident()]


def test_a_scrape_of_a_loop_that_has_ended_shows_what_was_counted(caplog: pytest.LogCaptureFixture) -> None:
    meters = Meters(registry := CollectorRegistry())

    async def serve() -> None:
        meters.watch(now)

    asyncio.run(serve())
    meters.link_ended("gloo")
    assert registry.get_sample_value(metrics.LINK_ENDS, {"kind": "gloo"}) == 1
    assert registry.get_sample_value(metrics.IN_FLIGHT, {"state": "request"}) is None
    assert "no answer from the event loop" in caplog.text


def test_an_error_of_cuda_or_nccl_counts_wherever_it_stands_in_the_chain() -> None:
    meters = Meters(registry := CollectorRegistry())
    for kind in ("cuda", "nccl"):
        assert registry.get_sample_value(metrics.DEVICE_ERRORS, {"kind": kind}) == 0, "the alert looks for growth"
    lost = WorkerLost("step 7 failed")
    lost.__cause__ = RuntimeError("CUDA error: an illegal memory access was encountered")
    meters.failed(lost)
    meters.handoff_failed(LinkClosed("NCCL error: unhandled system error"))
    meters.handoff_failed(TransferFailed("the peer is gone"))
    assert registry.get_sample_value(metrics.DEVICE_ERRORS, {"kind": "cuda"}) == 1
    assert registry.get_sample_value(metrics.DEVICE_ERRORS, {"kind": "nccl"}) == 1
    assert registry.get_sample_value(metrics.HANDOFF_FAILURES, {"reason": "TransferFailed"}) == 1


def test_without_a_gpu_or_its_library_nothing_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = CollectorRegistry()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert not watch_gpus(registry)
    assert not list(registry.collect())


def in_flight(registry: CollectorRegistry) -> dict[str, float | None]:
    states = ("request", "ticket", "waiting", "running", "handoff")
    return {state: n for state in states if (n := registry.get_sample_value(metrics.IN_FLIGHT, {"state": state}))}


async def test_what_is_in_flight_is_seen_on_both_sides_and_gone_afterwards() -> None:
    prefilled, decoded = CollectorRegistry(), CollectorRegistry()
    async with a_pair(prefill_registry=prefilled, decode_registry=decoded) as (prefill, decode), decode.router() as r:
        decode.executor.go_pulls.clear()
        answer = r.submit(a_request(length=20, prefill=prefill.target))
        while not prefill.counts.pinned:
            await prefill.worker.changed()
        assert in_flight(decoded) == {"request": 1, "waiting": 1, "handoff": 1}
        assert in_flight(prefilled) == {"ticket": 1}
        decode.executor.go_pulls.set()
        await answer.end()
        await prefill.idle()
        await decode.idle()
        assert (in_flight(prefilled), in_flight(decoded)) == ({}, {})
