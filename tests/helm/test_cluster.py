"""What the chart renders for StatefulSets, run: every pod's own command and environment, as processes of this machine,
until a prompt goes through both pools, and a role was flipped for a load that shifts; then ended as Kubernetes ends pods.
(The same under Ray, without a chart: tests/e2e/test_kept_controller.)"""

import asyncio
import contextlib
import functools
import json
import pathlib
import sys
import time
import uuid
from collections.abc import Sequence
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.worker_client import WorkerClient
from headrace.client import AsyncClient
from headrace.keys import Keys
from headrace.ports import free_port
from headrace.reports import RouterReport, encode_report
from headrace.store import connect
from tests.helm.conftest import Manifest, command_line, example, named, pod_templates, rendered
from tests.pods import HOST, Pod, Pods, answers, running_pods, until
from tests.tiny import make_checkpoint

pytestmark = [pytest.mark.torch, pytest.mark.redis, pytest.mark.timeout(300)]

PROMPT = [5 + (7 * at) % 240 for at in range(150)]
ROUTER = "Deployment/hr-headrace-router"
HEADRACE = str(pathlib.Path(sys.executable).with_name("headrace"))
# Sized by others, and flipped by the controller; in seconds what are minutes elsewhere.
EXTERNAL = (
    "pools.prefill.replicas=2",
    "pools.prefill.autoscaling.min=1",
    "pools.prefill.autoscaling.max=4",
    "pools.decode.autoscaling.min=1",
    "pools.decode.autoscaling.max=4",
    "autoscaling.mode=external",
    "config.service_classes.chat.ttft_seconds=2",
    "config.service_classes.chat.tpot_seconds=1",
    "config.autoscaling.service_class=chat",
    "config.autoscaling.interval_seconds=1",
    "config.autoscaling.window_seconds=2",
    "config.autoscaling.hold_seconds=3",
)
QUANTITIES = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30}


