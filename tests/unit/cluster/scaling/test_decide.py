"""What is decided: flips first, a budget that always holds, nothing on missing data, no swing at constant load."""

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.scaling.decide import decide
from cluster.scaling.values import Decision, Inputs, Recorded, Size, Traffic
from router.decisions import codec
from tests.unit.cluster.scaling.world import World, rules, traffic


def test_more_load_brings_more_workers_at_once_and_less_takes_them_away_only_after_the_hold() -> None:
    world = World(rules())
    up = world.turn(traffic(100.0))
    assert up.kind == "grow"
    assert up.pools["prefill"].replicas > 2
    assert up.pools["decode"].replicas > 1
    for _ in range(29):
        assert world.turn(traffic(20.0)).pools == up.pools, "within the hold nothing is gone"
    down = world.settle(traffic(20.0), hours=0.1)
    assert down.pools["prefill"].replicas < up.pools["prefill"].replicas
    nearly = world.settle(traffic(55.0), hours=0.1).pools["prefill"].replicas
    assert [world.turn(traffic(45.0)).pools["prefill"].replicas for _ in range(90)] == [nearly] * 90, (
        "a small step waits"
    )


def test_turns_that_are_far_apart_take_away_too() -> None:
    """A busy machine's turns were seconds apart at a hold of two: of the whole hold nothing was ever known."""
    world = World(rules(hold_seconds=900.0))
    up = world.turn(traffic(100.0)).pools["prefill"].replicas
    sizes = [world.turn(traffic(20.0), seconds=400.0).pools["prefill"].replicas for _ in range(6)]
    assert sizes[0] == up
    assert sizes[-1] < up


def test_what_is_ahead_is_made_ready_for() -> None:
    now, ahead = World(rules()), World(rules())
    assert ahead.turn(traffic(20.0), peak=100.0).pools == now.turn(traffic(100.0)).pools


def test_case_55_a_backlog_counts_though_no_more_arrives_and_is_served_in_time() -> None:
    world = World(rules())
    quiet = world.turn(traffic(5.0))
    piled = world.turn(traffic(5.0, queued=3000, queued_tokens=6_000_000))
    assert piled.pools["prefill"].replicas > quiet.pools["prefill"].replicas
    assert "worker-seconds of prompts wait" in piled.needs.reason


def test_kv_that_is_nearly_full_asks_for_decode_workers_whatever_the_model_says() -> None:
    world = World(rules(), {"decode": Size(3), "prefill": Size(3)})
    world.seen["decode"] = {"kv_used": 0.99}
    assert world.turn(traffic(1.0)).needs.workers["decode"] > 3


def test_what_requests_got_corrects_the_model_a_step_at_a_time_and_not_where_no_size_would_help() -> None:
    world = World(rules(), {"decode": Size(8), "prefill": Size(8)})
    bad = traffic(100.0, attainment=0.5, missed_ttft=0.5)
    for _ in range(40):
        world.turn(bad)
    assert 1.4 < world.memory.boost["prefill"] <= 1.5
    assert "decode" not in world.memory.boost
    hopeless = replace(world.rules, target=replace(world.rules.target, ttft_seconds=1e-3))
    world = World(hopeless, {"decode": Size(8), "prefill": Size(8)})
    decision = world.turn(bad)
    assert decision.needs.unreachable
    assert decision.notes[0].startswith("no size meets the targets: ")
    sizes = [world.settle(bad, hours=0.5).pools for _ in range(2)]
    assert sizes[0] == sizes[1], "what cannot be met is said, and not scaled for"
    assert not world.memory.boost


def test_a_burst_that_made_requests_late_is_no_fault_of_the_model() -> None:
    """It missed the targets of one window, and a tenth more workers were kept for most of a day."""
    world = World(rules(), {"decode": Size(8), "prefill": Size(8)})
    for late in (0.0, 0.3, 0.3, 0.3, 0.3, 0.0, 0.0):
        world.turn(traffic(100.0, attainment=1 - late, missed_ttft=late))
    assert not world.memory.boost


