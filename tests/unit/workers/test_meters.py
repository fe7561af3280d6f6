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
