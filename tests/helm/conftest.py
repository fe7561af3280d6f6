"""The chart, rendered by a real helm. `make helm-test` puts the tools there."""

import pathlib
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import yaml

from tests.conftest import ROOT

TOOLS = ROOT / ".headrace" / "tools"
CHART = ROOT / "helm" / "headrace"
EXAMPLES = sorted((ROOT / "examples" / "helm").glob("*.yaml"))
NAMESPACE = "llm"

sys.path.append(str(TOOLS / "site"))  # last: what the environment has of its own comes first

Manifest = dict[str, Any]
Render = Callable[..., list[Manifest]]


class Refused(Exception):
    """What helm said."""


def tool(name: str) -> str:
    path = next((path for path in (TOOLS / "bin" / name, TOOLS / "site" / "bin" / name) if path.exists()), None)
    if path is None:
        pytest.fail(f"{TOOLS} has no {name}: run `bash tools/helm_tools.sh`, as `make helm-test` does")
    return str(path)


@cache
def rendered(values: pathlib.Path, *settings: str) -> list[Manifest]:
    """The manifests of the chart under these values and settings (as --set takes them). Refused with helm's words."""
    command = [tool("helm"), "template", "hr", str(CHART), "--namespace", NAMESPACE, "--values", str(values)]
    for setting in settings:
        command += ["--set", setting]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Refused(done.stderr)
    return [manifest for manifest in yaml.safe_load_all(done.stdout) if manifest]


def example(name: str) -> pathlib.Path:
    return ROOT / "examples" / "helm" / f"{name}.yaml"


# Ways through the chart that no example takes.
VARIANTS: dict[str, tuple[str, ...]] = {
    "hpa": (
        "keda-statefulset",
        "autoscaling.kind=hpa",
        "autoscaling.follow=pressure",
        "router.autoscaling.kind=hpa",
        "redis.external.existingSecret=r",
        "config.tracing.otlp_endpoint=grpc://collector.monitoring:4317",
        "config.logs.format=json",
        "pools.decode.gpu_hour_price=2",
    ),
    "open": ("cpu", "ray.auth.enabled=false", "networkPolicy.enabled=false", "serviceAccount.create=false"),
    "pinned": (
        "cpu-statefulset",
        f"image.digest=sha256:{'0' * 64}",
        "model.fetch=false",
        "image.pullSecrets={registry}",
        "monitoring.scrape=true",
        "router.tls.existingSecret=public",
        "router.tls.hasCa=false",
        "router.tls.serverName=llm.example",
    ),
    "nodes-scaled": (
        "one-8-gpu-node",
        "autoscaling.mode=controller",
        "node.max=4",
        "ray.auth.existingSecret=token",
        "config.service_classes.chat.ttft_seconds=2",
        "config.autoscaling.service_class=chat",
    ),
    "mig": (
        "two-gpu-types",
        "pools.h200.pod.gpuResource=nvidia.com/mig-3g.40gb",
        "pools.h200.role=unified",
        "config.handoff.rdma=true",
        "workers.kernelCacheClaim=kernels",
    ),
    "proxied": (
        "cpu",
        "router.service.type=LoadBalancer",
        "router.gateway.enabled=true",
        "router.gateway.name=g",
        "router.tls.existingSecret=certificate",
        "router.tls.clientCaSecret=clients",
        "monitoring.scrape=true",
    ),
}


@pytest.fixture(params=[*(path.stem for path in EXAMPLES), *VARIANTS])
def manifests(request: pytest.FixtureRequest) -> list[Manifest]:
    """Of each example and each variant in turn."""
    name, *settings = VARIANTS.get(request.param, (request.param,))
    return rendered(example(name), *settings)


def of_kind(manifests: list[Manifest], *kinds: str) -> list[Manifest]:
    return [manifest for manifest in manifests if manifest["kind"] in kinds]


def named(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    return next(manifest for manifest in of_kind(manifests, kind) if manifest["metadata"]["name"] == name)


def pod_templates(manifests: list[Manifest]) -> dict[str, Manifest]:
    """Every pod's template, by "kind/name" or "RayCluster/group"."""
    found = {}
    for manifest in manifests:
        spec, name = manifest.get("spec", {}), manifest["metadata"]["name"]
        if manifest["kind"] == "RayCluster":
            found["RayCluster/head"] = spec["headGroupSpec"]["template"]
            found |= {f"RayCluster/{group['groupName']}": group["template"] for group in spec["workerGroupSpecs"]}
        elif "template" in spec:
            found[f"{manifest['kind']}/{name}"] = spec["template"]
    return found


def containers(template: Manifest) -> list[Manifest]:
    return [*template["spec"].get("initContainers", []), *template["spec"]["containers"]]


def environment(container: Manifest) -> dict[str, str]:
    """A container's variables; those that only a cluster knows, by the name of where they come from."""
    known = {"status.podIP": "10.0.0.1", "metadata.name": "hr-headrace-pool-0", "spec.nodeName": "node-1"}
    values = {}
    for entry in container.get("env", []):
        source = entry.get("valueFrom", {})
        field = source.get("fieldRef", {}).get("fieldPath")
        values[entry["name"]] = entry.get("value") or known.get(field, "redis://:secret@redis.internal:6379/0")
    return values


def command_line(container: Manifest) -> list[str]:
    """command and args, with $(NAME) filled in as Kubernetes does."""
    line = [*container.get("command", []), *container.get("args", [])]
    for name, value in environment(container).items():
        line = [word.replace(f"$({name})", value) for word in line]
    return line
