"""The router's core before real workers, `python -m workers`, 1 prefill + 1 decode, that it finds through Redis."""

import asyncio
import pathlib
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio

from headrace import config_file, store
from headrace.client import AsyncClient
from headrace.clock import SystemClock
from headrace.errors import DeadlineExceeded, WorkerLost
from headrace.v1 import control_pb2
from headrace.values import SamplingParams
from router.core import Core, running_core
from router.decisions.placement import Candidate
from router.edge.common import Edge
from router.edge.grpc_api import add_services, open_server
from router.jobs import Job, Piece
from router.text.vocabulary import Text
from tests.e2e.routers import tiny_checkpoint
from tests.tiny import make_checkpoint
from tests.unit.router.scripted import make_edge
from tests.unit.router.stage import collect, open_text
from tests.worker_process import WorkerProcess, a_worker_process

pytestmark = [pytest.mark.torch, pytest.mark.redis, pytest.mark.timeout(300)]

BLOCK = 8
Fault = control_pb2.Fault
OPTIONS = ("--block-size", str(BLOCK), "--max-step-tokens", "16", "--num-blocks", "96", "--fault-hooks")
YAML = """
model: m
pools: {d: {role: decode}}
handoff: {local_prefill_max_tokens: 0}
router: {coalesce_seconds: 0.0, heartbeat_seconds: 0.2, silent_seconds: 3.0}
"""


@dataclass
class Cluster:
    core: Core
    workers: dict[str, WorkerProcess]
    changed: asyncio.Event

    async def until(self, condition: Callable[[], bool]) -> None:
        """Workers report at least every half second, so this looks again at least as often."""
        while not condition():
            self.changed.clear()
            await asyncio.wait_for(self.changed.wait(), 30)

    async def idle(self) -> None:
        """Returns when no worker has anything of any request; the answers to Describe are what is waited for."""
        assert self.core.requests.num_in_flight == 0
        async with asyncio.timeout(30):
            for worker in self.workers.values():
                async with worker.control() as control:
                    while not _has_nothing(await control.Describe(control_pb2.DescribeRequest())):
                        pass

    async def ask(self, name: str, length: int, **fields: object) -> list[Piece]:
        return await collect(self.core.requests.stream(job(name, length, **fields)))


def _has_nothing(worker: control_pb2.DescribeResponse) -> bool:
    load, blocks = worker.load, worker.blocks
    return not (load.num_running or load.num_waiting or blocks.active or blocks.pinned or blocks.stranded)


def job(
    name: str,
    length: int,
    *,
    n: int = 1,
    max_tokens: int = 6,
    prompt: str = "",
    cache_salt: str = "",
    **sampling: object,
) -> Job:
    """`prompt`: whose tokens it has, where not those of its name."""
    params = {"temperature": 0.0, "ignore_eos": True, **sampling}
    tokens = tuple((sum((prompt or name).encode()) * 13 + 7 * at) % 200 for at in range(length))
    its = SamplingParams(max_tokens=max_tokens, **params)  # type: ignore[arg-type]
    return Job(name, "m", tokens, its, n=n, cache_salt=cache_salt)


def tokens_of(pieces: list[Piece], index: int = 0) -> list[int]:
    return [token for piece in pieces if piece.index == index for token in piece.token_ids]


@asynccontextmanager
async def running_cluster(
    folder: pathlib.Path, redis_url: str, name: str, num_decode: int = 1
) -> AsyncIterator[Cluster]:
    checkpoint = make_checkpoint(folder / "model")
    async with AsyncExitStack() as stack:
        options = (*OPTIONS, "--redis-url", redis_url, "--cluster", name)
        roles = {"p0": "prefill", **{f"d{number}": "decode" for number in range(num_decode)}}
        starting = [
            a_worker_process(checkpoint, folder, worker, "--role", role, *options, forked=True)
            for worker, role in roles.items()
        ]
        started = await asyncio.gather(*map(stack.enter_async_context, starting))
        workers = dict(zip(roles, started, strict=True))
        following = store.connect(redis_url, budget_seconds=1.0)
        stack.push_async_callback(following.close)
        core = await stack.enter_async_context(
            running_core(config_file.parse(f"name: {name}{YAML}"), router_id="t", open_text=open_text, store=following)
        )
        changed = asyncio.Event()
        core.sessions.listen(lambda worker_id: changed.set())
        on = Cluster(core, workers, changed)
        await on.until(lambda: all(core.sessions.find(worker) is not None for worker in workers))
        yield on


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> AsyncIterator[Cluster]:
    """For tests that leave both workers as they found them."""
    async with running_cluster(tmp_path_factory.mktemp("cluster"), redis_url, "seam") as on:
        yield on


