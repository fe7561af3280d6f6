"""Whole clusters on one Ray of three nodes: any layout hands over to any other, what dies is replaced, and sizes follow the
load.

`conftest` has the nodes, of 2, 1 and 1 GPUs.
"""

import asyncio
import contextlib
import itertools
import os
import pathlib
import signal
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from unittest.mock import ANY

import pytest
import ray
import torch
from ray._raylet import GcsClient
from ray.cluster_utils import Cluster
from ray.core.generated import autoscaler_pb2
from transformers import AutoModelForCausalLM

from cluster.commands.autoscale import verify
from cluster.control_actor import NAME, namespace
from cluster.launch import Running, Step, running, watch
from cluster.pools import actor_name
from cluster.scaling_state import ScalingState
from cluster.session import SessionFolder
from cluster.snapshot import Snapshot, take
from cluster.state import ControlState
from headrace.client import AsyncClient, Path
from headrace.config import (
    AutoscalingConfig,
    ClusterConfig,
    EngineConfig,
    HandoffConfig,
    PoolConfig,
    RayConfig,
    RedisConfig,
    RouterConfig,
    ServiceClassConfig,
)
from headrace.errors import Unavailable
from headrace.store import Store, connect
from headrace.values import ParallelLayout
from tests.e2e.nodes import add_node
from tests.tiny import make_checkpoint

pytestmark = [pytest.mark.ray, pytest.mark.torch, pytest.mark.timeout(600)]

ONE = ParallelLayout()
PROMPT = [5 + (7 * at) % 240 for at in range(45)]
NUM_TOKENS = 10
WAIT_SECONDS = 240.0  # on a machine that is busy with other things


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "tiny", "llama")


@pytest.fixture(scope="module")
def expected(model: pathlib.Path) -> tuple[int, ...]:
    """What transformers answers to PROMPT, greedily."""
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.inference_mode():
        ids = reference.generate(
            torch.tensor([PROMPT]), do_sample=False, min_new_tokens=NUM_TOKENS, max_new_tokens=NUM_TOKENS
        )
    return tuple(ids[0, len(PROMPT) :].tolist())


Serving = Callable[[ParallelLayout, ParallelLayout], contextlib.AbstractAsyncContextManager[Running]]


@pytest.fixture
def serving(ray_address: str, model: pathlib.Path, tmp_path: pathlib.Path) -> Serving:
    """A cluster of one prefill and one decode worker of the layouts that are asked for."""

    @contextlib.asynccontextmanager
    async def serve(prefill: ParallelLayout, decode: ParallelLayout) -> AsyncIterator[Running]:
        config = ClusterConfig(
            name="e2e",
            model=str(model),
            pools={
                "prefill": PoolConfig(role="prefill", tp=prefill.tp, pp=prefill.pp),
                "decode": PoolConfig(role="decode", tp=decode.tp, pp=decode.pp),
            },
            engine=EngineConfig(block_size=8, kv_bytes=2**21, max_num_seqs=4, max_step_tokens=32),
            handoff=HandoffConfig(local_prefill_max_tokens=0),
            router=RouterConfig(grpc_port=0, http_port=0),
            redis=RedisConfig(embedded_port=0),
            ray=RayConfig(address=ray_address, rank_resources={"GPU": 1.0}),
        )
        async with running(config, "", SessionFolder("e2e", tmp_path), lambda step: None) as cluster:
            yield cluster

    return serve


async def ask(cluster: Running, salt: str = "") -> tuple[tuple[int, ...], Path]:
    """The answer to PROMPT and its path. Another salt finds nothing in any cache."""
    ids: tuple[int, ...] = ()
    async with AsyncClient(cluster.session.grpc_address) as client:
        async for part in client.generate(
            PROMPT, max_tokens=NUM_TOKENS, min_tokens=NUM_TOKENS, temperature=0.0, cache_salt=salt
        ):
            ids += part.token_ids
            if part.path is not None:
                return ids, part.path
    raise AssertionError("the stream ended without a path")


async def until(cluster: Running, holds: Callable[[Snapshot], bool]) -> Snapshot:
    """The first look at the cluster for which `holds` is true."""
    async with asyncio.timeout(WAIT_SECONDS):
        while True:
            snapshot = await take(cluster.session)
            if holds(snapshot):
                return snapshot
            await asyncio.sleep(0.2)


def all_ready(snapshot: Snapshot) -> bool:
    """Both workers serve, by the controller's word and by their own."""
    return len(snapshot.workers) == 2 and all(
        worker.record.phase == "ready" and worker.report is not None for worker in snapshot.workers
    )


def generations(snapshot: Snapshot) -> dict[str, int]:
    return {worker.record.worker_id: worker.record.generation for worker in snapshot.workers}


def actor(name: str) -> ray.actor.ActorHandle:
    return ray.get_actor(name, namespace=namespace("e2e"))


