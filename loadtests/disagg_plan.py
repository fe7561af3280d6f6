"""What disagg runs: which workers, at which rates, and when a rate says no more. Pure."""

import argparse
from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import mean

from headrace.deployments import Deployment
from headrace.goodput import Slo
from headrace.traces import TraceRow
from loadtests.judged import SLOS, Point

CHUNKS = (128, 256, 512, 1024, 2048, 4096, 8192)
# Of what the GPUs could prefill if they did nothing else: the knees of both given traces lie between 0.3 and 0.6.
PREFILL_TOKENS_PER_SECOND = 40_000
FRACTIONS = (0.2, 0.28, 0.34, 0.4, 0.46, 0.52, 0.6)


def named_deployment(text: str) -> Deployment:
    """As the command line has it."""
    try:
        found = Deployment.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if found.targets and found.targets not in SLOS:
        raise argparse.ArgumentTypeError(f"got {text}: after a plus one of {', '.join(SLOS)}")
    return found


def deployments_of(num_gpus: int) -> list[Deployment]:
    """Two pools in every split first, then one pool in every chunk budget, from the likeliest on."""
    splits = [f"{count}P{num_gpus - count}D" for count in range(1, num_gpus)]
    likely = sorted(CHUNKS, key=lambda chunk: abs(chunk - 300))
    return [Deployment.parse(each) for each in (*splits, *(f"{num_gpus}U:{chunk}" for chunk in likely))]


def rates_of(rows: Sequence[TraceRow], num_gpus: int) -> list[float]:
    """Requests a second, rising, around the knee."""
    most = num_gpus * PREFILL_TOKENS_PER_SECOND / mean(row.input_tokens for row in rows)
    return [round(fraction * most, 2) for fraction in FRACTIONS]


def is_spent(points: Iterable[Point], trace: str, deployment: Deployment) -> bool:
    """Whether each of the last two rates lost goodput at every SLO: more would lose more."""
    mine = sorted((p for p in points if p.key[:3] == (trace, deployment.name, deployment.chunk)), key=lambda p: p.rate)
    last = mine[-3:]
    return len(last) == 3 and all(
        before.goodput_per_gpu(slo, itl) > after.goodput_per_gpu(slo, itl)
        for before, after in pairwise(last)
        for slo, itl in _SLOS
    )


_SLOS = [(Slo(ttft, tpot), itl) for ttft, tpot, itl in SLOS.values()]
