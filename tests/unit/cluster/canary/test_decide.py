"""What becomes of a canary."""

from dataclasses import replace

import pytest

from cluster.canary.decide import Seen, split_of, turn, with_canary
from cluster.canary.evidence import decode_evidence, decode_sides, encode_evidence
from cluster.canary.judge import judge
from cluster.canary.values import Evidence, Phase, written
from cluster.lifecycle import Desired, DesiredPool
from cluster.lifecycle import Phase as WorkerPhase
from headrace.config import PoolConfig
from headrace.revisions import Split
from headrace.values import Role
from tests.unit.cluster.canary.world import CANARY, ITS, LIVE, OWN, counted, seen, worker

STARTING = replace(LIVE, phase=Phase.STARTING, shared_since=None)
DESIRED = Desired({"decode": DesiredPool(Role.DECODE, 2)})


def split(its: Seen) -> Split:
    return replace(split_of(its, turn(its).state), beat=0)


def test_it_gets_its_share_once_all_its_workers_are_ready() -> None:
    waits = seen(state=STARTING, workers=(*OWN, replace(CANARY, phase=WorkerPhase.STARTING)))
    assert turn(waits).state.phase is Phase.STARTING
    assert split(waits) == Split(1, "stable", "v2", 0.0)
    its = seen(state=STARTING)
    after = turn(its)
    assert (after.state.phase, after.state.shared_since) == (Phase.LIVE, its.now)
    assert [(event.before, event.state.phase) for event in after.events] == [("starting", Phase.LIVE)]
    assert split(its) == Split(1, "stable", "v2", 50.0)


def test_one_that_is_worse_is_rolled_back_with_its_numbers() -> None:
    its = seen(counted(2000), counted(300, ttft=0.5, seed=1))
    after = turn(its)
    assert after.state.phase is Phase.ROLLED_BACK
    assert after.state.reason.startswith("worse than stable: TTFT at the median 5")
    assert "times as long, 1.25 is allowed" in after.state.reason
    (event,) = after.events
    assert event.judgement is not None
    sides = decode_sides(event.counts)
    assert judge(ITS, sides["stable"], sides["v2"], 0) == event.judgement, "it can be judged again from its record"
    assert split(its) == Split(1, "stable", "v2", 0.0)


def test_one_that_is_as_good_stays_and_is_good_after_its_time() -> None:
    its = seen(counted(2000), counted(300, seed=1))
    after = turn(its)
    assert (after.state, after.events, after.evidence.look) == (LIVE, (), 1)
    assert turn(replace(its, evidence=after.evidence)).evidence.look == 1, "nothing new: no look"
    late = replace(its, now=ITS.good_after_seconds)
    after = turn(late)
    assert after.state.phase is Phase.GOOD
    assert "6 comparisons are shown no worse; not decided by 300 requests:" in after.state.reason
    assert split(late).percent == 50.0
    worse = seen(counted(2000), counted(300, failed=100), after.state)
    assert turn(worse).state.phase is Phase.ROLLED_BACK, "a good one is watched on"


def test_without_requests_it_is_never_good() -> None:
    assert turn(seen(counted(2000), counted(99), now=10 * ITS.good_after_seconds)).state == LIVE


@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.LIVE, Phase.GOOD, Phase.PROMOTING])
def test_workers_that_fail_again_and_again_end_it_at_once(phase: Phase) -> None:
    state = replace(LIVE, phase=phase, failures=1)
    its = seen(state=state, deaths=["canary-0: out of memory"], workers=OWN)
    assert turn(its).state.phase is phase
    its = seen(state=turn(its).state, deaths=["canary-0: out of memory"], workers=OWN)
    after = turn(its)
    assert after.state.phase is Phase.ROLLED_BACK
    assert after.state.reason == "its workers failed 3 times: canary-0: out of memory"
    assert split(its) == Split(1, "stable", "", 0.0), "none is left: nobody need be told apart"


