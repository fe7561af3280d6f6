"""A canary beside two workers, and what routers counted."""

from dataclasses import replace
from random import Random

from cluster.canary.decide import Seen
from cluster.canary.values import Evidence, Phase, State, written
from cluster.lifecycle import ObservedWorker
from cluster.lifecycle import Phase as WorkerPhase
from headrace.config import CanaryConfig, PoolConfig
from headrace.reports import RevisionCounts, bucket_of
from headrace.values import ParallelLayout, Role

ITS = CanaryConfig(revision="v2", model="m2", pools={"canary": PoolConfig(role="decode")}, min_requests=100)
LIVE = State(1, Phase.LIVE, written(ITS), 50.0, 0.0, 0.0, shared_since=0.0)


def counted(
    number: int, *, failed: int = 0, missed: int = 0, ttft: float = 0.2, tpot: float = 0.02, seed: int = 0
) -> RevisionCounts:
    """Latencies are lognormal around these, as skewed as real ones."""
    random, answered = Random(seed), number - failed
    histograms: list[dict[int, int]] = [{}, {}]
    for histogram, middle in zip(histograms, (ttft, tpot), strict=True):
        for _ in range(answered):
            bucket = bucket_of(middle * random.lognormvariate(0.0, 0.5))
            histogram[bucket] = histogram.get(bucket, 0) + 1
    return RevisionCounts(number, failed, answered - missed, 10 * number, number, 5 * number, *histograms)


def worker(pool: str, index: int, revision: str = "stable", phase: WorkerPhase = WorkerPhase.READY) -> ObservedWorker:
    return ObservedWorker(pool, index, 1, Role.DECODE, ParallelLayout(), phase, 0.0, revision=revision)


OWN = worker("decode", 0), worker("decode", 1)
CANARY = worker("canary", 0, "v2")


def seen(
    base: RevisionCounts | None = None, canary: RevisionCounts | None = None, state: State = LIVE, **changes: object
) -> Seen:
    sides = {name: its for name, its in ((state.base, base), ("v2", canary)) if its is not None}
    evidence = Evidence(state.number, 0.0, state.percent, sides)
    its = Seen(10.0, state, evidence, (*OWN, CANARY), num_wanted=2)
    return replace(its, **changes)  # type: ignore[arg-type]