def test_what_a_day_missed_is_made_up_for_by_more_and_forgotten() -> None:
    world = World(rules(), {"decode": Size(8), "prefill": Size(8)})
    kept = world.settle(traffic(100.0), hours=1.0).needs
    missed = world.settle(traffic(100.0, attainment=0.985, missed_ttft=0.015), hours=6.0).needs
    assert kept.workers["prefill"] * 1.1 < missed.workers["prefill"] <= math.ceil(kept.workers["prefill"] * 1.5)
    assert kept.workers["decode"] == missed.workers["decode"], "no answer was slow"
    assert "by what requests got" in missed.reason
    assert world.settle(traffic(100.0), hours=120.0).needs.workers == kept.workers


def test_who_is_refused_has_the_role_boosted_that_has_the_least_to_spare() -> None:
    """Whoever is refused misses neither target: it always was decode."""
    world = World(rules(), {"decode": Size(12), "prefill": Size(5)})
    world.settle(traffic(100.0, attainment=0.7), hours=0.1)
    assert world.memory.boost.keys() == {"prefill"}


def test_gpus_of_a_pool_that_is_none_any_more_count_as_long_as_its_workers_hold_them() -> None:
    world = World(rules(budget_gpus=10), {"decode": Size(2), "prefill": Size(2)})
    inputs = replace(world.inputs(traffic(100.0)), other_gpus=5)
    assert sum(size.replicas for size in decide(inputs).pools.values()) == 5
    assert sum(size.replicas for size in decide(replace(inputs, other_gpus=0)).pools.values()) == 8


def test_while_a_router_is_cut_off_from_redis_no_worker_goes_for_what_it_does_not_say() -> None:
    """Half of the load was not heard of for longer than sizes are held, and half of the workers went."""
    world = World(rules(), {"decode": Size(8), "prefill": Size(8)})
    world.settle(traffic(100.0), hours=2.0)
    before = dict(world.sizes)
    decision = world.settle(traffic(50.0, unheard=1), hours=0.9)
    assert decision.pools == before
    assert decision.notes == ("routers that are silent with requests in flight: 1; nothing is taken away",)
    assert world.settle(traffic(50.0), hours=2.0).pools != before


def test_a_worker_that_fails_to_start_serves_nobody_so_that_one_flips_in_its_place() -> None:
    """It counted as one of those that are needed, for as long as it failed."""
    world = World(rules(), {"decode": Size(6), "prefill": Size(4)})
    world.settle(traffic(75.0), hours=0.2)
    needed = int(world.history[-1].needs.workers["prefill"])
    world.sizes = {"decode": Size(6), "prefill": Size(needed)}
    assert world.turn(traffic(75.0)).kind == "hold"
    world.seen["prefill"] = {"ready": needed - 1, "starting": 1, "failing": 1}
    decision = world.turn(traffic(75.0))
    assert (decision.kind, decision.pools["decode"].lent) == ("flip", 1)
    none_to_flip = World(rules(), {"decode": Size(1), "prefill": Size(needed)}, memory=world.memory)
    none_to_flip.seen["prefill"] = world.seen["prefill"]
    decision = none_to_flip.turn(traffic(75.0))
    assert decision.pools["prefill"] == Size(needed), "more of what fails is no help"
    assert any("1 of prefill fail to start" in note for note in decision.notes)


def test_nodes_that_are_taken_away_are_on_record() -> None:
    world = World(rules(), {"decode": Size(3), "prefill": Size(2)})
    world.seen["decode"] = {"ready": 2, "leaving": 1, "evicted": 1}
    notes = world.turn(traffic(1.0)).notes
    assert notes == ("decode: 1 of its workers drain, for their nodes are taken away; as many start elsewhere",)


def test_a_worker_flips_before_one_is_added() -> None:
    world = World(rules(), {"decode": Size(6), "prefill": Size(2)})
    world.settle(traffic(40.0, input_tokens=500.0), hours=0.2)
    decision = world.turn(traffic(40.0, input_tokens=4000.0, output_tokens=20.0))
    assert decision.kind == "flip"
    assert decision.pools["decode"].replicas == 6
    assert decision.pools["decode"].lent > 0
    assert decision.pools["prefill"] == Size(2)
    assert any(other.what == "prefill one more" for other in decision.alternatives)


def test_where_nothing_comes_nobody_would_miss_targets_instead() -> None:
    """On a cluster whose load had ended each size was said to give queues without end."""
    decision = World(rules()).turn(traffic(0.0))
    assert decision.alternatives
    assert {other.attainment for other in decision.alternatives} == {1.0}


