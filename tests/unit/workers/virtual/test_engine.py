"""What a virtual engine draws, and for how long."""

import random

from headrace.costmodel import CostModel
from headrace.values import Request, RequestKey, SamplingParams
from workers.scheduling.scheduler import SchedulerLimits, StepEvents
from workers.virtual.engine import Machine, Prompt, VirtualEngine, virtual_hasher
from workers.virtual.time import VirtualTime

COST = CostModel(0.001, 0.0001, 0.0, 0.001, 0.0001, 0.0)
LIMITS = SchedulerLimits(12, 64, 400, 1000, 1e9)


def test_samples_end_where_they_are_to_though_they_wait_for_blocks_and_come_back_in_anothers_place() -> None:
    """A row that waited is of those again that decode, with nothing that starts: its end came later by up to all steps."""
    draw, time = random.Random(2), VirtualTime()
    lengths = {f"q{number}": draw.randint(2, 40) for number in range(60)}
    drawn = dict.fromkeys(lengths, 0)

    def landed(events: StepEvents) -> None:
        for output in events.outputs:
            drawn[output.key.request_id] += len(output.token_ids)
        engine.go_on()

    engine = VirtualEngine(time, Machine(LIMITS, 24, 4, 1000, COST), virtual_hasher(4), landed)
    for name, length in lengths.items():
        prompt = Prompt(draw.randrange(10, 1000) for _ in range(draw.randint(3, 20)))
        engine.scheduler.submit(Request(RequestKey(name), prompt, SamplingParams(max_tokens=60, seed=length)), 0.0)
    engine.go_on()
    time.run()
    assert engine.scheduler.num_preemptions
    assert drawn == lengths
