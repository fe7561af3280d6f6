"""Whole runs: exact where a hand can compute them, equal for equal seeds, and nothing lost on the way."""

import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest

from cluster.simulation.fleet import Simulation
from cluster.simulation.policies import POLICIES
from cluster.simulation.results import Tally, summarise
from cluster.simulation.router import COUNT_EVERY_TOKENS, RouterLimits
from headrace import generators
from headrace.costmodel import CostModel
from headrace.errors import ConfigError, TransferFailed
from headrace.goodput import Slo
from headrace.traces import TraceRow
from headrace.values import Role, Ticket
from router.decisions.room import WORKER_BACKLOG
from router.decisions.tenants import NO_TARGETS, Targets
from tests.unit.cluster.simulation.small_fleet import CARD, MESSAGE, fleet, run, traffic
from workers.virtual.worker import VirtualWorker


def test_one_request_on_one_pair_takes_the_sum_of_its_terms() -> None:
    """Submit, ticket, announcement and answer are a message each; 100 tokens in one step, 7 blocks in one read, and 4
    steps for the tokens after the first."""
    _, tally = run(fleet(prefill=1, decode=1), [TraceRow(0, 1.0, 100, 5)])
    (served,) = tally.served
    prefill = 0.25 + 100 * 0.001 + 1e-6 * 100 * 50
    transfer = 0.0625 + 7 * 1000 / 1e6
    assert served.first_token_at == pytest.approx(1.0 + 4 * MESSAGE + prefill + transfer, abs=1e-9)
    steps = sum(0.125 + 0.01 + 1e-5 * context for context in (101, 102, 103, 104))
    assert served.ended_at == pytest.approx(served.first_token_at + steps, abs=1e-9)
    assert (served.outcome, served.num_generated) == ("finished", 5)


def test_chunks_are_read_while_the_next_one_computes() -> None:
    """256 tokens in two steps: the first one's blocks have come long before the second ends."""
    _, tally = run(fleet(prefill=1, decode=1), [TraceRow(0, 0.0, 256, 2)])
    (served,) = tally.served
    first = 0.25 + 128 * 0.001 + 1e-6 * 128 * 64
    second = 0.25 + 128 * 0.001 + 1e-6 * 128 * (128 + 64)
    last_read = 0.0625 + 8 * 1000 / 1e6
    assert served.first_token_at == pytest.approx(4 * MESSAGE + first + second + last_read, abs=1e-9)


def test_a_short_prompt_is_prefilled_where_it_decodes() -> None:
    _, tally = run(fleet(prefill=1, decode=1), [TraceRow(0, 0.0, 16, 2)])
    (served,) = tally.served
    prefill = 0.25 + 16 * 0.001 + 1e-6 * 16 * 8
    assert served.first_token_at == pytest.approx(2 * MESSAGE + prefill, abs=1e-9)


def test_a_prompt_that_came_before_is_found_by_the_index() -> None:
    """The second asks for the same 512 tokens long after the first's blocks were published."""
    rows = [TraceRow(0, 0.0, 600, 2, (7,)), TraceRow(1, 5.0, 600, 2, (7,))]
    _, tally = run(fleet(), rows)
    first, second = tally.served
    assert (first.cached_tokens, first.predicted_tokens) == (0, 0)
    assert (second.cached_tokens, second.predicted_tokens) == (512, 512)
    assert second.prefill == first.prefill


@pytest.mark.parametrize(("policy", "routers"), [*((policy, 1) for policy in POLICIES), ("ours", 3)])
def test_every_request_ends_once_and_every_block_comes_back(policy: str, routers: int) -> None:
    rows = traffic()
    simulation, tally = run(fleet(routers=routers), rows, policy)
    assert sorted(served.number for served in tally.served) == [row.number for row in rows]
    assert {served.outcome for served in tally.served} == {"finished"}
    assert all(served.num_generated == rows[served.number].output_tokens for served in tally.served)
    assert not any(router.num_in_flight for router in simulation.routers)
    for worker in simulation.workers.values():
        counts = worker.scheduler.counts()
        assert counts.free + counts.cached == counts.total
        assert worker.scheduler.load().num_running == worker.scheduler.load().num_waiting == 0
        worker.engine.ledger.audit()
        for router in simulation.routers:
            assert router.index.num_blocks(worker.worker_id) == counts.cached
            view = router.view().find(worker.worker_id)
            assert view is not None
            assert (view.load.num_running, view.load.num_waiting, view.load.waiting_prefill_tokens) == (0, 0, 0)


