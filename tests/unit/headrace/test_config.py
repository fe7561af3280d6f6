import pathlib

import pytest

from headrace.config import ClusterConfig
from headrace.config_file import load, parse
from headrace.errors import ConfigError
from headrace.values import ParallelLayout, Role

GOOD = """
model: models/smollm2-135m-instruct/
pools:
  prefill: {role: prefill, replicas: 2}
  decode: {role: decode, tp: 2, pp: 2}
router: {api_keys: [a, b], http_port: 0}
handoff: {pin_seconds: 3}
"""


def test_a_file_becomes_frozen_values_and_the_rest_is_default() -> None:
    config = parse(GOOD)
    assert config.model_name == "smollm2-135m-instruct"
    assert config.pools["decode"].layout == ParallelLayout(2, 2)
    assert config.pools["prefill"].worker_role is Role.PREFILL
    assert config.router.api_keys == ("a", "b")
    assert config.handoff.pin_seconds == 3.0
    assert config.redis.url is None
    with pytest.raises(Exception, match="frozen"):
        config.name = "other"  # type: ignore[misc]


def test_a_served_name_wins_over_the_folders() -> None:
    assert parse(GOOD + "served_model_name: small").model_name == "small"


TENANTS = (
    GOOD
    + """
service_classes:
  chat: {ttft_seconds: 1, tpot_seconds: 0.05}
  batch: {}
tenants:
  acme: {key_env: [ACME_KEY], requests_per_minute: 60, weight: 3, service_class: chat, service_classes: [chat]}
admission: {service_class: batch}
"""
)


