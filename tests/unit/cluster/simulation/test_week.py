"""The fluid before the autoscaler: load that doubles is followed, and a clairvoyant is never dearer for it."""

import math
from dataclasses import replace

import numpy as np
import pytest

from cluster.planning.load import lengths_around
from cluster.scaling.values import Size
from cluster.simulation.decision_time import turns
from cluster.simulation.fluid import FLIP_SECONDS, HIT_RATE, LENGTH_CV, OUTPUT_TOKENS, Fluid, World
from cluster.simulation.week import Traffic, clairvoyant, follow
from headrace.values import Role


def test_a_load_that_rises_and_falls_is_followed_within_the_targets() -> None:
    rates = np.concatenate([np.full(900, 40.0), np.linspace(40, 100, 3600)])
    traffic = Traffic(rates, np.random.default_rng(3).poisson(rates))
    world = World.of()
    outcome = follow(world, traffic, world.rules(most=32), {"prefill": Size(2), "decode": Size(2)})
    assert outcome.attainment > 0.98
    _, _, *last = outcome.trace[-1]
    assert sum(last) > 4
    least, kept = clairvoyant(world, traffic, 0.99)
    assert kept >= 0.99
    assert least < outcome.gpu_hours


def test_decode_workers_of_the_fluid_hold_the_rows_that_littles_law_says() -> None:
    """A step is a second, and so, nearly, is a whole answer: counted after those that left they were a third."""
    fluid, world = Fluid(World.of()), World.of()
    for _ in range(100):
        fluid.step(135, 7, 5)
    cost, rows = world.worker.cost, fluid.sequences / 5
    tokens = sum(length.output_tokens - 1 for length in world.lengths) / len(world.lengths)
    context = sum((x.input_tokens + x.output_tokens / 2) * (x.output_tokens - 1) for x in world.lengths)
    context /= sum(x.output_tokens - 1 for x in world.lengths)
    step_seconds = cost.decode_step_seconds(1000, round(1000 * context)) - cost.decode_step_seconds(0, 0)
    step_seconds = cost.decode_base_seconds + rows * step_seconds / 1000
    assert fluid.sequences == pytest.approx(135 * tokens * step_seconds, rel=0.02)


def test_who_serves_from_a_second_on_is_known_where_nobody_else_does_before_its_end() -> None:
    rates = np.full(1200, 40.0)
    world = World.of()
    outcome = follow(
        world, Traffic(rates, rates.astype(int)), world.rules(most=8), {"prefill": Size(2), "decode": Size(3)}
    )
    assert outcome.sizes_within(0, 30) == (2, 3)
    assert sum(outcome.surplus.values()) == pytest.approx(outcome.gpu_hours, rel=1e-6)
    assert 0 < outcome.surplus["leaving"] < 2 * 60 / 3600, (
        "two that drained, for as long as their answers of seconds took"
    )
    changed = [since for since, *_ in outcome.sizes[1:]]
    assert all(outcome.sizes_within(since - 1, since + 1) is None for since in changed)


def test_a_worker_of_the_week_drains_for_as_long_as_its_longest_answer_takes() -> None:
    """It was gone after 30 s, and its sequences were with the others at once, however long they were."""
    random, short = np.random.default_rng(1), World.of()
    for tokens in (OUTPUT_TOKENS, 8000.0):
        world = replace(short, lengths=tuple(lengths_around(2000, tokens, hit_rate=HIT_RATE, cv=LENGTH_CV)))
        fluid = Fluid(world, sequences=400.0)
        worker, seconds = fluid.drain_decode(4), 0
        assert (fluid.sequences, fluid.decoding.sequences) == (300.0, 400)
        while fluid.draining:
            fluid.step(0, 1, 3)
            seconds += 1
        sigma = math.sqrt(math.log1p(LENGTH_CV**2))
        # Of those that decode now: the longer the likelier, and anywhere in it.
        answers = tokens * np.exp(sigma * random.standard_normal((200, 100)) + sigma**2 / 2)
        left = np.sort(answers * random.random(answers.shape))
        cost, context = world.worker.cost, 2000 + tokens / 2
        each = cost.decode_sequence_seconds + cost.decode_context_token_seconds * context
        steps = cost.decode_base_seconds + each * np.arange(100, 0, -1)
        ended = (np.diff(left, axis=1, prepend=0) * steps).sum(axis=1)
        low, high = np.quantile(ended, [0.1, 0.9])
        assert low < seconds < high
        assert worker.is_gone
        assert not fluid.cut


def test_a_worker_of_the_week_that_flips_finishes_what_decodes_there_beside_its_prompts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its sequences were with the others at once, and its prompts with those who prefilled."""
    held: list[float] = []

    class Kept(Fluid):
        def step(self, arrivals: int, prefill: int, decode: int) -> float:
            held.append(self.sequences)
            return super().step(arrivals, prefill, decode)

    monkeypatch.setattr("cluster.simulation.week.Fluid", Kept)
    rates, world = np.concatenate([np.full(300, 30), np.full(180, 80)]), World.of()
    start = {"prefill": Size(3), "decode": Size(5)}
    outcome = follow(world, Traffic(rates * 1.0, rates), world.rules(most=32, budget_gpus=8), start)
    assert outcome.moves == [(420, "flip")]
    assert held[421] < held[420]
    assert held[420] / held[421] == pytest.approx(5 / 4, rel=0.05), "four keep theirs"


@pytest.mark.parametrize("waiting", [0.0, 600.0])
def test_sequences_on_a_worker_that_flipped_take_longer_where_prompts_are_computed_beside_them(waiting: float) -> None:
    fluid = Fluid(World.of(), sequences=400.0, waiting_seconds=waiting, arrived=1000, kept=1000.0)
    worker, seconds = fluid.flip(Role.DECODE, 4), 0
    worker.seconds = FLIP_SECONDS
    assert (fluid.sequences, worker.sequences, fluid.decoding.sequences) == (300.0, 100.0, 400)
    before = fluid.waiting_seconds
    fluid.step(0, 2, 3)
    assert 1.6 < before - fluid.waiting_seconds < 1.9 if waiting else not fluid.waiting_seconds, "steps are shared"
    while fluid.flipped:
        fluid.step(0, 2, 3)
        seconds += 1
    assert 40 < seconds < 100 if waiting else 5 < seconds < 20
    assert 50 < fluid.slowed < 100 if waiting else not fluid.slowed
    assert fluid.attainment == pytest.approx(1 - fluid.slowed / 1000)


def test_prompts_on_a_worker_that_flipped_to_decode_are_computed_there() -> None:
    fluid = Fluid(World.of(), waiting_seconds=8.0)
    worker = fluid.flip(Role.PREFILL, 4)
    assert (fluid.waiting_seconds, worker.prompt_seconds) == (6.0, 2.0)
    fluid.step(0, 3, 1)
    fluid.step(0, 3, 1)
    assert not fluid.waiting_seconds
    assert not worker.prompt_seconds
    assert fluid.decoding.sequences > 0


def test_what_a_drain_cuts_is_no_attainment() -> None:
    fluid = Fluid(World.of(), sequences=100.0, arrived=1000, kept=1000.0)
    fluid.drain_decode(1).seconds_left = 1.0
    fluid.step(0, 1, 1)
    assert not fluid.draining
    assert fluid.attainment == pytest.approx(1 - fluid.cut / 1000)
    assert 50 < fluid.cut < 100


def test_a_thousand_workers_are_decided_on() -> None:
    assert len(turns(1000, 1)) == 1
