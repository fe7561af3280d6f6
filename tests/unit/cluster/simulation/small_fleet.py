"""A small fleet whose figures can be added up by hand, and traffic for it."""

from dataclasses import replace

from cluster.simulation.cards import Card
from cluster.simulation.fleet import Fleet, Simulation
from cluster.simulation.results import Tally
from cluster.simulation.router import RouterLimits
from headrace.costmodel import CostModel
from headrace.traces import TraceRow

COST = CostModel(
    prefill_base_seconds=0.25,
    prefill_token_seconds=0.001,
    prefill_token_context_seconds=1e-6,
    decode_base_seconds=0.125,
    decode_sequence_seconds=0.01,
    decode_context_token_seconds=1e-5,
    transfer_base_seconds=0.0625,
    transfer_bytes_per_second=1e6,
)
CARD = Card("test", "made up", COST, num_blocks=256, block_bytes=1000)
MESSAGE = 0.03125


def fleet(**changes: object) -> Fleet:
    return replace(
        Fleet(
            CARD,
            prefill=2,
            decode=2,
            block_size=16,
            max_num_seqs=8,
            max_step_tokens=128,
            max_context_tokens=2048,
            router=RouterLimits(local_prefill_max_tokens=16, message_seconds=MESSAGE),
            graph_tokens=(),
            landing_seconds=0.0,
        ),
        **changes,  # type: ignore[arg-type]
    )


def run(fleet: Fleet, rows: list[TraceRow], policy: str = "ours", seed: int = 0) -> tuple[Simulation, Tally]:
    tally = Tally(fleet.roles)
    simulation = Simulation(fleet, policy, tally, seed=seed)
    simulation.run(rows)
    return simulation, tally


def traffic(num_requests: int = 80, per_second: float = 4.0) -> list[TraceRow]:
    """Prompts of 1 to 8 blocks under 3 shared first blocks of 512 tokens, of up to 20 tokens of output."""
    return [TraceRow(n, n / per_second, 520 + n * 37 % 128, 1 + n * 7 % 20, (n % 3,)) for n in range(num_requests)]