@pytest.mark.parametrize("told", [True, False])
def test_of_another_routers_placement_a_router_knows_what_it_is_told(told: bool) -> None:
    """The same prompt comes to the second while the first's is computed: nothing of it is published yet."""
    rows = [TraceRow(0, 0.0, 600, 2, (7,)), TraceRow(1, 0.1, 600, 2, (7,))]
    two = fleet(routers=2, told=told)
    tally = Tally(two.roles)
    Simulation(two, "ours", tally, keep_why=True).run(rows)
    first, second = sorted(tally.served, key=lambda served: served.number)
    held = {c.worker_id: c.cached_tokens for c in second.whys[0].candidates}
    assert held[first.prefill or ""] == (512 if told else 0)
    load = next(c for c in second.whys[0].candidates if c.worker_id == first.prefill)
    assert load.wait_seconds > 0, "what the worker reports of it is known in any case"


def test_overload_is_shed_and_what_is_accepted_is_answered() -> None:
    """A pool of few rows and blocks, a short queue: requests are refused, preempted and placed again, none is lost."""
    small = fleet(
        card=replace(CARD, num_blocks=60),
        max_num_seqs=4,
        max_waiting=10,
        prefill=1,
        router=RouterLimits(max_queue=4, local_prefill_max_tokens=16, message_seconds=MESSAGE),
    )
    rows = [TraceRow(n, n / 50, 40 + n * 37 % 400, 1 + n * 7 % 60) for n in range(120)]
    simulation, tally = run(small, rows)
    assert len(tally.served) == len({served.number for served in tally.served}) == 120
    outcomes = {served.outcome for served in tally.served}
    assert outcomes == {"finished", "shed: queue_full"}
    assert any(served.num_attempts > 1 for served in tally.served), "no ticket was ever refused"
    for worker in simulation.workers.values():
        counts = worker.scheduler.counts()
        assert counts.free + counts.cached == counts.total
        worker.engine.ledger.audit()


@pytest.mark.parametrize(("odd", "others", "rate"), [(2000, 200, 8.0), (200, 2000, 2.0)])
def test_one_long_prompt_among_endless_short_ones_and_the_reverse_meet_their_bound(
    odd: int, others: int, rate: float
) -> None:
    """More comes than one prefill worker computes. What stood before the odd one when it came, ten times its own tokens,
    what the worker has before it, and what runs: nothing that comes later makes it wait for more."""
    one = fleet(
        card=replace(CARD, num_blocks=4000),
        prefill=1,
        decode=1,
        max_num_seqs=64,
        max_context_tokens=4096,
        router=RouterLimits(
            max_queue=10_000, request_seconds=1e6, prefill_backlog_seconds=1.0, message_seconds=MESSAGE
        ),
    )
    rows = [TraceRow(n, n / rate, odd if n == 60 else others, 2) for n in range(400)]
    _, tally = run(one, rows)
    assert {served.outcome for served in tally.served} == {"finished"}
    served = {served.number: served for served in tally.served}
    waits = {n: one.first_token_at - one.arrived_at for n, one in served.items() if one.first_token_at is not None}
    assert waits[300] > 2 * waits[60], "the queue grows for ever"
    before = [n for n in range(400) if n < 60 and (served[n].first_token_at or 0) > served[60].arrived_at]
    step_seconds = 0.25 + 128 * 0.001 + 1e-6 * 128 * 2000
    passed = 0 if odd < others else 10 * odd
    stood = sum(others for _ in before) if odd > others else (WORKER_BACKLOG + 1) * others
    assert waits[60] <= (stood + passed + odd) / 128 * step_seconds + 1.0


def test_short_prompts_do_not_wait_for_a_giant_that_is_computed() -> None:
    """Held back in the router they would wait for all of it; where they decode there is room."""
    rows = [TraceRow(n, n * 2.0, 200, 2) for n in range(20)]
    rows += [TraceRow(20, 60.0, 8000, 2), *(TraceRow(21 + n, 62.0 + n * 2.0, 200, 2) for n in range(10))]
    one = fleet(card=replace(CARD, num_blocks=2000), prefill=1, decode=1, max_context_tokens=16_384)
    _, tally = run(one, rows)
    waits = {each.number: (each.first_token_at or 0.0) - each.arrived_at for each in tally.served}
    assert waits[20] > 20.0
    assert max(waits[number] for number in range(21, 31)) < 5.0


