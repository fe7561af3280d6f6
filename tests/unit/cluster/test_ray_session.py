import socket

import pytest
import ray

from cluster.control_actor import rank_resources, settings_digest
from cluster.ray_session import connect, start, total_resources
from headrace.config import CanaryConfig, ClusterConfig, EngineConfig, PoolConfig, RayConfig
from headrace.errors import ConfigError, Unavailable
from tests.ray_heads import listening

H100 = {"GPU": 1.0, "h100": 1.0}


def test_a_pools_own_resources_come_before_those_of_all() -> None:
    config = ClusterConfig(
        model="m",
        pools={
            "prefill": PoolConfig(role="prefill", replicas=2, tp=4, rank_resources=H100),
            "decode": PoolConfig(role="decode", tp=2),
        },
        ray=RayConfig(rank_resources={"GPU": 1.0, "l40s": 1.0}),
    )
    assert rank_resources(config, config.pools["prefill"], config.engine) == H100
    assert rank_resources(config, config.pools["decode"], config.engine) == {"GPU": 1.0, "l40s": 1.0}
    assert total_resources(config) == {"GPU": 10.0, "h100": 8.0, "l40s": 2.0}


def test_without_any_a_rank_takes_one_device_also_in_a_pool_that_was_desired_later() -> None:
    config = ClusterConfig(model="m", pools={"all": PoolConfig(role="unified")}, engine=EngineConfig(device="cuda"))
    assert rank_resources(config, config.pools["all"], config.engine) == {"GPU": 1.0}
    assert rank_resources(config, None, config.engine) == {"GPU": 1.0}


def test_a_canarys_ranks_are_counted_with_its_own_engine() -> None:
    canary = CanaryConfig(revision="v2", pools={"new": PoolConfig(role="decode", replicas=3)})
    config = ClusterConfig(
        model="m",
        pools={"all": PoolConfig(role="unified")},
        engine=EngineConfig(device="cuda"),
        canary=canary.model_copy(update={"engine": EngineConfig(device="cuda")}),
    )
    assert total_resources(config) == {"GPU": 4.0}


def test_controllers_are_the_same_where_all_that_they_start_with_is() -> None:
    ours = settings_digest("{}", "redis://:secret@h/0", "")
    assert ours == settings_digest("{}", "redis://:secret@h/0", "")
    others = {
        settings_digest(*its)
        for its in (("{1}", "redis://:secret@h/0", ""), ("{}", "redis://h/1", ""), ("{}", "", "h"))
    }
    assert len(others - {ours}) == 3
    assert "secret" not in ours


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks Ray itself where nobody answers waits for more than four minutes."""

    def init(**settings: object) -> None:
        raise AssertionError("Ray was asked")

    monkeypatch.setattr(ray, "init", init)


@pytest.mark.usefixtures("no_ray")
@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_an_address_where_nobody_listens_is_named_at_once(scheme: str) -> None:
    with socket.create_server(("0.0.0.0", 0)) as closed:
        address = f"{scheme}127.0.0.1:{closed.getsockname()[1]}"
    with pytest.raises(Unavailable, match=rf"ray\.address: no Ray cluster answers at {address}: .*refused"):
        connect(address, "c")


@pytest.mark.usefixtures("no_ray")
@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_what_auto_leads_to_is_looked_at_too(monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    with socket.create_server(("0.0.0.0", 0)) as closed:
        monkeypatch.setenv("RAY_ADDRESS", f"{scheme}127.0.0.1:{closed.getsockname()[1]}")
    with pytest.raises(Unavailable, match=r"ray\.address: no Ray cluster answers at auto: .*refused"):
        connect("auto", "c")


@pytest.mark.usefixtures("no_ray")
def test_one_that_accepts_and_says_nothing_is_no_head() -> None:
    with socket.create_server(("0.0.0.0", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(Unavailable, match=rf"ray\.address: no Ray cluster answers at {address}: no head at"):
            connect(address, "c")


@pytest.mark.usefixtures("no_ray")
def test_a_server_of_ray_that_is_no_head_is_told_from_one() -> None:
    message = r"what answers is none \(its client server is ray://"
    with listening(knows=False) as (address, _), pytest.raises(Unavailable, match=rf"{address}: .* {message}"):
        connect(address, "c")
    with listening() as (address, _), pytest.raises(AssertionError, match="Ray was asked"):
        connect(address, "c")


@pytest.mark.usefixtures("no_ray")
@pytest.mark.parametrize("address", ["http://127.0.0.1:8265", "127.0.0.1", "head", "head:", "head:port", "ray://head"])
def test_an_address_of_another_form_is_named_with_those_that_there_are(address: str) -> None:
    with pytest.raises(
        ConfigError, match=r"ray\.address: must be auto, HOST:PORT of a Ray head .* or ray://"
    ) as caught:
        connect(address, "c")
    assert f"got {address!r}" in caught.value.message


def test_a_ray_of_our_own_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where its folder cannot be written, or a path in it is too long for a socket."""

    def init(**settings: object) -> None:
        raise FileNotFoundError(2, "No such file or directory", "/proc/nowhere")

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(
        Unavailable, match=r"^ray: none can be started on this machine: FileNotFoundError: .*/proc/nowhere"
    ):
        start(ClusterConfig(model="m", pools={"all": PoolConfig(role="unified")}))