@pytest.mark.asyncio(loop_scope="module")
async def test_a_prompt_is_prefilled_on_the_one_and_decoded_on_the_other_and_its_prefix_is_known_then(
    cluster: Cluster,
) -> None:
    first = await cluster.ask("same", 5 * BLOCK + 3)
    timeline = first[-1].timeline
    assert timeline is not None
    assert (timeline.worker.prefill_worker, timeline.decode_worker) == ("p0", "d0")
    assert timeline.worker.blocks_moved == 6
    assert first[-1].usage is not None
    assert (first[-1].usage.prompt_tokens, first[-1].usage.completion_tokens) == (43, 6)

    index = cluster.core.index
    await cluster.until(lambda: index.num_blocks("p0") >= 5 and index.num_blocks("d0") >= 5)
    again = await cluster.ask("same", 5 * BLOCK + 3)
    assert tokens_of(again) == tokens_of(first)
    assert again[-1].usage is not None
    assert again[-1].usage.cached_tokens == 5 * BLOCK
    assert candidate(cluster, "same", "p0").cached_tokens == 5 * BLOCK

    async with cluster.workers["p0"].control() as control:
        await control.CacheReset(control_pb2.CacheResetRequest())
    await cluster.until(lambda: index.num_blocks("p0") == 0)  # case 30


def candidate(cluster: Cluster, request_id: str, worker: str) -> Candidate:
    explanation = cluster.core.requests.why(request_id)
    assert explanation is not None
    return next(c for c in explanation.whys[-1].candidates if c.worker_id == worker)


@pytest.mark.asyncio(loop_scope="module")
async def test_samples_and_cancels_leave_nothing_behind(cluster: Cluster) -> None:
    pieces = await cluster.ask("many", 20, n=3, temperature=0.9, seed=5)
    assert [len(tokens_of(pieces, index)) for index in range(3)] == [6, 6, 6]
    assert [piece.usage.completion_tokens for piece in pieces if piece.usage] == [18]
    for number in range(5):
        stream = cluster.core.requests.stream(job(f"gone{number}", 30, max_tokens=90))
        await anext(stream)
        await stream.aclose()
    await cluster.idle()


@pytest.mark.parametrize("slow", ["p0", "d0"])
@pytest.mark.asyncio(loop_scope="module")
async def test_a_deadline_of_a_grpc_call_ends_the_request_on_the_router_and_on_both_workers(
    cluster: Cluster, tmp_path: pathlib.Path, slow: str
) -> None:
    """While its prompt is computed on the one, and while the other decodes."""
    edge = make_edge(Text.load(tiny_checkpoint(tmp_path)), cluster.core.requests, clock=SystemClock())
    async with (
        serving_grpc(edge) as address,
        AsyncClient(address) as client,
        cluster.workers[slow].control() as control,
    ):
        delay = control_pb2.Fault(point="step", action="delay", seconds=1.0)
        await control.Faults(control_pb2.FaultsRequest(faults=[delay]))
        parts = client.generate(list(range(40)), max_tokens=20, temperature=0.0, timeout=1.5)
        if slow == "d0":
            assert (await anext(parts)).token_ids
        with pytest.raises(DeadlineExceeded):
            assert [part async for part in parts]
        await control.Faults(control_pb2.FaultsRequest())
        await cluster.idle()


@asynccontextmanager
async def serving_grpc(edge: Edge) -> AsyncIterator[str]:
    server, port = open_server("127.0.0.1", 0, 2**20)
    add_services(server, edge)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@pytest.mark.asyncio(loop_scope="module")
