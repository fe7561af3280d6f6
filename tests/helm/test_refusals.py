"""Values that mean nothing, or what no process could do: refused before anything is rendered, by the key and the reason."""

import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.helm.conftest import CHART, Refused, example, rendered, tool

WRONG = {
    "a misspelled value": ("cpu", ["router.replica=2"], "at '/router': additional properties 'replica' not allowed"),
    "a misspelled key of headrace.yaml": ("cpu", ["config.engine.kv_byte=1"], "at '/config/engine': additional prop"),
    "a key that the chart fills in": ("cpu", ["config.router.http_port=1"], "at '/config/router': additional prop"),
    "keys in a file that all may read": ("cpu", ["config.router.api_keys={a}"], "at '/config/router': additional prop"),
    "TLS that mounts nothing": ("cpu", ["config.router.tls.cert_file=a"], "at '/config/router': additional prop"),
    "clients' certificates for a plain router": ("cpu", ["router.tls.clientCaSecret=a"], "at '/router/tls/existingSec"),
    "a number out of its range": ("cpu", ["config.engine.block_size=0"], "at '/config/engine/block_size': minimum"),
    "a canary without a controller that starts its workers": (
        "cpu-statefulset",
        ["config.canary.revision=v2", "config.canary.pools.new.role=unified"],
        "config.canary: runtime must be ray, whose controller starts and ends its workers, got statefulset",
    ),
    "an unknown role": ("cpu", ["pools.prefill.role=both"], "at '/pools/prefill/role'"),
    "a pool without a role": ("cpu", ["pools.third.replicas=1"], "at '/pools/third': missing property 'role'"),
    "another runtime": ("cpu", ["runtime=kserve"], "at '/runtime': value must be one of 'ray', 'statefulset'"),
    "nodes shared without Ray": ("cpu-statefulset", ["topology=perNode"], "at '/topology': value must be 'perPool'"),
    "Ray's autoscaler without Ray": ("cpu-statefulset", ["autoscaling.mode=controller"], "at '/autoscaling/mode'"),
    "bounds that the chart fills in": (
        "two-gpu-types",
        ["pools.h200.min_replicas=1"],
        "at '/pools/h200': additional prop",
    ),
    "who decides, said twice": (
        "cpu",
        ["config.autoscaling.mode=controller"],
        "at '/config/autoscaling': additional prop",
    ),
    "sizes that nothing follows from": (
        "cpu",
        ["autoscaling.mode=controller"],
        'must name one of config.service_classes, got ""',
    ),
    "a controller that tries, where there is none": (
        "cpu-statefulset",
        ["autoscaling.dryRun=true"],
        "at '/autoscaling/dry",
    ),
    "advice that nothing follows from": (
        "keda-statefulset",
        ["config.autoscaling.service_class=null"],
        'must name one of config.service_classes, got ""',
    ),
    "two who bring pods": ("cpu", ["autoscaling.mode=external"], "at '/autoscaling/mode'"),
    "no Redis": ("cpu", ["redis.mode=external"], "at '/redis/external'"),
    "a Redis by another scheme": ("cpu", ["redis.external.url=http://h"], "at '/redis/external/url'"),
    "a port that is none": ("cpu", ["router.httpPort=70000"], "at '/router/httpPort': maximum"),
    "an Ingress without a host": ("cpu", ["router.ingress.enabled=true"], "at '/router/ingress/host'"),
    "an objective between buckets": ("cpu", ["monitoring.objectives.ttftSeconds=3"], "at '/monitoring/objectives/ttft"),
    "a GCS whose Redis is no address": ("cpu", ["ray.gcsFaultTolerance.enabled=true"], "redisAddress"),
    "a folder of the host that is none": ("cpu", ["model.volume.kind=hostPath"], "at '/model/volume/hostPath'"),
    "prefill alone": ("cpu", ["pools.decode.role=prefill"], "at least one pool must decode"),
    "a stage wider than its node": ("one-8-gpu-node", ["pools.decode.tp=16"], "at most node.ranks (8), got 16"),
    "more ranks than nodes have": (
        "one-8-gpu-node",
        ["pools.prefill.replicas=3"],
        "have 10 ranks, node.count × node.ra",
    ),
    "a pool outside its bounds": ("two-gpu-types", ["pools.h100.replicas=5"], "got 1 ≤ 5 ≤ 4"),
}


@pytest.mark.parametrize("case", WRONG)
def test_it_is_refused_with_the_reason(case: str) -> None:
    name, settings, reason = WRONG[case]
    with pytest.raises(Refused) as refusal:
        rendered(example(name), *settings)
    assert reason in str(refusal.value)


def test_without_pools_it_says_that_there_are_none() -> None:
    done = subprocess.run([tool("helm"), "template", "hr", str(CHART)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "at '/pools': minProperties: got 0, want 1" in done.stderr


def test_what_is_generated_is_up_to_date() -> None:
    command = [sys.executable, str(ROOT / "tools" / "generate_chart.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