def test_a_flip_is_worth_what_its_layout_gives() -> None:
    """Decode workers of one rank lent to prefill workers of two: two of them for each that is short."""
    wide = World(rules(prefill_tp=2), {"decode": Size(9), "prefill": Size(1)})
    fast = replace(
        wide.pool("prefill").worker, cost=replace(wide.pool("prefill").worker.cost, prefill_token_seconds=1e-5)
    )
    wide.seen["prefill"] = {"worker": fast}
    load = traffic(60.0, output_tokens=20.0)
    wide.settle(replace(load, per_second=1.0), hours=0.2)
    decision = wide.turn(load)
    assert decision.kind == "flip"
    missing = decision.needs.workers["prefill"] - 1
    assert decision.pools["decode"].lent >= 1.5 * missing


def test_lent_workers_come_back_before_new_ones_start() -> None:
    world = World(rules(), {"decode": Size(5, 3), "prefill": Size(2)})
    world.settle(traffic(30.0, input_tokens=300.0, output_tokens=100.0), hours=0.2)
    decision = world.turn(traffic(120.0, input_tokens=300.0, output_tokens=600.0))
    assert decision.pools["decode"].lent < 3
    assert decision.pools["decode"].replicas == 5 or decision.pools["decode"].lent == 0


def test_where_nothing_is_known_nothing_is_taken_away() -> None:
    world = World(rules(), {"decode": Size(9), "prefill": Size(9)})
    for _ in range(50):
        assert world.turn(Traffic(), seconds=600.0).pools == {"decode": Size(9), "prefill": Size(9)}
    for _ in range(50):
        assert world.turn(traffic(1.0), seconds=600.0, trusted=False).pools == {"decode": Size(9), "prefill": Size(9)}
    assert "nothing is known" in world.history[0].reason


def test_to_zero_after_a_long_silence_and_from_zero_by_a_request_that_waits() -> None:
    world = World(rules(), {"decode": Size(2), "prefill": Size(1)})
    silence = Traffic(1, 0.0, 2000.0, 250.0, idle_seconds=899.0)
    assert world.turn(silence).pools["prefill"].replicas == 1
    zero = world.turn(replace(silence, idle_seconds=901.0))
    assert zero.pools == {"decode": Size(0), "prefill": Size(0)}
    assert world.turn(replace(silence, idle_seconds=5000.0)).kind == "hold"
    waits = replace(silence, idle_seconds=0.0, queued=1, queued_tokens=2000)
    assert world.turn(waits).pools == {"decode": Size(1), "prefill": Size(1)}


def test_least_keeps_a_pool_from_zero() -> None:
    world = World(rules(least=1), {"decode": Size(3), "prefill": Size(3)})
    assert world.turn(Traffic(1, idle_seconds=9999.0)).pools == {"decode": Size(1), "prefill": Size(1)}


def test_who_finds_no_room_is_given_up_and_others_make_do() -> None:
    world = World(rules(), {"decode": Size(2), "prefill": Size(2)})
    world.settle(traffic(20.0), hours=0.2)
    before = world.sizes["prefill"].replicas
    world.stuck["prefill"] = world.now
    world.turn(traffic(100.0))
    wanted = world.sizes["prefill"].replicas
    assert wanted > before
    for _ in range(5):
        last = world.turn(traffic(100.0))
    assert last.kind.startswith("rollback") or "rollback" in [one.kind for one in world.history[-3:]]
    assert world.sizes["prefill"].replicas == before
    assert any("tried again in" in note for note in world.turn(traffic(100.0)).notes)
    asked = [one.pools["prefill"].replicas > before for one in (world.turn(traffic(100.0)) for _ in range(60))]
    assert any(asked), "after a while it is tried again"
    assert sum(asked) < 30, "and for longer and longer it is not"


def test_standbys_are_kept_beyond_what_is_needed_and_are_the_first_to_flip() -> None:
    world = World(rules(standby_workers=2), {"decode": Size(1), "prefill": Size(1)})
    world.settle(traffic(20.0, output_tokens=20.0), hours=0.2)
    plain = World(rules()).turn(traffic(20.0, output_tokens=20.0))
    assert world.sizes["decode"].replicas == plain.pools["decode"].replicas + 2
    decision = world.turn(traffic(60.0, output_tokens=20.0))
    assert decision.pools["decode"].lent > 0