async def test_a_killed_router_is_started_again(serving: Serving, expected: tuple[int, ...]) -> None:
    async with serving(ONE, ONE) as cluster:
        seen: asyncio.Queue[Step] = asyncio.Queue()
        watching = asyncio.create_task(watch(cluster, seen.put_nowait))
        os.kill(cluster.children["router"].pid, signal.SIGKILL)
        async with asyncio.timeout(WAIT_SECONDS):
            while not (step := await seen.get()).done:
                assert "ended with status -9" in step.detail
            while True:
                with contextlib.suppress(Unavailable):
                    assert (await ask(cluster))[0] == expected
                    break
        watching.cancel()
        await asyncio.wait({watching})


async def test_a_killed_rank_costs_its_worker_and_a_node_that_is_taken_away_no_request(
    serving: Serving, expected: tuple[int, ...], ray_nodes: Cluster
) -> None:
    """The pair of prefill ranks fills the node of two GPUs. The decode worker's node is then drained, as by a spot notice:
    another starts on the node that is left, and no client notices."""
    async with serving(ParallelLayout(tp=2), ONE) as cluster:
        ids, path = await ask(cluster)
        assert ids == expected
        assert path.prefill_worker == "prefill-0"

        ray.kill(actor(actor_name("prefill-0", 1, 1)))
        snapshot = await until(cluster, lambda seen: all_ready(seen) and generations(seen)["prefill-0"] == 2)
        assert generations(snapshot) == {"prefill-0": 2, "decode-0": 1}
        async with asyncio.timeout(WAIT_SECONDS):
            for attempt in itertools.count():
                ids, path = await ask(cluster, f"after {attempt}")
                assert ids == expected, "answered alone or handed over, it is the same"
                if path.prefill_worker == "prefill-0":
                    break

        async with under(Load(cluster), 4, 45, NUM_TOKENS):
            notice = await asyncio.to_thread(drain_node_of, "decode-0", 1, 120.0)
            after = await until(cluster, lambda seen: all_ready(seen) and "decode-1" in generations(seen))
        assert notice
        assert generations(after) == {"prefill-0": 2, "decode-1": 1}
        assert await ask(cluster, "at its new place") == (expected, ANY)
    add_node(ray_nodes)  # in the main thread, where alone Ray sets its signals


def drain_node_of(worker_id: str, generation: int, seconds: float) -> bool:
    """As whoever hears of a preemption tells Ray; whether it took that for granted."""
    name = f"{namespace('e2e')}:{actor_name(worker_id, generation, 0)}"
    (group,) = [
        one
        for one in ray.util.placement_group_table().values()
        if one["name"] == name and one["state"] == "CREATED"  # the table keeps those of earlier clusters too
    ]
    (node,) = set(group["bundles_to_node_id"].values())
    head = GcsClient(address=ray.get_runtime_context().gcs_address)
    taken, _ = head.drain_node(
        node, autoscaler_pb2.DRAIN_NODE_REASON_PREEMPTION, "a spot notice", int((time.time() + seconds) * 1000)
    )
    return bool(taken)


async def test_case_66_a_pipeline_over_two_nodes_and_a_pair_on_one_fill_exactly_four_gpus(
    serving: Serving, expected: tuple[int, ...]
) -> None:
    async with serving(ParallelLayout(pp=2), ParallelLayout(tp=2)) as cluster:
        assert not ray.available_resources().get("GPU", 0.0), "four ranks take all four GPUs, and no more are asked for"
        ids, path = await ask(cluster)
        assert ids == expected
        assert (path.prefill_worker, path.decode_worker, path.blocks_moved) == ("prefill-0", "decode-0", 6)


@dataclass
class Load:
    """Clients that ask again as soon as they are answered; each answer is checked, none may fail."""

    cluster: Running
    num_answered: int = 0

    async def run(self, num_clients: int, num_prompt_tokens: int, num_tokens: int, until: asyncio.Event) -> None:
        async with AsyncClient(self.cluster.session.grpc_address) as client, asyncio.TaskGroup() as group:
            for name in range(num_clients):
                group.create_task(self._ask(client, name, num_prompt_tokens, num_tokens, until))

    async def _ask(
        self, client: AsyncClient, name: int, num_prompt: int, num_tokens: int, until: asyncio.Event
    ) -> None:
        for attempt in itertools.count():
            if until.is_set():
                return
            prompt = [5 + (7 * at + 13 * attempt + name) % 240 for at in range(num_prompt)]
            parts = client.generate(
                prompt, max_tokens=num_tokens, min_tokens=num_tokens, temperature=0.0, cache_salt=f"{name}/{attempt}"
            )
            assert sum([len(part.token_ids) async for part in parts]) == num_tokens
            self.num_answered += 1


