import json
import uuid
from dataclasses import asdict, replace

import pytest

from cluster.lifecycle import Desired, DesiredPool, ObservedWorker, Phase
from cluster.state import (
    ControlState,
    ObservedState,
    WorkerRecord,
    configured,
    decode_desired,
    decode_observed,
    encode_desired,
    rebuilt,
)
from headrace.config import AutoscalingConfig, ClusterConfig, PoolConfig
from headrace.keys import Keys
from headrace.store import Store
from headrace.values import ParallelLayout, Role

DESIRED = Desired(
    {"prefill": DesiredPool(Role.PREFILL, 2, ParallelLayout(2, 1), lent=1), "decode": DesiredPool(Role.DECODE, 1)}
)
CONFIG = ClusterConfig(
    model="m", pools={"prefill": PoolConfig(role="prefill", tp=2), "decode": PoolConfig(role="decode", replicas=2)}
)


def test_desired_survives_its_encoding() -> None:
    assert decode_desired(encode_desired(DESIRED)) == DESIRED


@pytest.mark.parametrize(
    "raw",
    ["", "{", "[]", "3", '{"a": 1}', '{"a": {"role": "prefill"}}', '{"a": {"role": "x", "replicas": 1, "tp": 1}}'],
)
def test_unreadable_desired_counts_as_lost(raw: str) -> None:
    assert decode_desired(raw) is None


@pytest.mark.parametrize("number", ["1e400", "true", '"2"', "2.5", "1000000000000", "null", "[]"])
def test_a_number_of_workers_that_is_none_counts_as_lost(number: str) -> None:
    """An infinite one ended the controller, and one beyond all memory would have."""
    raw = '{"a": {"role": "decode", "replicas": %s, "tp": 1, "pp": 1}}'
    assert decode_desired(raw % "1") is not None
    assert decode_desired(raw % number) is None
    assert decode_desired("[" * 100_000) is None


def test_observed_of_others_counts_as_absent() -> None:
    whole = asdict(ObservedState("c", (WorkerRecord("d-0", "d", 1, "decode", "tp1·pp1", "ready", 1.5),), {"d": 1}))
    assert decode_observed(json.dumps(whole)) is not None
    (worker,) = whole["workers"]
    for change in (
        {"workers": [{**worker, "phase": 3}]},
        {"workers": [{**worker, "generation": "x"}]},
        {"workers": [{**worker, "in_phase_seconds": None}]},
        {"desired": {"d": "many"}},
        {"desired": "abc"},
        {"history": {"d-0": [1e400, 1, ""]}},
    ):
        assert decode_observed(json.dumps({**whole, **change})) is None, change
    assert decode_observed("[" * 100_000) is None


def test_negative_replicas_count_as_lost() -> None:
    raw = '{"a": {"role": "decode", "replicas": -1, "tp": 1, "pp": 1}}'
    assert decode_desired(raw) is None


def test_a_lost_desired_state_is_rebuilt_no_smaller_than_what_serves() -> None:
    serving = [
        ObservedWorker("prefill", index, 1, Role.PREFILL, ParallelLayout(2), Phase.READY, 0.0) for index in range(3)
    ]
    dead = [ObservedWorker("decode", index, 1, Role.DECODE, ParallelLayout(), Phase.DEAD, 0.0) for index in range(5)]
    desired = rebuilt(CONFIG, serving + dead)
    assert not desired.trusted
    assert {name: pool.replicas for name, pool in desired.pools.items()} == {"prefill": 3, "decode": 2}
    assert configured(CONFIG, trusted=True).pools["prefill"] == DesiredPool(Role.PREFILL, 1, ParallelLayout(2))


def test_what_is_rebuilt_keeps_roles_that_flipped_and_stays_within_the_budget() -> None:
    scaled = CONFIG.model_copy(update={"autoscaling": AutoscalingConfig(mode="controller", budget_gpus=9)})
    serving = [
        ObservedWorker("prefill", index, 1, role, ParallelLayout(2), Phase.READY, 0.0)
        for index, role in enumerate((Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE))
    ]
    pools = rebuilt(scaled, serving).pools
    assert (pools["prefill"].replicas, pools["prefill"].lent) == (4, 2)
    assert pools["decode"].replicas == 1, "one more would be the 10th GPU of 9"


@pytest.mark.redis
async def test_one_controller_leads_until_it_resigns(store: Store) -> None:
    state = ControlState(store, f"test-{uuid.uuid4().hex[:8]}")
    assert await state.lead("first")
    assert not await state.lead("second")
    assert await state.lead("first"), "the holder renews"
    await state.resign("second")
    assert not await state.lead("second"), "only the holder gives it back"
    await state.resign("first")
    assert await state.lead("second")


@pytest.mark.redis
async def test_the_leaders_lease_ends_by_itself(store: Store) -> None:
    cluster = f"test-{uuid.uuid4().hex[:8]}"
    assert await ControlState(store, cluster).lead("first")
    left = await store.call(lambda redis: redis.pttl(Keys(cluster).leader))
    assert 0 < left <= 5000


@pytest.mark.redis
async def test_a_configuration_that_did_not_change_takes_back_nothing_that_was_scaled(store: Store) -> None:
    """A controller that Kubernetes moved drained what had been added under load."""
    state = ControlState(store, f"c{uuid.uuid4().hex[:8]}")
    await state.configure(DESIRED)
    assert await state.desired() == DESIRED
    pools = {name: replace(pool, replicas=pool.replicas + 7) for name, pool in DESIRED.pools.items()}
    scaled = Desired(pools, DESIRED.trusted)
    await state.write_desired(scaled)
    await state.configure(DESIRED)
    assert await state.desired() == scaled
    other = Desired({name: replace(pool, replicas=1) for name, pool in DESIRED.pools.items()}, DESIRED.trusted)
    await state.configure(other)
    assert await state.desired() == other
    await state.forget()
    await state.configure(other)
    assert await state.desired() == other


@pytest.mark.redis
async def test_desired_and_observed_are_read_back_and_forgotten(store: Store) -> None:
    state = ControlState(store, f"test-{uuid.uuid4().hex[:8]}")
    assert await state.desired() is None
    assert await state.observed() is None
    observed = ObservedState(
        "controller-1",
        (WorkerRecord("decode-0", "decode", 3, "decode", "tp1·pp1", "ready", 1.5, "127.0.0.1:1", "127.0.0.1:2", ""),),
        {"decode": 1},
        {"decode-0": (3, 1, "rank 0: gone")},
    )
    await state.write_desired(DESIRED)
    await state.write_observed(observed)
    assert await state.desired() == DESIRED
    assert await state.observed() == observed
    assert observed.generations()["decode-0"].generation == 3
    await state.forget()
    assert await state.desired() is None
    assert await state.observed() is None


@pytest.mark.redis
async def test_a_key_of_another_type_counts_as_lost_and_is_written_anew(store: Store) -> None:
    """It ended whoever read it, the controller first."""
    state = ControlState(store, f"test-{uuid.uuid4().hex[:8]}")
    keys = Keys(state.cluster)
    await store.call(lambda redis: redis.lpush(keys.desired, "x"))
    await store.call(lambda redis: redis.lpush(keys.observed, "x"))
    assert await state.desired() is None
    assert await state.observed() is None
    await state.write_desired(DESIRED)
    assert await state.desired() == DESIRED
