"""What the chart renders for StatefulSets, run: every pod's own command and environment, as processes of this machine,
until a prompt goes through both pools; then ended as Kubernetes ends pods. (The same under Ray, without a chart:
tests/e2e/test_kept_controller.)"""

import asyncio
import json
import pathlib
import sys
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace.client import AsyncClient
from tests.helm.conftest import Manifest, command_line, example, named, pod_templates, rendered
from tests.pods import HOST, Pod, answers, free_port, running_pods, until
from tests.tiny import make_checkpoint

pytestmark = [pytest.mark.torch, pytest.mark.redis, pytest.mark.timeout(300)]

PROMPT = [5 + (7 * at) % 240 for at in range(150)]
ROUTER = "Deployment/hr-headrace-router"
QUANTITIES = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30}


class Here:
    """The cluster of one example on this machine: paths, ports and addresses of a cluster, as they are here."""

    def __init__(self, name: str, folder: pathlib.Path, redis_url: str) -> None:
        self.manifests = rendered(example(name))
        self.templates = pod_templates(self.manifests)
        self.http, self.grpc = free_port(), free_port()
        model = make_checkpoint(folder / "tiny", "llama")
        config = json.loads(named(self.manifests, "ConfigMap", "hr-headrace")["data"]["headrace.yaml"])
        config["router"] |= {"http_port": self.http, "grpc_port": self.grpc}
        self.config = folder / "headrace.yaml"
        self.words = {
            "/etc/headrace/headrace.yaml": str(self.config),
            config["model"]: str(model),
            "redis://hr-headrace-redis:6379/0": redis_url,
            "10.0.0.1": HOST,
            "--port=7000": "--port=0",
        }
        config["model"] = str(model)
        self.config.write_text(json.dumps(config), encoding="utf-8")

    def container(self, pod: str) -> Manifest:
        (container,) = self.templates[pod]["spec"]["containers"]
        return container

    def command(self, pod: str) -> list[str]:
        line = command_line(self.container(pod))
        for there, here in self.words.items():
            line = [word.replace(there, here) for word in line]
        assert line[0] == "python"
        return [sys.executable, *line[1:]]

    def probe(self, kind: str) -> str:
        """Where an HTTP probe of the router goes."""
        return f"http://{HOST}:{self.http}{self.container(ROUTER)[kind]['httpGet']['path']}"

    async def path(self, salt: str) -> tuple[str, str]:
        async with AsyncClient(f"{HOST}:{self.grpc}") as client:
            async for part in client.generate(PROMPT, max_tokens=2, min_tokens=2, temperature=0.0, cache_salt=salt):
                if part.path is not None:
                    return part.path.prefill_worker, part.path.decode_worker
        raise AssertionError("the stream ended without a path")


def request(container: Manifest, side: str = "requests") -> int:
    text = container["resources"][side]["memory"]
    return int(text[:-2]) * QUANTITIES[text[-2:]]


async def healthy(address: str) -> bool:
    """What Kubernetes' gRPC probe asks."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)  # type: ignore[no-untyped-call]
        answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=5.0)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def test_case_68_stateful_sets_serve_by_what_is_rendered_and_end_in_order(
    tmp_path: pathlib.Path, redis_url: str
) -> None:
    here = Here("cpu-statefulset", tmp_path, redis_url)
    async with running_pods(tmp_path) as pods:
        workers: dict[str, tuple[Pod, str, int]] = {}
        for pool in ("prefill", "decode"):
            name, port, metrics = f"hr-headrace-{pool}-0", free_port(), free_port()
            line = here.command(f"StatefulSet/hr-headrace-{pool}")
            words = {"--port=0": f"--port={port}", "--metrics-port=7001": f"--metrics-port={metrics}"}
            line = [words.get(word, word).replace("hr-headrace-pool-0", name) for word in line]
            workers[name] = (await pods.start(name, line), f"{HOST}:{port}", metrics)
        router = await pods.start("router", here.command(ROUTER))

        await until(lambda: answers(here.probe("livenessProbe")))
        await until(lambda: answers(here.probe("readinessProbe")))

        async def handed_over() -> bool:
            return await here.path("one") == ("hr-headrace-prefill-0", "hr-headrace-decode-0")

        await until(handed_over)
        for pod, address, metrics in workers.values():
            assert await healthy(address)
            async with httpx.AsyncClient(trust_env=False) as client:
                assert "headrace_steps_total" in (await client.get(f"http://{HOST}:{metrics}/metrics")).text
            assert pod.rss_bytes() < request(here.container("StatefulSet/hr-headrace-prefill"))
        assert router.rss_bytes() < request(here.container(ROUTER)), "case 68: a router fits into what it asks for"

        ends = await asyncio.gather(*(pod.end() for pod, _, _ in workers.values()), router.end())
        assert ends == [0, 0, 0]