def test_a_router_that_knows_the_targets_of_its_requests_meets_them_more_often() -> None:
    """More comes than the pool computes: without targets all are late together."""
    rows = traffic(400, 6.0)
    slo = Slo(ttft_seconds=8.0, tpot_seconds=10.0)
    attained = []
    for targets in (NO_TARGETS, Targets(8.0, 10.0)):
        router = RouterLimits(prefill_backlog_seconds=1.0, message_seconds=MESSAGE, targets=targets)
        _, tally = run(fleet(router=router), rows)
        attained.append(summarise("ours", tally, slo).attainment)
    assert attained[1] > 1.2 * attained[0]


def test_who_waits_longer_than_a_request_may_is_told_so_and_holds_nothing() -> None:
    small = fleet(router=RouterLimits(request_seconds=2.0, local_prefill_max_tokens=16, message_seconds=MESSAGE))
    simulation, tally = run(small, [TraceRow(n, 0.0, 500, 15) for n in range(40)])
    assert len(tally.served) == 40
    assert {"finished", "DeadlineExceeded"} >= {served.outcome for served in tally.served}
    late = [served for served in tally.served if served.outcome == "DeadlineExceeded"]
    assert late
    assert all(served.ended_at == 2.0 for served in late)
    for worker in simulation.workers.values():
        counts = worker.scheduler.counts()
        assert counts.free + counts.cached == counts.total


def test_unified_workers_serve_without_a_hand_off() -> None:
    simulation, tally = run(fleet(prefill=0, decode=0, unified=3), traffic())
    assert {served.prefill for served in tally.served} == {None}
    assert {served.decode for served in tally.served} == {"unified-0", "unified-1", "unified-2"}
    assert all(port.busy_until == 0.0 for worker in simulation.workers.values() for port in (worker.incoming,))


def test_equal_seeds_give_equal_runs_and_other_seeds_others() -> None:
    def times(seed: int) -> list[float | None]:
        return [served.ended_at for served in run(fleet(), traffic(), seed=seed)[1].served]

    assert times(1) == times(1)
    assert times(1) != times(2)


def test_tokens_that_the_router_does_not_hear_of_change_nothing() -> None:
    def ends(tell_every: int) -> list[tuple[int, float | None, int]]:
        tally = Tally(fleet().roles)
        simulation = Simulation(fleet(), "ours", tally)
        for worker in simulation.workers.values():
            worker.audience.tell_every = tell_every
        simulation.run([TraceRow(n, n / 8, 100 + n, 1 + n * 40 % 150) for n in range(40)])
        return [(served.number, served.ended_at, served.num_generated) for served in tally.served]

    assert ends(1) == ends(COUNT_EVERY_TOKENS)


