"""What every example renders: valid for Kubernetes, closed to what pods need not, and ended later than its drain."""

import json
import math
import pathlib
import subprocess
from typing import Any

import jsonschema
import pytest

from cluster.pools import plan_placement
from headrace.config_file import parse
from router.__main__ import CLOSE_SECONDS
from tests.helm.conftest import (
    CHART,
    EXAMPLES,
    VARIANTS,
    Manifest,
    containers,
    example,
    named,
    of_kind,
    pod_templates,
    rendered,
    tool,
)
from tests.helm.crds import SPECS

MARGIN_SECONDS = 10


@pytest.mark.parametrize("values", EXAMPLES, ids=lambda path: path.stem)
def test_helm_lints_it(values: pathlib.Path) -> None:
    command = [tool("helm"), "lint", "--strict", str(CHART), "--values", str(values)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_kubernetes_takes_every_manifest(manifests: list[Manifest]) -> None:
    import kubernetes_validate

    templates = pod_templates(manifests)
    pods = [{"apiVersion": "v1", "kind": "Pod", **template} for template in templates.values()]
    for manifest in (*manifests, *pods):
        if manifest["kind"] in SPECS:
            jsonschema.validate(manifest["spec"], SPECS[manifest["kind"]])
        else:
            kubernetes_validate.validate(manifest, "1.37", strict=True)
    assert any(name.startswith(("RayCluster/", "StatefulSet/")) for name in templates)


def test_no_two_manifests_have_one_name(manifests: list[Manifest]) -> None:
    names = [(manifest["kind"], manifest["metadata"]["name"]) for manifest in manifests]
    assert len(names) == len(set(names))


def test_no_pod_may_do_more_than_it_must(manifests: list[Manifest]) -> None:
    for name, template in pod_templates(manifests).items():
        spec = template["spec"]
        assert spec["enableServiceLinks"] is False, name
        assert spec["securityContext"]["runAsNonRoot"] is True, name
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        # An autoscaler in the head has an account that KubeRay makes for it.
        scales = name == "RayCluster/head" and of_kind(manifests, "RayCluster")[0]["spec"].get(
            "enableInTreeAutoscaling"
        )
        assert scales or spec["automountServiceAccountToken"] is False, name
        for container in containers(template):
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"] is True, name
            assert security["allowPrivilegeEscalation"] is False, name
            assert security["capabilities"] == {"drop": ["ALL"]}, name
            assert {"cpu", "memory"} <= container["resources"]["requests"].keys(), name
            asked, most = (_bytes(container["resources"][side]["memory"]) for side in ("requests", "limits"))
            assert asked <= most, f"case 68: {name} would be refused"


def _bytes(text: str) -> int:
    return int(text[:-2]) * {"Mi": 2**20, "Gi": 2**30, "Ti": 2**40}[text[-2:]]


def test_a_pod_mounts_what_it_names(manifests: list[Manifest]) -> None:
    for name, template in pod_templates(manifests).items():
        volumes = {volume["name"] for volume in template["spec"]["volumes"]}
        mounted = {mount["name"] for container in containers(template) for mount in container["volumeMounts"]}
        assert mounted == volumes, name


def test_compiled_kernels_are_kept_where_there_is_a_claim_for_them() -> None:
    name, *settings = VARIANTS["mig"]
    for kept, template in (
        (True, pod_templates(rendered(example(name), *settings))["RayCluster/h200"]),
        (False, pod_templates(rendered(example(name)))["RayCluster/h200"]),
    ):
        (worker,) = template["spec"]["containers"]
        folder = next(entry["value"] for entry in worker["env"] if entry["name"] == "TRITON_CACHE_DIR")
        assert any(mount["mountPath"] == folder for mount in worker["volumeMounts"]) is kept
        assert folder.startswith("/tmp/") is not kept


def test_case_60_a_pods_grace_is_longer_than_its_drain(manifests: list[Manifest]) -> None:
    for name, template in pod_templates(manifests).items():
        (container,) = template["spec"]["containers"]
        words = [*container.get("args", []), *_pre_stop(container)]
        drains = [float(word.partition("=")[2]) for word in words if word.startswith("--grace-seconds=")]
        sleeps = [float(_pre_stop(container)[1])] if _pre_stop(container)[:1] == ["sleep"] else [0.0]
        grace = template["spec"]["terminationGracePeriodSeconds"]
        if container["name"] in ("router", "worker"):
            assert len(drains) == 1, name
            assert grace >= sum(drains) + sum(sleeps) + CLOSE_SECONDS + MARGIN_SECONDS, name


def _pre_stop(container: Manifest) -> list[str]:
    return list(container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", []))


def test_case_59_what_serves_has_all_three_probes(manifests: list[Manifest]) -> None:
    """But Ray's nodes, whose probes KubeRay knows; whether a worker in one is well, its controller watches."""
    for name, template in pod_templates(manifests).items():
        (container,) = template["spec"]["containers"]
        if not name.startswith("RayCluster/") and container["name"] != "redis":
            assert {"startupProbe", "readinessProbe", "livenessProbe"} <= container.keys(), name


def test_case_65_a_head_forks_servers_for_its_clients_without_handlers_of_grpc() -> None:
    (head,) = pod_templates(rendered(example("cpu")))["RayCluster/head"]["spec"]["containers"]
    assert {"name": "GRPC_ENABLE_FORK_SUPPORT", "value": "0"} in head["env"]


def test_case_59_liveness_of_a_router_holds_while_readiness_may_not(manifests: list[Manifest]) -> None:
    (router,) = named(manifests, "Deployment", "hr-headrace-router")["spec"]["template"]["spec"]["containers"]
    assert router["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert router["livenessProbe"]["httpGet"]["path"] == "/health"


@pytest.mark.parametrize("variant", ["proxied", "pinned"])
def test_routers_have_the_files_of_their_tls_and_all_who_ask_them_speak_it(variant: str) -> None:
    name, *settings = VARIANTS[variant]
    manifests = rendered(example(name), *settings)
    tls = parse(named(manifests, "ConfigMap", "hr-headrace")["data"]["headrace.yaml"]).router.tls
    assert tls is not None
    template = pod_templates(manifests)["Deployment/hr-headrace-router"]
    (router,) = template["spec"]["containers"]
    assert {router[probe]["httpGet"]["scheme"] for probe in router if probe.endswith("Probe")} == {"HTTPS"}
    assert {tls.cert_file, tls.key_file, tls.ca_file, tls.client_ca_file} - {None} <= _mounted(template)
    service = named(manifests, "Service", "hr-headrace-router")
    assert {port["appProtocol"] for port in service["spec"]["ports"]} == {"https"}
    if variant == "pinned":
        assert tls.server_name == "llm.example"
        return
    assert tls.server_name == "hr-headrace-router.llm.svc"
    controller = pod_templates(manifests)["Deployment/hr-headrace-controller"]
    assert {tls.cert_file, tls.key_file, tls.ca_file} <= _mounted(controller)
    arguments = controller["spec"]["containers"][0]["args"]
    assert "--router-http-url=https://hr-headrace-router:8000" in arguments
    assert "--router-grpc-address=grpcs://hr-headrace-router:50051" in arguments
    (endpoint,) = named(manifests, "ServiceMonitor", "hr-headrace-router")["spec"]["endpoints"]
    assert endpoint["scheme"] == "https"
    assert endpoint["tlsConfig"].keys() == {"serverName", "ca", "cert", "keySecret"}


def test_a_controller_has_no_key_that_it_need_not_show() -> None:
    manifests = rendered(example("cpu"), "router.tls.existingSecret=certificate")
    mounted = _mounted(pod_templates(manifests)["Deployment/hr-headrace-controller"])
    assert {path for path in mounted if path.startswith("/etc/headrace/tls/")} == {"/etc/headrace/tls/ca.crt"}


def _mounted(template: Manifest) -> set[str]:
    """The files of secrets that a pod's container has, where they are listed."""
    items = {v["name"]: v.get("secret", {}).get("items", []) for v in template["spec"]["volumes"]}
    (container,) = template["spec"]["containers"]
    mounts = container["volumeMounts"]
    return {f"{mount['mountPath']}/{item['path']}" for mount in mounts for item in items[mount["name"]]}


def test_every_selector_finds_pods_and_every_port_is_there(manifests: list[Manifest]) -> None:
    templates = pod_templates(manifests).values()
    for manifest in of_kind(manifests, "Service", "PodDisruptionBudget", "NetworkPolicy", "PodMonitor"):
        spec = manifest["spec"]
        labels = spec["podSelector"]["matchLabels"] if "podSelector" in spec else spec["selector"]
        labels = labels.get("matchLabels", labels)
        pods = [t for t in templates if labels.items() <= t["metadata"]["labels"].items()]
        assert pods, manifest["metadata"]["name"]
        ports = {port["name"] for t in pods for c in containers(t) for port in c.get("ports", [])}
        wanted = {port.get("targetPort", port.get("port")) for port in spec.get("ports", [])}
        wanted |= {port["port"] for rule in spec.get("ingress", []) for port in rule.get("ports", [])}
        wanted |= {end["port"] for end in spec.get("podMetricsEndpoints", [])}
        assert {port for port in wanted if isinstance(port, str)} <= ports, manifest["metadata"]["name"]


def test_every_router_and_pool_has_a_budget_for_evictions(manifests: list[Manifest]) -> None:
    budgets = [budget["spec"]["selector"]["matchLabels"] for budget in of_kind(manifests, "PodDisruptionBudget")]
    for name, template in pod_templates(manifests).items():
        labels = template["metadata"]["labels"]
        if labels["headrace.io/component"] in ("router", "worker"):
            assert any(budget.items() <= labels.items() for budget in budgets), name


def test_case_66_ray_groups_hold_exactly_what_their_pools_take(manifests: list[Manifest]) -> None:
    """Counted as Ray counts: what pods offer (rayStartParams) against what placement groups ask for."""
    clusters = of_kind(manifests, "RayCluster")
    config = parse(named(manifests, "ConfigMap", "hr-headrace")["data"]["headrace.yaml"])
    for cluster in clusters:
        groups = {group["groupName"]: group for group in cluster["spec"]["workerGroupSpecs"]}
        per_node = "nodes" in groups
        key = "GPU" if config.engine.device == "cuda" else "CPU"
        for pool_name, pool in config.pools.items():
            group = groups["nodes" if per_node else pool_name]
            bundles = plan_placement(pool.layout, pool.rank_resources or {key: 1.0}).bundles
            offered = _offered(group)
            assert all(amount <= offered[name] for name, amount in bundles[0].items()), pool_name
            if not per_node:
                fit = min(offered[name] // amount for name, amount in bundles[0].items())
                pods = group.get("replicas", group["maxReplicas"])
                assert pods >= math.ceil(pool.replicas * len(bundles) / fit), pool_name
            _check_devices(group, config.engine.device == "cuda")


def _offered(group: Manifest) -> dict[str, float]:
    params = group["rayStartParams"]
    custom: dict[str, float] = json.loads(json.loads(params["resources"])) if "resources" in params else {}
    return {"CPU": float(params["num-cpus"]), "GPU": float(params["num-gpus"]), **custom}


def _check_devices(group: Manifest, cuda: bool) -> None:
    (container,) = group["template"]["spec"]["containers"]
    limits = container["resources"]["limits"]
    devices = [amount for name, amount in limits.items() if name.startswith("nvidia.com/")]
    assert sum(devices) == float(group["rayStartParams"]["num-gpus"]) == (sum(devices) if cuda else 0)


@pytest.mark.parametrize(
    ("name", "settings", "sizes"),
    [
        ("cpu", (), (1, 1, 1)),
        ("cpu", ("pools.decode.replicas=5", "pools.decode.stagesPerPod=2"), (3, 3, 3)),
        ("multi-node-pp", ("pools.wide.replicas=3",), (6, 6, 6)),
        ("two-gpu-types", (), (None, 0, 4)),
        ("two-gpu-types", ("autoscaling.mode=off",), (2, 2, 2)),
        ("one-8-gpu-node", ("node.count=3", "pools.prefill.replicas=8"), (3, 3, 3)),
    ],
)
def test_a_group_has_as_many_pods_as_its_workers_need(name: str, settings: tuple[str, ...], sizes: Any) -> None:
    groups = of_kind(rendered(example(name), *settings), "RayCluster")[0]["spec"]["workerGroupSpecs"]
    assert (groups[0].get("replicas"), groups[0]["minReplicas"], groups[0]["maxReplicas"]) == sizes


def test_a_scaler_and_a_number_of_replicas_are_never_given_both(manifests: list[Manifest]) -> None:
    scaled = {
        (scaler["spec"]["scaleTargetRef"]["kind"], scaler["spec"]["scaleTargetRef"]["name"])
        for scaler in of_kind(manifests, "ScaledObject", "HorizontalPodAutoscaler")
    }
    for manifest in of_kind(manifests, "Deployment", "StatefulSet"):
        assert ("replicas" in manifest["spec"]) != ((manifest["kind"], manifest["metadata"]["name"]) in scaled)


@pytest.mark.parametrize(
    ("settings", "follows"),
    [
        ((), ("AverageValue", 'headrace_pool_advised_workers{release="llm.hr-headrace",pool="decode"}')),
        (
            ("autoscaling.follow=pressure",),
            ("Value", 'headrace_pool_pressure{release="llm.hr-headrace",pool="decode"}'),
        ),
    ],
)
def test_stateful_sets_are_scaled_by_advice_or_pressure_beside_a_controller_that_advises(
    settings: tuple[str, ...], follows: tuple[str, str]
) -> None:
    manifests = rendered(example("keda-statefulset"), *settings)
    (trigger,) = named(manifests, "ScaledObject", "hr-headrace-decode")["spec"]["triggers"]
    assert (trigger["metricType"], trigger["metadata"]["query"]) == follows
    config = parse(named(manifests, "ConfigMap", "hr-headrace")["data"]["headrace.yaml"])
    assert (config.autoscaling.mode, config.pools["decode"].bounds) == ("external", (2, 8))
    (controller,) = pod_templates(manifests)["Deployment/hr-headrace-controller"]["spec"]["containers"]
    ports = {"--worker-metrics-port=decode=7001", "--worker-metrics-port=prefill=7001"}
    assert {"--worker-prefix=hr-headrace-", *ports} <= set(controller["args"])
    assert not [word for word in controller["args"] if word.startswith("--ray-address")]
    assert named(manifests, "ServiceMonitor", "hr-headrace-controller"), "or nobody scrapes the advice"
    assert not of_kind(manifests, "PodMonitor"), "case 56: a pod's label is not the role of a worker that is lent"
    assert named(manifests, "ScrapeConfig", "hr-headrace-workers")


def test_pods_without_a_token_of_ray_say_so(manifests: list[Manifest]) -> None:
    open_cluster = rendered(example("cpu"), "ray.auth.enabled=false")
    templates = {name: t for name, t in pod_templates(open_cluster).items() if name.startswith("RayCluster/")}
    for template in (*templates.values(), pod_templates(open_cluster)["Deployment/hr-headrace-controller"]):
        entries = {entry["name"]: entry.get("value") for entry in template["spec"]["containers"][0]["env"]}
        assert entries["RAY_AUTH_MODE"] == "disabled"