@contextlib.asynccontextmanager
async def under(load: Load, num_clients: int, num_prompt_tokens: int, num_tokens: int) -> AsyncIterator[None]:
    """While the block lasts; what was asked by then is still answered."""
    over = asyncio.Event()
    running_load = asyncio.create_task(load.run(num_clients, num_prompt_tokens, num_tokens, over))
    try:
        yield
    finally:
        over.set()
        await running_load


def roles(snapshot: Snapshot, role: str) -> int:
    """Workers that serve it, by the controller's word and their own."""
    return sum(
        worker.record.phase == "ready"
        and worker.record.role == role
        and worker.report is not None
        and worker.report.role == role
        for worker in snapshot.workers
    )


@pytest.mark.timeout(900)
async def test_sizes_and_roles_follow_the_load_within_the_budget(ray_address: str, tmp_path: pathlib.Path) -> None:
    """A worker comes, a role flips under load while the controller is killed and Redis is flushed, workers go, all of them
    in the end, and come again for a request that waits; no request fails."""
    model = make_checkpoint(tmp_path / "wide", "llama", hidden_size=256, intermediate_size=1024, num_hidden_layers=4)
    bounds = {"min_replicas": 0, "max_replicas": 4}
    config = ClusterConfig(
        name="e2e",
        model=str(model),
        pools={
            "prefill": PoolConfig(role="prefill", replicas=1, **bounds),
            "decode": PoolConfig(role="decode", replicas=2, **bounds),
        },
        service_classes={"chat": ServiceClassConfig(ttft_seconds=2.0, tpot_seconds=0.5)},
        autoscaling=AutoscalingConfig(
            mode="controller",
            service_class="chat",
            attainment=0.9,
            budget_gpus=4,
            interval_seconds=0.5,
            window_seconds=3.0,
            lead_seconds=1.0,
            hold_seconds=2.0,
            idle_seconds=4.0,
        ),
        engine=EngineConfig(block_size=8, kv_bytes=2**24, max_num_seqs=4, max_step_tokens=512),
        handoff=HandoffConfig(local_prefill_max_tokens=0),
        router=RouterConfig(grpc_port=0, http_port=0),
        redis=RedisConfig(embedded_port=0),
        ray=RayConfig(address=ray_address, rank_resources={"GPU": 1.0}),
    )
    async with running(config, "", SessionFolder("e2e", tmp_path), lambda step: None) as cluster:
        load, store = Load(cluster), connect(cluster.session.redis_url, 2.0)
        scaling = ScalingState(store, "e2e")
        try:
            async with under(load, 24, 8, 30):
                await until(cluster, lambda seen: roles(seen, "decode") >= 3)
            async with under(load, 96, 200, 1):  # more than two workers answer within the target: three must prefill
                await flipping(store)
                first = await asyncio.to_thread(ray.get, actor(NAME).ping.remote())
                ray.kill(actor(NAME), no_restart=False)
                await until(cluster, lambda seen: roles(seen, "prefill") >= 2)
                decisions = await scaling.decisions()
                before = generations(await take(cluster.session))
                await store.call(lambda redis: redis.flushall())
                after = await until(cluster, lambda seen: roles(seen, "prefill") >= 2 and bool(seen.desired))
                assert generations(after) == before, "nothing was taken away"
                assert await asyncio.to_thread(ray.get, actor(NAME).ping.remote()) != first
            async with under(load, 1, 8, 2):
                await until(cluster, lambda seen: len(seen.workers) <= 2)
            await until(cluster, lambda seen: not seen.workers)
            ids, _ = await ask(cluster, "from zero")
            assert len(ids) == NUM_TOKENS
            decisions += await scaling.decisions()
            verify(decisions)
            notes = {note for one in decisions for note in one.decision.notes}
            assert any("of the budget's 4 GPUs are taken" in note for note in notes), (
                "more was needed than there may be"
            )
            for one in decisions:
                held = sum(pool.staying + pool.leaving for pool in one.inputs.pools.values())
                assert held <= 4
                assert sum(size.replicas for size in one.decision.pools.values()) <= 4
        except TimeoutError as error:
            for one in (await scaling.decisions())[-5:]:
                error.add_note(f"{one.inputs.now:.1f} {one.decision.kind}: {one.decision.pools} {one.decision.reason}")
                error.add_note(f"{one.outcome} {one.decision.notes} {one.inputs.pools} {one.inputs.traffic}")
            error.add_note(f"now: {await scaling.now()}")
            error.add_note(f"{await take(cluster.session)}")
            raise
        finally:
            await store.close()


async def flipping(store: Store) -> None:
    """Until a flip is desired."""
    state = ControlState(store, "e2e")
    async with asyncio.timeout(WAIT_SECONDS):
        while True:
            desired = await state.desired()
            if desired is not None and any(pool.lent for pool in desired.pools.values()):
                return
            await asyncio.sleep(0.05)
