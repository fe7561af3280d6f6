"""A thousand streams at once through one router, before a null worker: all end, and nothing of them is left."""

import asyncio
import json
import os
import pathlib
import resource
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from headrace import metrics
from headrace.client import AsyncClient
from headrace.errors import Unavailable
from tests.e2e.routers import RunningRouter, running_router, tiny_checkpoint, tokenizer_digest

pytestmark = pytest.mark.timeout(300)

NUM_STREAMS = 1000
NUM_TOKENS = 24
# Twice what was measured (39 KiB over SSE, 33 over gRPC): a stream's own objects, its connection's, and what the allocator
# keeps of both.
MAX_BYTES_PER_STREAM = 80 * 2**10


@pytest.fixture(autouse=True)
def enough_files() -> Iterator[None]:
    """A connection is a file, here and in the router."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, 8192), hard), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@dataclass(frozen=True)
class GatedWorker:
    """Gives the first token at once, and the others when it is told to: all are open at once however long that takes."""

    process: asyncio.subprocess.Process
    address: str

    def go_on(self) -> None:
        """To the end of all that it has."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{NUM_TOKENS - 1}\n".encode())


@asynccontextmanager
async def a_gated_worker(tokenizer: str) -> AsyncIterator[GatedWorker]:
    command = (sys.executable, "-m", "tests.null_worker", "--first-at-once", "--gated")
    options = ("--max-num-seqs", str(2 * NUM_STREAMS), "--tokenizer", tokenizer)
    process = await asyncio.create_subprocess_exec(
        *command, *options, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        yield GatedWorker(process, (await process.stdout.readline()).decode().strip())
    finally:
        process.kill()
        await process.wait()


def resident_bytes(pid: int) -> int:
    return int(pathlib.Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


async def samples(http: httpx.AsyncClient, router: RunningRouter) -> dict[str, float]:
    families = text_string_to_metric_families((await http.get(f"{router.http}/metrics")).text)
    found: dict[str, float] = {}
    for sample in (sample for family in families for sample in family.samples):
        found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


async def over_sse(router: RunningRouter, opened: "asyncio.Semaphore") -> None:
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True}

    async def one(http: httpx.AsyncClient) -> None:
        async with http.stream("POST", f"{router.http}/v1/completions", json=body) as response:
            assert response.status_code == 200
            opened.release()
            lines = [line async for line in response.aiter_lines() if line]
        assert lines.pop() == "data: [DONE]"
        assert json.loads(lines[-1][6:])["choices"][0]["finish_reason"] == "length"

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with AsyncExitStack() as ends:
        # a client looks through all its connections for each request
        clients = [httpx.AsyncClient(trust_env=False, timeout=120, limits=limits) for _ in range(20)]
        for client in clients:
            await ends.enter_async_context(client)
        await asyncio.gather(*(one(clients[number % len(clients)]) for number in range(NUM_STREAMS)))


async def over_grpc(router: RunningRouter, opened: "asyncio.Semaphore") -> None:
    async def one(client: AsyncClient) -> None:
        parts = []
        async for part in client.generate([5, 6, 7], max_tokens=NUM_TOKENS, ignore_eos=True):
            if not parts:
                opened.release()
            parts.append(part)
        assert parts[-1].finish_reason == "length"
        assert sum(len(part.token_ids) for part in parts) == NUM_TOKENS

    async with AsyncClient(router.grpc) as client:
        await asyncio.gather(*(one(client) for _ in range(NUM_STREAMS)))


@pytest.mark.parametrize("edge", ["sse", "grpc"])
async def test_a_thousand_streams_end_and_leave_nothing(
    edge: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three rounds: the first warms, the second is measured, and after the third nothing has grown since the second."""
    checkpoint = tiny_checkpoint(tmp_path / "model")
    streams = {"sse": over_sse, "grpc": over_grpc}[edge]
    async with (
        a_gated_worker(tokenizer_digest(checkpoint)) as worker,
        running_router(checkpoint, tmp_path / "headrace.yaml", [worker.address]) as router,
        httpx.AsyncClient(trust_env=False, timeout=60) as http,
    ):
        pid = router.process.pid
        await ready(router)

        async def all_open() -> int:
            """What the router takes while all are under way."""
            opened = asyncio.Semaphore(0)
            running = asyncio.ensure_future(streams(router, opened))
            for _ in range(NUM_STREAMS):
                await opened.acquire()
            in_flight = (await samples(http, router))[metrics.IN_FLIGHT]
            assert in_flight == NUM_STREAMS, "all were open at once"
            taken = resident_bytes(pid)
            worker.go_on()
            await running
            return taken

        async def tasks_and_files() -> tuple[float, int]:
            return (await samples(http, router))[metrics.TASKS], len(os.listdir(f"/proc/{pid}/fd"))

        async def at_rest() -> int:
            """What the router takes once nothing is under way, and it has as many tasks and files as before."""
            async with asyncio.timeout(60):
                while True:
                    tasks, files = await tasks_and_files()
                    if tasks <= num_tasks + 2 and files <= num_files + 8:
                        return resident_bytes(pid)

        num_tasks, num_files = await tasks_and_files()
        before = resident_bytes(pid)
        taken = [await all_open(), await at_rest(), await all_open()]
        second = await at_rest()
        await all_open()
        grown = await at_rest() - second
        per_stream = (max(taken) - before) / NUM_STREAMS
        with capsys.disabled():
            print(
                f" {per_stream / 2**10:.0f} KiB a stream over {edge}, {grown / 2**10:.0f} KiB more after a third round "
            )
        assert per_stream < MAX_BYTES_PER_STREAM
        assert grown < 4 * 2**20


async def ready(router: RunningRouter) -> None:
    async with asyncio.timeout(30), AsyncClient(router.grpc) as client:
        while True:
            try:
                async for _ in client.generate([5], max_tokens=1):
                    pass
                return
            except Unavailable:
                await asyncio.sleep(0.05)