async def test_case_59_a_stopped_worker_is_out_within_the_bound_and_back_when_it_goes_on(cluster: Cluster) -> None:
    process = cluster.workers["d0"].process
    process.send_signal(signal.SIGSTOP)
    try:
        await cluster.until(lambda: cluster.core.sessions.find("d0") is None)
    finally:
        process.send_signal(signal.SIGCONT)
    await cluster.until(lambda: cluster.core.sessions.find("d0") is not None)
    assert (await cluster.ask("awake", 20))[-1].finish == "length"


async def test_cases_12_and_45_killed_workers_are_a_detour_or_an_error_and_never_a_finish(
    tmp_path: pathlib.Path, redis_url: str
) -> None:
    async with running_cluster(tmp_path, redis_url, "doomed") as on:
        before = await on.ask("steady", 30)
        on.workers["p0"].process.send_signal(signal.SIGKILL)
        during = await on.ask("steady", 30)
        assert tokens_of(during) == tokens_of(before)
        await on.until(lambda: on.core.sessions.find("p0") is None)
        after = await on.ask("other", 30)
        assert after[-1].timeline is not None
        assert after[-1].timeline.worker.prefill_worker == ""

        pieces: list[Piece] = []

        async def read() -> None:
            async for piece in on.core.requests.stream(job("killed", 20, max_tokens=100)):
                pieces.append(piece)
                if len(pieces) == 3:
                    on.workers["d0"].process.send_signal(signal.SIGKILL)

        with pytest.raises(WorkerLost, match="d0"):
            await read()
        assert all(piece.finish is None for piece in pieces)


# Where a hand-off stands when its decode worker dies, held there by a fault in it: (Describe of it, of the prefill worker).
# Blocks of 8, chunks of 16 tokens, a prompt of 60.
MOMENTS: dict[str, tuple[Any, Callable[[Any, Any], bool]]] = {
    "before its ticket": (Fault(point="ticket", action="pause"), lambda decode, prefill: bool(decode.requests)),
    "in mid-chunk": (
        Fault(point="transfer.block", action="pause", at=3),
        lambda decode, prefill: bool(prefill.tickets) and decode.blocks.active >= 4,
    ),
    "after the last chunk": (
        Fault(point="transfer.block", action="pause", at=7),
        lambda decode, prefill: prefill.blocks.pinned > 0 and decode.blocks.active == 8,
    ),
}


async def test_a_request_whose_decode_worker_dies_during_its_hand_off_is_answered_by_another_one(
    tmp_path: pathlib.Path, redis_url: str
) -> None:
    """Its client sees nothing of it, and nobody keeps anything of what was begun."""
    async with running_cluster(tmp_path, redis_url, "again", num_decode=1 + len(MOMENTS)) as on:
        prefill = on.workers["p0"]
        expected = tokens_of(await on.ask("alone", 60, cache_salt="alone", prompt="same"))
        for moment, (fault, there) in MOMENTS.items():
            decoding = [name for name in on.workers if name != "p0"]
            await held(on, decoding, fault)
            asked = asyncio.create_task(on.ask(moment, 60, cache_salt=moment, prompt="same"))
            dies = await where(on, decoding, prefill, there)
            await held(on, [name for name in decoding if name != dies])
            on.workers.pop(dies).process.send_signal(signal.SIGKILL)
            pieces = await asyncio.wait_for(asked, 30)
            assert tokens_of(pieces) == expected, moment
            timeline = pieces[-1].timeline
            assert timeline is not None
            assert timeline.attempts == 2, moment
            assert timeline.decode_worker != dies
            await on.idle()


async def held(on: Cluster, workers: list[str], *faults: Any) -> None:
    for name in workers:
        async with on.workers[name].control() as control:
            await control.Faults(control_pb2.FaultsRequest(faults=faults))


async def where(on: Cluster, workers: list[str], prefill: WorkerProcess, there: Callable[[Any, Any], bool]) -> str:
    """Which of them holds a hand-off there, once one does; the answers to Describe are what is waited for."""
    async with AsyncExitStack() as stack:
        of_prefill = await stack.enter_async_context(prefill.control())
        controls = {name: await stack.enter_async_context(on.workers[name].control()) for name in workers}
        async with asyncio.timeout(20):
            while True:
                for name, control in controls.items():
                    described = [await each.Describe(control_pb2.DescribeRequest()) for each in (control, of_prefill)]
                    if there(*described):
                        return name