def test_case_a_budget_that_is_too_small_for_both_roles_is_shared_out() -> None:
    """One was met in full and the other had what was left: ten that prefill for two that decode, of ten and six."""
    world = World(rules(budget_gpus=12, least=1), {"decode": Size(2), "prefill": Size(3)})
    needed = world.turn(traffic(200.0)).needs
    parts = [world.sizes[name].replicas / number for name, number in needed.workers.items()]
    assert sum(size.replicas for size in world.sizes.values()) == 12
    assert min(parts) > 0.65


def test_external_sizes_are_advised_and_roles_flipped() -> None:
    world = World(rules(mode="external"), {"decode": Size(6), "prefill": Size(2)})
    world.settle(traffic(40.0, input_tokens=500.0), hours=0.2)
    decision = world.turn(traffic(400.0, input_tokens=4000.0))
    assert [size.replicas for size in decision.pools.values()] == [6, 2]
    assert decision.advised["prefill"].replicas > 2


@pytest.mark.parametrize("silent", [Traffic(), traffic(1.0, unheard=1)], ids=["all routers", "one of them"])
def test_pods_that_start_again_while_routers_are_silent_are_still_advised(silent: Traffic) -> None:
    """An HPA follows advice: it was what is there, so that each pod that was away for long was taken away for good."""
    world = World(rules(mode="external", hold_seconds=60.0), {"decode": Size(5), "prefill": Size(3)})
    before = {name: size.replicas for name, size in world.settle(traffic(250.0), hours=0.1).advised.items()}
    assert min(before.values()) > 2
    world.sizes = {"decode": Size(2), "prefill": Size(1)}
    for _ in range(40):
        assert {name: size.replicas for name, size in world.turn(silent).advised.items()} == before
    known = world.settle(traffic(1.0), hours=0.1)
    assert known.advised["decode"].replicas <= 2, "until it is known for a hold that few come"


def test_case_what_is_advised_does_not_follow_a_pod_that_starts_again() -> None:
    """It was counted from the pods that were there: while one was away, an HPA was told of a smaller pool though more had
    been needed within the hold, and pools that had just grown went down again with chance."""
    world = World(rules(mode="external", most=64), {"decode": Size(8), "prefill": Size(8)})
    before = world.settle(traffic(150.0), hours=0.5).advised["decode"].replicas
    world.sizes["decode"] = Size(before)
    grown = world.turn(traffic(170.0)).advised["decode"].replicas
    assert grown > before
    for number in range(20):
        world.sizes["decode"] = Size(grown - number % 3)
        assert world.turn(traffic(120.0)).advised["decode"].replicas == grown
    world.sizes["decode"] = Size(20)
    assert world.turn(traffic(120.0)).advised["decode"].replicas == grown, "nor one that others added"


def test_what_was_recorded_is_decided_again_the_same() -> None:
    world = World(rules(budget_gpus=7))
    for rate in (10.0, 80.0, 30.0):
        world.now += 30
        inputs = world.inputs(traffic(rate))
        record = Recorded(1, inputs, decide(inputs))
        read = codec.decode(Recorded, json.loads(json.dumps(codec.encode(record))))
        assert read == record
        assert decide(read.inputs) == record.decision


def test_constant_load_changes_nothing_twice() -> None:
    """Rates that wobble around a size's border by chance: at most two changes within any hour."""
    world = World(rules(most=64))
    wobble = [1.0, 0.97, 1.03, 1.0, 1.05, 0.95, 1.01, 0.99, 1.02]
    changed = []
    for turn in range(6 * 30):
        before = dict(world.sizes)
        world.turn(traffic(150.0 * wobble[turn * 7 % len(wobble)]), seconds=120.0)
        if world.sizes != before:
            changed.append(turn)
    later = [turn for turn in changed if turn > 30]
    assert all(later[at + 2] - later[at] >= 30 for at in range(len(later) - 2))