def test_one_that_never_becomes_ready_is_not_waited_for() -> None:
    starting = replace(CANARY, phase=WorkerPhase.STARTING)
    late = seen(state=STARTING, workers=(*OWN, starting), now=ITS.start_seconds + 1)
    assert "canary has 0 of 1" in turn(late).state.reason
    no_room = replace(starting, pending=True, reason="waits for 1 GPU")
    after = turn(seen(state=STARTING, workers=(*OWN, no_room), worker_now=121.0))
    assert after.state.phase is Phase.ROLLED_BACK
    assert after.state.reason == "canary-0 found no room in the cluster for 120 s: waits for 1 GPU"


def test_another_share_begins_another_window() -> None:
    its = seen(counted(2000), counted(300, seed=1), replace(LIVE, percent=60.0))
    its = replace(its, evidence=replace(its.evidence, percent=50.0, look=3))
    after = turn(its)
    assert (after.evidence.sides, after.evidence.percent, after.evidence.look) == ({}, 60.0, 3)


def test_over_is_over() -> None:
    for phase in (Phase.ROLLED_BACK, Phase.ABORTED, Phase.PROMOTED):
        state = replace(LIVE, phase=phase)
        assert turn(seen(counted(2000), counted(300, failed=300), state)).state == state


def test_promotion_is_done_when_every_worker_is_new_and_the_share_follows_them() -> None:
    state = replace(LIVE, phase=Phase.PROMOTING)
    half = seen(state=state, workers=(worker("decode", 0, "v2"), OWN[1], CANARY))
    assert turn(half).state == state
    assert split(replace(half, state=replace(state, percent=5.0))).percent == 50.0
    leaving = seen(state=state, workers=(worker("decode", 0, "v2"), CANARY))
    assert turn(leaving).state == state, "one is just being replaced"
    whole = seen(state=state, workers=(worker("decode", 0, "v2"), worker("decode", 1, "v2"), CANARY))
    assert turn(whole).state.phase is Phase.PROMOTED
    assert split(whole) == Split(1, "v2", "", 0.0)


def test_its_pools_are_wanted_while_it_is_under_way_and_as_far_as_the_budget_goes() -> None:
    wanted = with_canary(DESIRED, LIVE, None)
    assert wanted.pools["canary"] == DesiredPool(Role.DECODE, 1, revision="v2")
    assert wanted.pools["decode"] == DESIRED.pools["decode"]
    assert with_canary(DESIRED, LIVE, 0).pools["canary"].replicas == 0
    two = ITS.model_copy(
        update={"pools": {"a": PoolConfig(role="decode", tp=2), "b": PoolConfig(role="prefill", tp=2)}}
    )
    sizes = with_canary(DESIRED, replace(LIVE, settings=written(two)), 3).pools
    assert (sizes["a"].replicas, sizes["b"].replicas) == (1, 0)
    assert "canary" not in with_canary(DESIRED, replace(LIVE, phase=Phase.ROLLED_BACK), None).pools
    taken = Desired({"canary": DesiredPool(Role.DECODE, 2)})
    assert with_canary(taken, LIVE, None).pools["canary"].replicas == 2


def test_what_was_promoted_is_what_the_clusters_own_pools_are_to_be() -> None:
    for phase in (Phase.PROMOTING, Phase.PROMOTED):
        assert with_canary(DESIRED, replace(LIVE, phase=phase), None).pools["decode"].revision == "v2"
    assert with_canary(DESIRED, replace(LIVE, phase=Phase.ABORTED), None).pools["decode"].revision == "stable"


def test_evidence_survives_its_encoding_and_foreign_text_is_none() -> None:
    evidence = Evidence(3, 1.5, 5.0, {"v2": counted(20, failed=2)}, {"r": {"v2": counted(9)}}, 2, 100)
    assert decode_evidence(encode_evidence(evidence).encode()) == evidence
    for raw in (None, b"", b"[]", b"{}", b"[1,2,3,4,5,6,7]", b'["1",0,0,0,0,{},{}]', b"[" * 100_000):
        assert decode_evidence(raw) is None
