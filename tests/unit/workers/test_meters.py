from prometheus_client import CollectorRegistry

from headrace import metrics
from tests.unit.workers.rig import a_pair, a_request


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