def test_a_run_is_the_same_in_any_process() -> None:
    """Names hash differently in every process: nothing may follow the order of a set."""
    program = (
        "from tests.unit.cluster.simulation.small_fleet import fleet, run, traffic\n"
        "print([(s.number, s.decode, s.prefill, s.ended_at) for s in run(fleet(prefill=4, decode=4), traffic())[1].served])"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1
    assert len(found.pop()) > 1000


def test_a_summary_counts_what_clients_saw() -> None:
    _, tally = run(fleet(), traffic())
    summary = summarise("ours", tally, Slo(ttft_seconds=1e9, tpot_seconds=1e9))
    assert (summary.num_requests, summary.attainment) == (80, 1.0)
    assert summary.goodput_per_second == pytest.approx(80 / summary.seconds)
    assert summary.ttft_seconds["p50"] <= summary.ttft_seconds["p90"] <= summary.ttft_seconds["p99"]
    assert set(summary.balance) == {"prefill", "decode"}
    assert summarise("ours", tally, Slo(ttft_seconds=1e-9)).attainment == 0.0
    computed = sum(sum(worker.prefill_tokens) for worker in tally.workers.values())
    assert computed == sum(served.input_tokens - served.cached_tokens for served in tally.served)


def test_a_fleet_that_cannot_serve_is_refused() -> None:
    with pytest.raises(ConfigError, match="decode: must be at least 1 where no worker is unified"):
        fleet(decode=0)
    with pytest.raises(ConfigError, match="policy: must be one of random, round-robin"):
        Simulation(fleet(), "best", Tally(()))
    assert [role for _, role in fleet(unified=1).roles].count(Role.UNIFIED) == 1


def test_generated_traffic_runs_too() -> None:
    rows = [
        replace(row, input_tokens=min(row.input_tokens, 900), prefix_ids=row.prefix_ids[:1])
        for row in generators.generate("hot-prefix", 40, 4.0)
    ]
    _, tally = run(fleet(), rows)
    assert len(tally.served) == 40


def test_a_worker_that_has_measured_nothing_is_not_passed_over() -> None:
    """Its guess is a laptop's; priced by it, the first few to measure their steps would get all there is to do."""
    fast = replace(CARD, cost=CostModel(5e-4, 2e-5, 0.0, 7e-3, 2e-5, 5e-8, 1e-5, 3e11), num_blocks=4096)
    many = fleet(card=fast, prefill=8, decode=8, max_num_seqs=64, max_step_tokens=2048)
    rows = [TraceRow(n, n / 10, 200 + n * 37 % 400, 60) for n in range(100)]
    _, tally = run(many, rows)
    for role in (Role.PREFILL, Role.DECODE):
        balance = tally.balance(role)
        assert balance is not None
        assert balance < 2.0, f"{role}: {balance:.2f}"


def test_paced_cold_prompts_are_spread_evenly_over_idle_workers() -> None:
    """χ² of 9 degrees of freedom, p > 0.01: below 21.7. It was above 500 when ties went to whoever stands first."""
    many = fleet(card=replace(CARD, num_blocks=4096), prefill=10, decode=10)
    rows = [TraceRow(n, n * 5.0, 100, 2) for n in range(400)]
    _, tally = run(many, rows)
    for role in ("prefill", "decode"):
        counts = Counter(getattr(served, role) for served in tally.served)
        assert sum((counts[f"{role}-{n}"] - 40) ** 2 / 40 for n in range(10)) < 21.7, f"{role}: {counts}"


def test_case_11_the_owner_of_the_hottest_prefix_accepts_and_fails_and_is_ejected_and_probed_back() -> None:
    """Four in five prompts begin with what one prefill worker holds. From second 1010 to 1050 it takes tickets and fails
    them: 3 in a row eject it for 5 s, a probe that fails for twice as long as before; one that succeeds brings it back."""
    four = fleet(prefill=4, card=replace(CARD, num_blocks=4096))
    tally = Tally(four.roles)
    simulation = Simulation(four, "ours", tally)
    simulation.run([TraceRow(n, 3.0 * n, 600, 2, (7,)) for n in range(20)])
    ((name, count),) = Counter(served.prefill for served in tally.served).most_common(1)
    assert name is not None
    assert count == 20, "the prefix is not one worker's"
    owner, failed_at = simulation.workers[name], list[float]()
    take = owner.ticket

    def ticket(puller: VirtualWorker, ticket: Ticket, num_offered: int) -> None:
        now = simulation.time.now
        if not 1010 <= now < 1050:
            return take(puller, ticket, num_offered)
        failed_at.append(now)
        return simulation.time.after(MESSAGE, puller.aborted, ticket.request.key, TransferFailed("the link closed"))

    owner.ticket = ticket  # type: ignore[method-assign]
    simulation.run([TraceRow(20 + n, 1000 + n, 600, 2, (7,) if n % 5 else (100 + n,)) for n in range(120)])
    assert {served.outcome for served in tally.served} == {"finished"}, "what it failed was prefilled elsewhere"
    assert [round(later - at, 1) for at, later in pairwise(failed_at)] == [1.0, 1.0, 6.0, 11.0]
    assert any(served.prefill == name for served in tally.served if served.arrived_at > 1090)


def test_what_decode_does_not_hold_yet_is_not_counted_on() -> None:
    """The second of one prompt comes while the first is prefilled: where it will decode there is nothing yet."""
    _, tally = run(fleet(decode=1), [TraceRow(n, n / 10, 1200, 60, (7, 8)) for n in range(2)])
    assert [(served.predicted_tokens, served.cached_tokens) for served in tally.served] == [(0, 0), (0, 0)]


def test_what_decode_holds_is_pulled_by_a_prefill_worker_that_lacks_it() -> None:
    """Three prompts of one history: of two at once the second goes to the prefill worker that never saw it."""
    rows = [
        TraceRow(0, 0.0, 1200, 60, (7, 8)),
        TraceRow(1, 30.0, 1200, 60, (7, 8)),
        TraceRow(2, 30.0, 1200, 60, (7, 8)),
    ]
    simulation, tally = run(fleet(decode=1), rows)
    first, *turns = sorted(tally.served, key=lambda served: served.number)
    assert {served.prefill for served in turns} == {"prefill-0", "prefill-1"}
    assert [served.cached_tokens for served in (first, *turns)] == [0, 1024, 1024]
    for worker in simulation.workers.values():
        counts = worker.scheduler.counts()
        assert counts.free + counts.cached == counts.total
