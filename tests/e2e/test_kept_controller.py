"""`headrace controller` and `headrace drain`, as Kubernetes runs them: on a Ray cluster of others, with its token."""

import contextlib
import json
import pathlib
import secrets
import signal
import sys
from dataclasses import dataclass, replace
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from headrace.client import AsyncClient
from headrace.keys import Keys
from headrace.ports import free_port
from tests.pods import HOST, Pod, Pods, answers, ray_head, running_pods, until
from tests.tiny import make_checkpoint

pytestmark = [pytest.mark.ray, pytest.mark.torch, pytest.mark.redis, pytest.mark.timeout(300)]

HEADRACE = (sys.executable, "-m", "cluster.cli")
PROMPT = [5 + (7 * at) % 240 for at in range(45)]
POOLS = {
    "prefill": {"role": "prefill", "rank_resources": {"CPU": 1, "pool-prefill": 1}},
    "decode": {"role": "decode", "rank_resources": {"CPU": 1, "pool-decode": 1}},
}
# One node that has what the groups of both pools would have; its resources are quoted as KubeRay wants them.
HEAD = {
    "num-cpus": "2",
    "num-gpus": "0",
    "object-store-memory": "83886080",
    "resources": json.dumps(json.dumps({"pool-prefill": 1, "pool-decode": 1})),
}


def cluster_file(folder: pathlib.Path, name: str, http: int, grpc: int) -> pathlib.Path:
    """Of a tiny model in both pools, whose prompts are all handed over."""
    config = {
        "name": name,
        "model": str(make_checkpoint(folder / "tiny", "llama")),
        "pools": POOLS,
        "engine": {"block_size": 8, "kv_bytes": 2**21, "max_num_seqs": 4, "max_step_tokens": 32},
        "handoff": {"local_prefill_max_tokens": 0},
        "redis": {"budget_seconds": 2.0},
        "router": {"http_port": http, "grpc_port": grpc},
    }
    file = folder / "headrace.yaml"
    file.write_text(json.dumps(config), encoding="utf-8")
    return file


@dataclass(frozen=True, slots=True)
class Kept:
    """Everything but the controller runs."""

    pods: Pods
    config: pathlib.Path
    ray: str
    head: Pod
    redis_url: str
    grpc: str
    router: str
    http: str = ""

    async def keeper(self, name: str) -> tuple[Pod, "Kept"]:
        port = free_port()
        options = (f"--redis-url={self.redis_url}", f"--ray-address={self.ray}", f"--http-port={port}")
        where = (f"--router-http-url={self.router}", f"--router-grpc-address={self.grpc}")
        pod = await self.pods.start(name, [*HEADRACE, "controller", str(self.config), *options, *where])
        return pod, replace(self, http=f"http://{HOST}:{port}")

    async def leader(self) -> bytes | str | None:
        """Which controller holds the lease."""
        name = json.loads(self.config.read_text(encoding="utf-8"))["name"]
        async with Redis.from_url(self.redis_url) as redis:
            held: bytes | str | None = await redis.get(Keys(name).leader)
            return held

    async def targets(self) -> list[dict[str, Any]]:
        """Empty while it does not answer."""
        found: list[dict[str, Any]] = []
        async with httpx.AsyncClient(trust_env=False) as client:
            with contextlib.suppress(httpx.TransportError):
                response = await client.get(f"{self.http}/targets")
                found = response.json() if response.status_code == 200 else []
        return found

    async def path(self, salt: str) -> tuple[str, str]:
        """Which workers answer a prompt that no cache knows."""
        async with AsyncClient(self.grpc) as client:
            async for part in client.generate(PROMPT, max_tokens=3, min_tokens=3, temperature=0.0, cache_salt=salt):
                if part.path is not None:
                    return part.path.prefill_worker, part.path.decode_worker
        raise AssertionError("the stream ended without a path")


async def said(pod: Pod, what: str, times: int = 1) -> bool:
    return pod.log.read_text(encoding="utf-8").count(what) >= times


async def test_a_keeper_comes_and_goes_and_what_serves_goes_on(tmp_path: pathlib.Path, redis_url: str) -> None:
    """case 65: with the token of the Ray cluster; another keeper takes over; a host is drained; the head dies."""
    http, grpc = free_port(), free_port()
    file = cluster_file(tmp_path, f"kept-{secrets.token_hex(4)}", http, grpc)
    environment = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_CLIENT_SERVER_CHECK_CHANNEL_TIMEOUT_S": "120",
        "RAY_CLIENT_RECONNECT_GRACE_PERIOD": "5",
        # A server that Ray's proxy forks for a client may end before it begins, over descriptors of gRPC's fork handlers.
        "GRPC_ENABLE_FORK_SUPPORT": "0",
    }
    async with running_pods(tmp_path, **environment) as pods:
        ray, head = await ray_head(pods, HEAD)
        router = f"http://{HOST}:{http}"
        await pods.start("router", [sys.executable, "-m", "router", str(file), f"--redis-url={redis_url}"])
        keeper, kept = await Kept(pods, file, ray, head, redis_url, f"{HOST}:{grpc}", router).keeper("keeper-1")

        async def both_serve() -> bool:
            return await answers(f"{kept.http}/ready") and len(await kept.targets()) == 2

        await until(both_serve)
        await until(lambda: answers(f"{router}/ready"))
        assert await answers(f"{kept.http}/console/")

        async def handed_over() -> bool:
            return await kept.path(secrets.token_hex(4)) == ("prefill-0", "decode-0")

        await until(handed_over)
        seen = json.loads(await pods.run(*HEADRACE, "status", "--json"))
        assert {worker["record"]["phase"] for worker in seen["workers"]} == {"ready"}

        assert await keeper.end() == 0
        await until(handed_over)
        before = {
            (w["record"]["worker_id"], w["record"]["generation"], w["record"]["address"]) for w in seen["workers"]
        }

        config = json.loads(file.read_text(encoding="utf-8"))
        file.write_text(json.dumps({**config, "pools": {"decode": POOLS["decode"]}}), encoding="utf-8")
        led = await kept.leader()
        keeper, kept = await kept.keeper("keeper-2")

        async def one_serves() -> bool:
            """By the controller of the keeper that came: the one before it would end the other worker as well."""
            served = [target["labels"]["worker"] for target in await kept.targets()]
            return served == ["decode-0"] and await kept.leader() not in (None, led)

        await until(one_serves)
        seen = json.loads(await pods.run(*HEADRACE, "status", "--json"))
        after = {(w["record"]["worker_id"], w["record"]["generation"], w["record"]["address"]) for w in seen["workers"]}
        assert after == {worker for worker in before if worker[0] == "decode-0"}, "what serves was taken over as it was"

        ((_, _, address),) = after
        host = address.rpartition(":")[0]
        drain = ("drain", str(file), f"--host={host}", f"--redis-url={redis_url}", "--json")
        assert json.loads(await pods.run(*HEADRACE, *drain)) == {"decode-0": 0}
        await until(lambda: answers(f"{router}/ready", 503))

        await head.end(signal.SIGKILL)
        waits = "headrace: waits: the Ray cluster does not answer"
        await until(lambda: said(keeper, waits))
        assert await answers(f"{kept.http}/health"), "no probe ends it"
        assert await keeper.end() == 0
