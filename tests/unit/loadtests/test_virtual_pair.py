"""Two real schedulers under virtual time: everything is answered, everything comes back, time is counted once."""

from headrace.costmodel import CostModel
from headrace.values import Request, RequestKey, SamplingParams
from loadtests.virtual_pair import VirtualPair
from workers.scheduling.scheduler import SchedulerLimits
from workers.virtual.engine import Machine

COST = CostModel(
    prefill_base_seconds=0.1,
    prefill_token_seconds=0.01,
    prefill_token_context_seconds=0.0,
    decode_base_seconds=0.1,
    decode_sequence_seconds=0.0,
    decode_context_token_seconds=0.0,
    transfer_base_seconds=0.05,
    transfer_bytes_per_second=1e9,
)


def pair(num_blocks: int = 64, local_prefill_max_tokens: int = 4) -> VirtualPair:
    limits = SchedulerLimits(8, 16, 200, 100, 10.0)
    return VirtualPair(Machine(limits, num_blocks, 4, 1000, COST), local_prefill_max_tokens)


def request(number: int, num_prompt: int, num_output: int) -> Request:
    prompt = tuple(3 + (number * 31 + at * 7) % 90 for at in range(num_prompt))
    return Request(RequestKey(f"r{number}"), prompt, SamplingParams(max_tokens=num_output + 9, seed=num_output))


def test_all_are_answered_with_as_many_tokens_as_they_draw_and_all_blocks_come_back() -> None:
    world = pair(num_blocks=30)
    world.run((number * 0.3, request(number, 1 + number * 5 % 40, 1 + number % 12)) for number in range(60))
    assert world.num_finished == 60
    assert world.num_tokens == sum(1 + number % 12 for number in range(60))
    for worker in (world.prefill, world.decode):
        counts = worker.scheduler.counts()
        assert counts.free + counts.cached == counts.total
    usage = world.usage
    assert usage.filled <= usage.needed <= usage.held
    assert 0 < usage.floor_fraction < usage.waste_fraction < 1


def test_one_request_alone_is_counted_to_the_second() -> None:
    """8 prompt tokens, 1 output: prefilled in 0.18 s (a step costs 0.1 s and 0.01 s a token), then over without a read:
    the pin and the claim end with it. Two whole blocks are held and filled for that time."""
    world = pair()
    world.run([(1.0, request(1, 8, 1))])
    assert world.num_finished == 1
    assert world.usage.held == world.usage.filled
    assert abs(world.usage.held - 8 * 0.18) < 1e-9