class Here:
    """The cluster of one example on this machine: paths, ports and addresses of a cluster, as they are here."""

    def __init__(self, name: str, settings: Sequence[str], folder: pathlib.Path, redis_url: str) -> None:
        self.manifests = rendered(example(name), *settings)
        self.templates = pod_templates(self.manifests)
        self.http, self.grpc = free_port(), free_port()
        model = make_checkpoint(folder / "tiny", "llama")
        config = json.loads(named(self.manifests, "ConfigMap", "hr-headrace")["data"]["headrace.yaml"])
        config["router"] |= {"http_port": self.http, "grpc_port": self.grpc}
        self.config = folder / "headrace.yaml"
        self.cluster = str(config["name"])
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
        python = pathlib.Path(sys.executable)
        return [{"python": str(python), "headrace": str(python.with_name("headrace"))}[line[0]], *line[1:]]

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
    """What Kubernetes' gRPC probe asks; no while nothing listens there, as a pod that still loads."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)  # type: ignore[no-untyped-call]
        with contextlib.suppress(grpc.aio.AioRpcError):
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=5.0)
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
    return False


class Elsewhere:
    """A router of elsewhere: what it says of its traffic, once a look of the controller. It sends none of it."""

    def __init__(self, cluster: str, redis_url: str) -> None:
        self._store, self._key = connect(redis_url, 2.0), Keys(cluster).router("elsewhere")
        self._requests, self._began = 0, time.monotonic()

    async def says(self, requests: int, input_tokens: int, output_tokens: int) -> None:
        """That so many more came, and ended."""
        self._requests += requests
        number, seconds = self._requests, time.monotonic() - self._began
        prompts, outputs = number * input_tokens, number * output_tokens
        report = RouterReport("elsewhere", "", seconds, number, prompts, outputs, prompts, 0, outputs, number)
        await self._store.call(lambda redis: redis.set(self._key, encode_report(report)))

    async def aclose(self) -> None:
        await self._store.close()


async def role(address: str) -> str:
    async with WorkerClient(address) as client:
        return (await client.describe()).role


async def test_case_68_stateful_sets_serve_by_what_is_rendered_and_end_in_order(
    tmp_path: pathlib.Path, redis_url: str
) -> None:
    name = f"pods-{uuid.uuid4().hex[:8]}"
    here = Here("cpu-statefulset", (*EXTERNAL, f"config.name={name}"), tmp_path, redis_url)
    async with running_pods(tmp_path, HEADRACE_REDIS_URL=redis_url) as pods:
        workers: dict[str, tuple[Pod, str, int]] = {}
        for name in ("hr-headrace-prefill-0", "hr-headrace-prefill-1", "hr-headrace-decode-0"):
            port, metrics = free_port(), free_port()
            line = here.command(f"StatefulSet/{name[:-2]}")
            words = {"--port=0": f"--port={port}", "--metrics-port=7001": f"--metrics-port={metrics}"}
            line = [words.get(word, word).replace("hr-headrace-pool-0", name) for word in line]
            workers[name] = (await pods.start(name, line), f"{HOST}:{port}", metrics)
        router = await pods.start("router", here.command(ROUTER))
        controls = free_port()
        line = [word.replace("=8001", f"={controls}") for word in here.command("Deployment/hr-headrace-controller")]
        controller = await pods.start("controller", line)

        await until(lambda: answers(here.probe("livenessProbe")))
        await until(lambda: answers(here.probe("readinessProbe")))
        await until(lambda: answers(f"http://{HOST}:{controls}/ready"))

        async def handed_over() -> bool:
            prefill, decode = await here.path("one")
            return prefill.startswith("hr-headrace-prefill-") and decode == "hr-headrace-decode-0"

        await until(handed_over)
        for pod, address, metrics in workers.values():
            await until(functools.partial(healthy, address))  # one prompt needs but one of the two that prefill
            async with httpx.AsyncClient(trust_env=False) as client:
                assert "headrace_steps_total" in (await client.get(f"http://{HOST}:{metrics}/metrics")).text
            assert pod.rss_bytes() < request(here.container("StatefulSet/hr-headrace-prefill"))
        assert router.rss_bytes() < request(here.container(ROUTER)), "case 68: a router fits into what it asks for"

        await check_that_a_role_follows_the_load(here, pods, [address for _, address, _ in workers.values()], controls)

        ends = await asyncio.gather(*(pod.end() for pod, _, _ in workers.values()), router.end(), controller.end())
        assert ends == [0, 0, 0, 0, 0]


async def check_that_a_role_follows_the_load(here: Here, pods: Pods, addresses: Sequence[str], controls: int) -> None:
    """Sizes are nobody's but the chart's: of three workers two serve prefill, and one of them decodes once outputs get
    long; then more of it is advised."""
    assert [await role(address) for address in addresses] == ["prefill", "prefill", "decode"]
    async with contextlib.aclosing(Elsewhere(here.cluster, pods.env["HEADRACE_REDIS_URL"])) as elsewhere:

        async def lent() -> bool:
            await here.path(f"{time.monotonic()}")  # or nobody knows how fast these workers are
            await elsewhere.says(1, input_tokens=16, output_tokens=4000)
            return sorted([await role(address) for address in addresses]) == ["decode", "decode", "prefill"]

        await until(lent)
    async with httpx.AsyncClient(trust_env=False) as client:
        figures = (await client.get(f"http://{HOST}:{controls}/metrics")).text.splitlines()
    assert {
        'headrace_pool_desired_workers{pool="prefill"} 2.0',
        'headrace_pool_desired_workers{pool="decode"} 1.0',
    } <= set(figures)
    assert any(line.startswith('headrace_pool_advised_workers{pool="decode"}') for line in figures)
    said = json.loads(await pods.run(HEADRACE, "autoscale", "explain", "--json", "--config", str(here.config)))
    (flip, *_) = [one["decision"] for one in said if "flip" in one["decision"]["kind"]]
    assert "prefill: a worker is lent to decode" in flip["reason"]
    assert flip["advised"]["decode"]["replicas"] > flip["pools"]["decode"]["replicas"] == 1

    async def decoded_there() -> bool:
        _, decode = await here.path(f"salt-{time.monotonic()}")
        return decode.startswith("hr-headrace-prefill-")

    await until(decoded_there)
