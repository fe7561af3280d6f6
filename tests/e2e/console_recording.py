"""Writes the recording that the tests of the console's page show: 1,000 virtual workers under load.

    python -m tests.e2e.console_recording          # a few minutes; writes console-1000.json.gz beside this file

A step takes SLOWER times what it takes on the card, and a worker has so many times fewer blocks: 1,000 workers are busy
then with as much traffic as one core simulates.
"""

import gzip
import json
import pathlib
import sys
from dataclasses import asdict, replace

from cluster.simulation import cards
from cluster.simulation.fleet import Fleet, RouterLimits
from cluster.simulation.recording import record
from headrace.costmodel import CostModel
from headrace.generators import generate
from router.decisions.tenants import Targets

FILE = pathlib.Path(__file__).with_name("console-1000.json.gz")
SLOWER = 16
SECONDS = 20.0
RATE = 420.0
WALL_SECONDS = 1_790_000_000.0
TARGETS = Targets(3.0, 0.15)


def main(seconds: float = SECONDS) -> None:
    card = cards.load("h100")
    cost = {
        name: value * (1 / SLOWER if name.endswith("per_second") else SLOWER)
        for name, value in asdict(card.cost).items()
    }
    card = replace(card, cost=CostModel(**cost), num_blocks=card.num_blocks // SLOWER)
    limits = RouterLimits(message_seconds=5e-4, targets=TARGETS)
    fleet = Fleet(card, prefill=300, decode=700, max_num_seqs=32, router=limits)
    rows = generate("smooth", int(RATE * seconds), RATE, seed=7)
    recording = record(fleet, "thousand", rows, TARGETS, rows[-1].seconds, lambda: WALL_SECONDS)
    FILE.write_bytes(gzip.compress(json.dumps(recording, separators=(",", ":")).encode(), mtime=0))


if __name__ == "__main__":
    main(*map(float, sys.argv[1:]))