def test_tenants_and_classes_become_frozen_values() -> None:
    config = parse(TENANTS)
    assert config.service_classes["chat"].ttft_seconds == 1.0
    assert config.service_classes["batch"].ttft_seconds is None
    acme = config.tenants["acme"]
    assert (acme.key_env, acme.requests_per_minute, acme.tokens_per_minute) == (("ACME_KEY",), 60, None)
    assert (acme.weight, acme.service_classes, acme.coalesce, acme.cache_results) == (3.0, ("chat",), False, False)
    assert config.admission.service_class == "batch"


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("service_class: batch", "service_class: fast", "admission.service_class"),
        ("service_class: chat", "service_class: fast", "tenants.acme.service_class"),
        ("service_classes: [chat]", "service_classes: [chat, fast]", "tenants.acme.service_classes"),
    ],
)
def test_a_class_that_there_is_not_is_refused_with_those_that_there_are(old: str, new: str, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(TENANTS.replace(old, new))
    assert f"{key}: must be one of chat, batch, got 'fast'" in caught.value.message
    with pytest.raises(ConfigError, match="service_classes names none, got 'fast'"):
        parse(GOOD + "admission: {service_class: fast}")


EXAMPLES = [
    file
    for file in sorted((pathlib.Path(__file__).parents[3] / "examples").glob("*.yaml"))
    if not file.stem.startswith("plan")  # these ask how many GPUs, and describe no cluster
]


@pytest.mark.parametrize("file", EXAMPLES, ids=str)
def test_the_examples_are_good(file: pathlib.Path) -> None:
    assert load(file).name == file.stem


BAD = {
    "a target that nobody meets": (
        "service_classes: {a: {ttft_seconds: 0}}",
        "service_classes.a.ttft_seconds",
        "0",
        "above 0 and at most 3600",
    ),
    "a quota of nothing": (
        "tenants: {a: {tokens_per_minute: 0}}",
        "tenants.a.tokens_per_minute",
        "0",
        "a whole number at least 1",
    ),
    "a tenant without weight": ("tenants: {a: {weight: 0}}", "tenants.a.weight", "0", "above 0 and at most 1000"),
    "a tenant without a key": (
        "tenants: {a: {weight: 2}}",
        "tenants.a",
        "",
        "must have a key, by key_env or key_files",
    ),
    "a time without end": ("redis: {lease_seconds: .inf}", "redis.lease_seconds", "inf", "finite"),
    "a body beyond gRPC": ("limits: {max_body_bytes: 2147483648}", "limits.max_body_bytes", "2147483648", "2147483647"),
    "no served name": ("served_model_name: ''", "served_model_name", "''", "at least 1 character"),
    "no host": ("router: {host: ''}", "router.host", "''", "at least 1 character"),
    "a key where none may stand": ("tenants: {a: {keys: [x]}}", "tenants.a.keys", "keys", "key_env, key_files"),
    "a file of keys that is sought from somewhere": (
        "tenants: {a: {key_files: [keys]}}",
        "tenants.a.key_files.0",
        "'keys'",
        "'^/'",
    ),
    "a tenant's name": ("tenants: {Ä: {}}", "tenants.Ä", "'Ä'", "^[a-z0-9]"),
    "a fraction of nothing": (
        "admission: {unleased_fraction: 0}",
        "admission.unleased_fraction",
        "0",
        "above 0 and at most 1",
    ),
    "a burst of an hour": (
        "admission: {quota_burst_seconds: 3600}",
        "admission.quota_burst_seconds",
        "3600",
        "at least 1 and at most 60",
    ),
    "unknown key": ("engine: {blocksize: 32}", "engine.blocksize", "blocksize", "block_size"),
    "unknown key at the top": ("modle: x", "modle", "modle", "model, name"),
    "below the range": ("engine: {block_size: 0}", "engine.block_size", "0", "at least 1 and at most 1024"),
    "above the range": ("router: {http_port: 70000}", "router.http_port", "70000", "at most 65535"),
    "not a whole number": ("engine: {max_num_seqs: 1.5}", "engine.max_num_seqs", "1.5", "a whole number at least 1"),
    "one word where a list is needed": ("router: {api_keys: 5}", "router.api_keys", "(not shown)", "a list"),
    "not a number": ("engine: {kv_bytes: lots}", "engine.kv_bytes", "'lots'", "a whole number at least"),
    "a fraction beyond 1": ("handoff: {claim_fraction: 1.5}", "handoff.claim_fraction", "1.5", "above 0 and at most 1"),
    "not one of the words": ("engine: {device: tpu}", "engine.device", "'tpu'", "'cpu' or 'cuda'"),
    "a number for a switch": ("fault_hooks: 1", "fault_hooks", "1", "a valid boolean"),
    "unknown key of what may be null": (
        "router: {tls: {cert: a}}",
        "router.tls.cert",
        "cert",
        "cert_file, client_ca_file",
    ),
    "half a pair of files": ("router: {tls: {cert_file: a}}", "router.tls.key_file", "", "must be given"),
    "a section that is none": ("engine: 7", "engine", "7", "EngineConfig"),
    "a name that is no name": ("name: Über", "name", "'Über'", "^[a-z0-9]"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_fault_names_the_key_the_value_and_what_is_allowed(case: str) -> None:
    line, key, value, allowed = BAD[case]
    text = GOOD.replace("router: {api_keys: [a, b], http_port: 0}\n", "").replace("handoff: {pin_seconds: 3}\n", "")
    with pytest.raises(ConfigError) as caught:
        parse(text + line, "cluster.yaml")
    message = caught.value.message
    assert message.startswith(f"cluster.yaml: {key}: ")
    assert value in message
    assert allowed in message


def test_faults_inside_a_pool_name_the_pool() -> None:
    with pytest.raises(ConfigError) as caught:
        parse("model: m\npools: {fast: {role: decode, tp: 0}}")
    assert "pools.fast.tp: must be a whole number at least 1 and at most 64, got 0" in caught.value.message
    known = "gpu_hour_price, max_replicas, min_replicas, pp, rank_resources, replicas, role, tp"
    with pytest.raises(ConfigError, match=rf"pools\.fast\.gpus: unknown key; known here: {known}"):
        parse("model: m\npools: {fast: {role: decode, gpus: 1}}")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("pools: {d: {role: decode}}", "model: must be given"),
        ("model: m\npools: {}", "pools: must be"),
        ("model: m\npools: {p: {role: prefill}}", "at least one pool that decodes"),
        ("- a\n- b", "must be a mapping of keys, got list"),
        ("", "must be a mapping of keys, got NoneType"),
        ("model: [", "not valid YAML"),
        ("model: m\n\tpools: x", "not valid YAML"),
    ],
)
def test_broken_files_are_refused_with_the_reason(text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert expected in caught.value.message


def test_a_key_that_is_merged_and_overridden_stands_there_once() -> None:
    """A mapping into which others were merged, and which is merged itself before it is read, was refused."""
    merged = parse(
        """
        model: m
        canary:
          revision: v2
          pools:
            new: &wide
              <<: {role: decode, tp: 1, replicas: 3}
              tp: 2
        pools:
          d:
            <<: *wide
            tp: 4
        """
    )
    assert merged.canary is not None
    assert (merged.canary.pools["new"].tp, merged.canary.pools["new"].replicas) == (2, 3)
    assert (merged.pools["d"].tp, merged.pools["d"].replicas) == (4, 3)


def test_a_file_that_cannot_be_read_is_a_config_error_with_its_path(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "headrace.yaml"
    with pytest.raises(ConfigError, match=str(file)):
        load(file)
    file.write_bytes(b"model: \xff\xfe")
    with pytest.raises(ConfigError, match=str(file)):
        load(file)
    file.write_text(GOOD, encoding="utf-8")
    assert isinstance(load(file), ClusterConfig)


def test_certificates_lie_where_their_paths_are_written(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "headrace.yaml"
    tls = "{cert_file: tls.crt, key_file: /run/tls.key, ca_file: ca/ca.crt, server_name: router}"
    file.write_text(f"model: m\npools: {{a: {{role: unified}}}}\nrouter: {{tls: {tls}}}")
    found = load(file).router.tls
    assert found is not None
    assert (found.cert_file, found.key_file) == (str(tmp_path / "tls.crt"), "/run/tls.key")
    assert (found.ca_file, found.client_ca_file) == (str(tmp_path / "ca" / "ca.crt"), None)
    assert found.server_name == "router"


@pytest.mark.parametrize(
    ("given", "meant"), [("logs/decisions.jsonl", "{folder}/logs/decisions.jsonl"), ("/a/b", "/a/b")]
)
def test_the_decision_log_lies_where_its_path_is_written(tmp_path: pathlib.Path, given: str, meant: str) -> None:
    """And not where the command was typed: routers are started from elsewhere."""
    file = tmp_path / "headrace.yaml"
    file.write_text(f"model: m\npools: {{a: {{role: unified}}}}\nrouter: {{decision_log: {{path: {given}}}}}")
    assert load(file).router.decision_log.path == meant.format(folder=tmp_path)


SCALED = """
model: m
service_classes: {chat: {ttft_seconds: 1.0}}
autoscaling: {mode: controller, service_class: chat, budget_gpus: 4}
pools:
  decode: {role: decode, replicas: 2, min_replicas: 0, max_replicas: 3, tp: 2}
"""


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            "budget_gpus: 4",
            "budget_gpus: 3",
            "autoscaling.budget_gpus: must be at least 4, which replicas of all pools",
        ),
        ("min_replicas: 0", "min_replicas: 3", "pools.decode: must be min ≤ replicas ≤ max, got '3 ≤ 2 ≤ 3'"),
        ("max_replicas: 3", "max_replicas: 1", "got '0 ≤ 2 ≤ 1'"),
        ("service_class: chat", "service_class: code", "autoscaling.service_class: must be one of chat, got 'code'"),
        (", service_class: chat", "", "autoscaling.service_class: must name one of service_classes"),
    ],
)
def test_bounds_that_cannot_be_kept_are_refused_with_the_numbers(old: str, new: str, expected: str) -> None:
    config = parse(SCALED)
    assert config.pools["decode"].bounds == (0, 3)
    assert config.starts_from_zero
    with pytest.raises(ConfigError) as caught:
        parse(SCALED.replace(old, new))
    assert expected in caught.value.message


CANARY = """
model: m
engine: {dtype: bfloat16, max_num_seqs: 32}
pools: {decode: {role: decode, replicas: 3, min_replicas: 1}}
autoscaling: {budget_gpus: 4}
canary: {revision: v2, engine: {max_num_seqs: 8}, pools: {new: {role: decode, replicas: 2}}, percent: 5}
"""


def test_a_canarys_engine_is_everybodys_but_for_what_it_says() -> None:
    canary = parse(CANARY).canary
    assert canary is not None
    assert (canary.engine.dtype, canary.engine.max_num_seqs, canary.num_gpus) == ("bfloat16", 8, 2)
    again = ClusterConfig.model_validate_json(parse(CANARY).model_dump_json())
    assert again.canary == canary


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("v2", "stable", "canary.revision: must be another name: that is what serves already, got 'stable'"),
        ("v2", "V 2", "canary.revision: must be"),
        ("{new: {", "{decode: {", "canary.pools.decode: must be other names than those of pools: decode, got 'decode'"),
        ("replicas: 2}", "replicas: 0}", "canary.pools.new.replicas: must be at least 1, got 0"),
        ("replicas: 2}", "max_replicas: 2}", "canary.pools.new: must be no min_replicas or max_replicas"),
        ("{new: {role: decode", "{new: {role: prefill", "canary.pools: must be at least one that decodes"),
        (
            "replicas: 2}",
            "replicas: 4}",
            "canary.pools: must be at most 3 GPUs: autoscaling.budget_gpus is 4, and pools",
        ),
        ("percent: 5", "percent: 101", "canary.percent: must be a number above 0 and at most 100, got 101"),
        ("percent: 5", "min_requests: 9", "canary.min_requests: must be a whole number at least 50"),
        ("percent: 5", "max_ttft_ratio: 0.5", "canary.max_ttft_ratio: must be a number at least 1 and at most 100"),
        ("max_num_seqs: 8", "max_num_seqs: 0", "canary.engine.max_num_seqs: must be a whole number at least 1"),
        ("percent: 5", "share: 5", "canary.share: unknown key; known here: confidence, engine, good_after_seconds"),
        ("{max_num_seqs: 8}", "7", "canary.engine: must be"),
        ("pools: {new: {role: decode, replicas: 2}}, ", "", "canary.pools: must be given"),
    ],
)
def test_a_canary_that_cannot_be_is_refused_with_field_value_and_range(old: str, new: str, expected: str) -> None:
    head, _, canary = CANARY.partition("canary:")
    with pytest.raises(ConfigError) as caught:
        parse(f"{head}canary:{canary.replace(old, new)}")
    assert expected in caught.value.message
