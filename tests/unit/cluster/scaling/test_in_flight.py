"""What decodes keeps its workers' successors room: in rows, KV and TPOT, wherever its sequences finish."""

import json
from dataclasses import replace

import pytest

from cluster.lifecycle import Desired, DesiredPool, Phase
from cluster.scaling.decide import decide
from cluster.scaling.in_flight import in_flight
from cluster.scaling.observe import Member, observe
from cluster.scaling.values import Decoding, Inputs, PoolRules, Recorded, Size
from headrace.values import Role
from router.decisions import codec
from tests.unit.cluster.scaling.world import ONE, WORKER, World, rules, traffic

FEW = traffic(2.0)  # by the answers that ended, which are short: one worker of each role would do
ROWS = Decoding(1600, 1_600_000, 1.0)  # 256 rows of each
KV = Decoding(400, 400_000, 5.4)
TPOT = Decoding(
    1000, 6_000_000, 2.0
)  # 10 µs and 30 ns a token each: 190 ms of steps, of which 40 ms fit beside the base


@pytest.mark.parametrize(
    ("decoding", "kept", "why"),
    [
        (ROWS, 7, "90% of their rows of 6.9 workers"),
        (KV, 6, "90% of their KV of 6.0 workers"),
        (TPOT, 5, "of TPOT 0.05 s"),
    ],
    ids=["rows", "KV", "TPOT"],
)
def test_a_pool_whose_sequences_still_decode_is_not_shrunk_below_what_as_many_again_would_need(
    decoding: Decoding, kept: int, why: str
) -> None:
    """Only arrivals and waiting prompts were looked at: eight workers full of long answers became one."""
    world = World(rules(), {"decode": Size(8), "prefill": Size(2)})
    world.seen["decode"] = {"decoding": decoding}
    decision = world.settle(FEW, hours=0.5)
    assert decision.pools == {"decode": Size(kept), "prefill": Size(1)}
    assert decision.needs.workers["decode"] == 1
    (note,) = decision.notes
    assert note.startswith(f"decode: {kept - 1} fewer would do for what comes, 0 for what runs: ")
    assert why in note
    (fewer,) = (other.why_not for other in decision.alternatives if other.what == "decode one fewer")
    assert why in fewer
    world.seen["decode"] = {"decoding": replace(decoding, sequences=0, context_tokens=0, kv_workers=0.0)}
    assert world.turn(FEW).pools["decode"] == Size(1), "once they have ended, at once: the hold is over"


def test_what_decodes_brings_no_worker_by_itself_and_is_decided_again_the_same() -> None:
    world = World(rules(), {"decode": Size(2), "prefill": Size(1)})
    world.seen["decode"] = {"decoding": TPOT}
    assert world.settle(FEW, hours=0.5).pools == {"decode": Size(2), "prefill": Size(1)}
    inputs = world.inputs(FEW)
    record = Recorded(1, inputs, decide(inputs))
    read = codec.decode(Recorded, json.loads(json.dumps(codec.encode(record))))
    assert read == record
    assert decide(read.inputs) == record.decision


def test_a_worker_whose_sequences_decode_is_not_lent_either() -> None:
    """It finishes what it has, but what follows decodes beside all others': a prefill worker more starts instead."""
    prompts = traffic(40.0, input_tokens=4000.0, output_tokens=20.0)
    kinds = []
    for decoding in (Decoding(), ROWS):
        world = World(rules(), {"decode": Size(7), "prefill": Size(2)})
        world.seen["decode"] = {"decoding": decoding}
        world.settle(replace(prompts, per_second=5.0, input_tokens=500.0), hours=0.14)
        world.sizes = {"decode": Size(7), "prefill": Size(2)}
        kinds.append(world.turn(prompts).kind)
    assert kinds == ["flip", "grow"]


def test_where_workers_do_both_their_prompts_take_a_part_of_the_time() -> None:
    pools = {"all": PoolRules(Role.UNIFIED, ONE, 0, 16)}
    world = World(replace(rules(), pools=pools), {"all": Size(8)})
    world.seen["all"] = {"decoding": TPOT}
    alone = in_flight(world.inputs(traffic(0.0)))["unified"].workers
    beside = in_flight(world.inputs(traffic(50.0)))["unified"].workers
    assert alone == pytest.approx(4.75)  # (1000 × 10 µs + 6 M × 30 ns) ÷ (45 − 5 ms)
    prompts = 50 * WORKER.cost.prefill_seconds(2000, 0)
    assert beside == pytest.approx(alone + 0.045 * prompts / 0.040)


def test_what_finishes_on_workers_that_leave_or_were_lent_counts() -> None:
    """Each that was taken away took its sequences out of sight, so that the next one seemed to spare too."""

    def decoding(role: Role, phase: Phase, number: int, used: int = 50) -> Member:
        its = Member("decode", role, phase, 100.0, speed=WORKER, used_blocks=used, num_blocks=100)
        return replace(its, num_sequences=number, context_tokens=5000 * number)

    members = [
        decoding(Role.DECODE, Phase.READY, 10),  # of the blocks that are used four fifths are of prompts
        decoding(Role.DECODE, Phase.DRAINING, 20, used=15),  # a quarter is shared
        decoding(Role.PREFILL, Phase.READY, 5),
        decoding(Role.DECODE, Phase.DEAD, 99),
        Member("prefill", Role.PREFILL, Phase.READY, 100.0, speed=WORKER, used_blocks=50, num_blocks=100),
    ]
    desired = Desired({name: DesiredPool(Role(name), 2) for name in ("decode", "prefill")})
    seen = observe(rules(), desired, members, {})
    assert seen["decode"].decoding == Decoding(35, 175_000, 0.1 + 0.15 + 0.05)
    assert seen["prefill"].decoding == Decoding()
    assert in_flight(Inputs(0.0, rules(), seen, FEW)).keys() == {"decode"}
