import threading

import pytest
import ray
from ray.exceptions import RpcError

from cluster.pools import RayPools, actor_name, describe_resources, named, parse_actor_name, plan_placement
from headrace.errors import WorkerLost
from headrace.values import ParallelLayout


@pytest.mark.parametrize("layout", [ParallelLayout(), ParallelLayout(4), ParallelLayout(1, 3), ParallelLayout(4, 2)])
@pytest.mark.parametrize("each", [{"GPU": 1.0}, {"CPU": 0.5}, {"GPU": 0.25, "slot": 1.0}])
def test_case_66_a_group_holds_exactly_what_its_ranks_take(layout: ParallelLayout, each: dict[str, float]) -> None:
    placement = plan_placement(layout, each)
    for name, amount in each.items():
        assert sum(bundle[name] for bundle in placement.bundles) == amount * layout.world_size
    for index, bundle in enumerate(placement.bundles):
        ranks = [place for place in placement.ranks if place.bundle == index]
        assert {name: sum(place.resources[name] for place in ranks) for name in each} == bundle


def test_the_ranks_of_a_stage_share_a_bundle_and_so_a_node() -> None:
    placement = plan_placement(ParallelLayout(tp=2, pp=2), {"GPU": 1.0})
    assert [place.bundle for place in placement.ranks] == [0, 0, 1, 1]
    assert placement.strategy == "PACK"
    assert plan_placement(ParallelLayout(tp=2), {"GPU": 1.0}).strategy == "STRICT_PACK"


def test_an_actors_name_says_whose_rank_it_is() -> None:
    assert parse_actor_name(actor_name("decode-0", 3, 1)) == ("decode-0", 3, 1)
    for other in ("controller", "a/b/c", "a/1", "a/1/2/3", ""):
        assert parse_actor_name(other) is None


def test_resources_read_as_words() -> None:
    assert describe_resources([{"GPU": 4.0}]) == "4 GPU on one node"
    assert describe_resources([{"GPU": 4.0}, {"GPU": 4.0}]) == "2 × 4 GPU"


async def test_a_head_that_does_not_answer_holds_up_no_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's client takes 40 s to say that there is none: the controller's lease of the lead is 5 s."""
    answers, num_asked = threading.Event(), 0

    def draining() -> dict[str, float]:
        nonlocal num_asked
        num_asked += 1
        answers.wait(10)
        raise RpcError("nobody answers")

    monkeypatch.setattr("cluster.pools.NOTICE_SECONDS", 0.0)
    pools = RayPools("headrace-test", lambda pool: {"GPU": 1.0})
    monkeypatch.setattr(pools, "_draining_nodes", draining)
    assert pools.head_silent_seconds == 0.0
    assert await pools.notices() == {}
    assert await pools.notices() == {}
    answers.set()
    monkeypatch.setattr("cluster.pools.NOTICE_SECONDS", 10.0)
    assert await pools.notices() == {}, "an error is no notice"
    assert num_asked == 1, "nobody asks again while one asks"
    assert pools.head_silent_seconds > 0.0, "nor an answer"
    monkeypatch.setattr("cluster.pools.SAID_SECONDS", 0.0)
    assert pools.trouble.startswith("Ray's head has not answered for 0 s")
    monkeypatch.setattr(pools, "_draining_nodes", dict)
    assert await pools.notices() == {}
    assert pools.head_silent_seconds == 0.0


async def test_a_head_whose_answer_is_not_understood_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """No worker would be started or replaced any more on a Ray that says it otherwise."""

    def draining() -> dict[str, float]:
        raise KeyError("bundles_to_node_id")

    pools = RayPools("headrace-test", lambda pool: {"GPU": 1.0})
    monkeypatch.setattr(pools, "_draining_nodes", draining)
    with pytest.raises(KeyError):
        await pools.notices()
    assert pools.head_silent_seconds == 0.0


class Rank:
    pass


@pytest.mark.parametrize("options", [{"num_gpus": 0.00001}, {"resources": {"GPU": 1.0}}])
def test_what_ray_refuses_ends_the_workers_start_and_not_the_controller(options: dict[str, object]) -> None:
    """Ray says it by a ValueError, which is none of its own errors."""
    with pytest.raises(WorkerLost, match=r"prefill-0 \(generation 2\): ValueError: "), named("prefill-0", 2):
        ray.remote(Rank).options(**options)


def test_case_65_of_a_worker_that_is_removed_no_rank_is_left_nor_what_was_set_aside_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither ends with its controller, and nobody else would end them."""
    ended: list[object] = []
    monkeypatch.setattr("cluster.pools.ray.kill", lambda rank, no_restart: ended.append((rank, no_restart)))
    monkeypatch.setattr("cluster.pools.remove_placement_group", ended.append)
    pools = RayPools("headrace-test", lambda pool: {"GPU": 1.0})
    for generation in (1, 2):
        pools._ranks["decode-0", generation] = [f"rank {rank} of {generation}" for rank in range(2)]
        pools._groups["decode-0", generation] = f"group {generation}"  # type: ignore[assignment]
    for _ in range(2):
        pools.remove("decode-0", 1)
    assert ended == [("rank 0 of 1", True), ("rank 1 of 1", True), "group 1"]
