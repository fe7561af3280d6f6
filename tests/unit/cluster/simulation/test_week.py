"""The fluid before the autoscaler: load that doubles is followed, and a clairvoyant is never dearer for it."""

import numpy as np

from cluster.scaling.values import Size
from cluster.simulation.decision_time import turns
from cluster.simulation.fluid import World
from cluster.simulation.week import Traffic, clairvoyant, follow


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


def test_a_thousand_workers_are_decided_on() -> None:
    assert len(turns(1000, 1)) == 1