LOADS = st.lists(
    st.tuples(
        st.sampled_from([0.0, 5.0, 40.0, 90.0, 300.0]),
        st.sampled_from([200.0, 2000.0, 8000.0]),
        st.sampled_from([10.0, 250.0, 1500.0]),
        st.sampled_from([30.0, 600.0, 3600.0]),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=20)
@given(loads=LOADS, budget=st.integers(4, 14), prefill_tp=st.integers(1, 2), stuck=st.booleans())
def test_the_budget_holds_at_every_moment_with_those_that_leave(
    loads: list[tuple[float, float, float, float]], budget: int, prefill_tp: int, stuck: bool
) -> None:
    """Workers that leave hold their GPUs for a turn longer, and those that come take theirs at once."""
    world = World(rules(budget_gpus=budget, least=1, prefill_tp=prefill_tp, hold_seconds=120.0))
    if stuck:
        world.stuck["decode"] = world.now
        world.ready["decode"] = 1
    for rate, inputs, outputs, seconds in loads:
        before = {name: world.sizes[name].replicas for name in world.sizes}
        world.turn(traffic(rate, input_tokens=inputs, output_tokens=outputs), seconds=seconds)
        held = sum(
            max(before[name], size.replicas) * world.rules.pools[name].gpus for name, size in world.sizes.items()
        )
        assert held <= budget
        for name, size in world.sizes.items():
            assert 0 <= size.lent <= size.replicas <= world.rules.pools[name].most
        decoding = world.sizes["decode"].replicas - world.sizes["decode"].lent + world.sizes["prefill"].lent
        assert decoding >= 1 or stuck


def test_a_decision_says_its_reason_in_numbers() -> None:
    world = World(rules(most=2))
    decision: Decision = world.turn(traffic(400.0))
    assert any("may have at most 2" in note for note in decision.notes)
    inputs: Inputs = world.inputs(traffic(400.0))
    assert "requests/s" in decide(inputs).reason


def test_the_only_worker_that_serves_is_not_lent_while_its_pool_still_starts() -> None:
    """Three of four decode workers start: by what is to be there were three to lend, and the one that served went."""
    world = World(rules(), {"decode": Size(4), "prefill": Size(2)})
    load = traffic(40.0, input_tokens=500.0, output_tokens=20.0)
    world.settle(replace(load, per_second=1.0), hours=0.2)
    world.sizes = {"decode": Size(4), "prefill": Size(2)}
    world.seen["decode"] = {"ready": 1, "starting": 3}
    decision = world.turn(replace(load, input_tokens=6000.0))
    assert decision.needs.workers["decode"] == 1
    assert decision.needs.workers["prefill"] > 2
    assert decision.pools["decode"].lent == 0
    assert decision.pools["prefill"].replicas > 2


def test_who_serves_is_not_given_up_for_who_found_no_room() -> None:
    """An operator took back the third worker, which found no room, before it was given up: two were wanted, and served."""
    world = World(rules(), {"decode": Size(2), "prefill": Size(1)})
    world.seen["decode"] = {"ready": 2, "pending": 1, "pending_seconds": 500.0}
    assert world.turn(Traffic()).pools["decode"] == Size(2)
    assert world.turn(traffic(5.0)).pools["decode"] == Size(2)


def test_a_budget_that_was_made_smaller_is_kept_though_the_load_needs_more() -> None:
    world = World(rules(), {"decode": Size(8), "prefill": Size(8)})
    world.settle(traffic(200.0), hours=0.2)
    assert sum(size.replicas for size in world.sizes.values()) > 10
    world.rules = replace(world.rules, budget_gpus=10)
    decision = world.turn(traffic(200.0))
    assert sum(size.replicas for size in decision.pools.values()) == 10
    assert min(size.replicas for size in decision.pools.values()) >= 1
    assert "for the budget of 10 GPUs" in decision.reason
    assert world.turn(traffic(200.0)).pools == decision.pools
    untrusted = World(replace(world.rules, budget_gpus=4), {"decode": Size(8), "prefill": Size(8)})
    assert untrusted.turn(traffic(200.0), trusted=False).pools["decode"] == Size(8)


def test_who_leaves_by_itself_is_not_taken_away_a_second_time() -> None:
    """A spot notice had one of four leave when three were needed: another, sound one was drained, and two were left."""
    world = World(rules(), {"decode": Size(4), "prefill": Size(4)})
    load = traffic(10.0, output_tokens=20.0)
    one = world.settle(load, hours=0.1).needs.workers
    world.sizes = {"decode": Size(int(one["decode"]) + 1), "prefill": Size(int(one["prefill"]) + 1)}
    world.seen["decode"] = {"ready": int(one["decode"]), "leaving": 1}
    assert world.settle(load, hours=0.5).pools["decode"].replicas == one["decode"] + 1
    assert world.sizes["prefill"].replicas == one["prefill"], "where nobody leaves it is"
    del world.seen["decode"]
    assert world.settle(load, hours=0.1).pools["decode"].replicas == one["decode"]
