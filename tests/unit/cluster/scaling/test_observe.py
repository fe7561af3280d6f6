"""Many workers as one value a pool, and what they have not done yet priced by those who have."""

from dataclasses import replace

from cluster.lifecycle import Desired, DesiredPool, Phase
from cluster.planning.load import Worker
from cluster.scaling.decide import decide
from cluster.scaling.observe import Member, observe
from cluster.scaling.values import Inputs, Size
from headrace.costmodel import CostModel
from headrace.values import ParallelLayout, Role
from tests.unit.cluster.scaling.world import WORKER, rules, traffic

RULES = rules(prefill_tp=2)
DESIRED = Desired(
    {"prefill": DesiredPool(Role.PREFILL, 1, ParallelLayout(2)), "decode": DesiredPool(Role.DECODE, 4, lent=1)}
)
GUESS = CostModel()


def ready(pool: str, role: Role, cost: CostModel, seconds: float = 100.0, **fields: object) -> Member:
    return Member(pool, role, Phase.READY, seconds, speed=replace(WORKER, cost=cost), **fields)  # type: ignore[arg-type]


def test_counts_are_by_phase_and_role() -> None:
    members = [
        ready("decode", Role.DECODE, WORKER.cost, used_blocks=60, num_blocks=100),
        ready("decode", Role.DECODE, WORKER.cost, 10.0, used_blocks=20, num_blocks=100),
        ready("decode", Role.PREFILL, WORKER.cost, waiting_tokens=500),
        Member("decode", Role.DECODE, Phase.STARTING, 5.0),
        Member("decode", Role.DECODE, Phase.STARTING, 70.0, pending=True),
        Member("decode", Role.DECODE, Phase.DRAINING, 5.0),
        Member("decode", Role.DECODE, Phase.DEAD, 5.0),
        Member("gone", Role.DECODE, Phase.READY, 5.0),
    ]
    seen = observe(RULES, DESIRED, members, {})
    pool = seen["decode"]
    assert pool.desired == Size(4, 1)
    assert (pool.ready, pool.ready_lent, pool.warming, pool.starting, pool.pending, pool.leaving) == (3, 1, 1, 1, 1, 1)
    assert (pool.pending_seconds, pool.kv_used, pool.waiting_tokens) == (70.0, 0.4, 500)
    assert set(seen) == {"prefill", "decode"}


def test_workers_that_are_warming_up_say_nothing_of_speed() -> None:
    slow = replace(WORKER.cost, decode_base_seconds=9.0)
    members = [ready("decode", Role.DECODE, slow, 10.0) for _ in range(9)] + [ready("decode", Role.DECODE, WORKER.cost)]
    assert observe(RULES, DESIRED, members, {})["decode"].worker.cost.decode_base_seconds == 5e-3


def test_what_a_pool_never_did_is_priced_by_the_other_and_by_its_ranks() -> None:
    prefilled = replace(
        GUESS, prefill_base_seconds=1e-3, prefill_token_seconds=1e-5, prefill_token_context_seconds=1e-10
    )
    decoded = replace(GUESS, decode_base_seconds=4e-3, decode_sequence_seconds=2e-5, decode_context_token_seconds=1e-8)
    seen = observe(
        RULES, DESIRED, [ready("prefill", Role.PREFILL, prefilled), ready("decode", Role.DECODE, decoded)], {}
    )
    assert seen["decode"].worker.cost.prefill_token_seconds == 2e-5, "half the ranks"
    assert seen["decode"].worker.cost.decode_base_seconds == 4e-3
    assert seen["prefill"].worker.cost.decode_base_seconds == 2e-3


def test_a_pool_without_workers_is_what_it_last_was_or_as_the_others_are() -> None:
    before = Worker(replace(WORKER.cost, decode_base_seconds=7e-3), 1000.0)
    assert observe(RULES, DESIRED, [], {"decode": before})["decode"].worker == before
    members = [ready("prefill", Role.PREFILL, WORKER.cost)]
    assert observe(RULES, DESIRED, members, {})["decode"].worker.cost.decode_base_seconds == 1e-2


def test_a_fit_that_puts_all_of_a_step_on_its_sequences_can_be_sized_for() -> None:
    """As a real worker's did: its base was 0, and sizing divides by it."""
    flat = replace(WORKER.cost, decode_base_seconds=0.0, prefill_base_seconds=0.0)
    seen = observe(RULES, DESIRED, [ready("decode", Role.DECODE, flat), ready("prefill", Role.PREFILL, flat)], {})
    assert decide(Inputs(0.0, RULES, seen, traffic(5.0))).needs.workers["decode"] >= 1


def test_a_cluster_that_starts_buys_nothing_on_a_guess_of_how_fast_it_is() -> None:
    """Until steps were measured workers were taken for a laptop's: 59 were ordered where two suffice, and held."""
    load, one = (
        traffic(20.0, queued=100, queued_tokens=200_000, oldest_queued_seconds=5.0),
        DesiredPool(Role.PREFILL, 1),
    )
    desired = Desired({"prefill": one, "decode": replace(one, role=Role.DECODE)})
    begun = [ready("prefill", Role.PREFILL, GUESS), Member("decode", Role.DECODE, Phase.STARTING, 5.0)]
    for layouts in (rules(most=64), rules(most=64, prefill_tp=2), rules(most=64, standby_workers=0)):
        decision = decide(Inputs(1e6, layouts, observe(layouts, desired, begun, {}), load))
        assert decision.pools == {"prefill": Size(1), "decode": Size(1)}
        assert not decision.needs.unreachable
        assert "prefill: nobody has done it yet" in decision.reason
    prefilled = replace(GUESS, prefill_base_seconds=1e-3, prefill_token_seconds=1e-4)
    known = observe(RULES, desired, [ready("prefill", Role.PREFILL, prefilled), *begun[1:]], {})
    grown = decide(Inputs(1e6, rules(most=64), known, load)).pools
    assert grown["prefill"].replicas > 2, "what was measured is sized for"
    assert grown["decode"] == Size(1)
    standing_by = rules(most=64, standby_workers=2)
    three = Desired({**desired.pools, "decode": DesiredPool(Role.DECODE, 3)})
    assert decide(Inputs(1e6, standing_by, observe(standing_by, three, begun, {}), load)).pools["decode"] == Size(3)
    none = Desired({name: replace(pool, replicas=0) for name, pool in desired.pools.items()})
    assert decide(Inputs(1e6, rules(), observe(rules(), none, [], {}), load)).pools["decode"] == Size(1)
