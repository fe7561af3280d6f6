from cluster.control_actor import rank_resources, settings_digest
from cluster.ray_session import total_resources
from headrace.config import CanaryConfig, ClusterConfig, EngineConfig, PoolConfig, RayConfig

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
