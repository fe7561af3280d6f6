"""What measuring costs beside a decode step (`bench-operate`): everything that is counted because of one step, in a worker
and in the router that relays its tokens, as a part of the shortest steps that the engine was measured at, on any card.

Times are CPU seconds of loops over the production code. A request's own share (first token, stages, end) and a scrape's are
spread over the steps between two of them. Tracing is off, as by default; with every request sampled it is in the detail.
"""

import json
import pathlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import REGISTRY, CollectorRegistry, generate_latest

from headrace.tracing import TraceContext
from headrace.values import FinishReason, RequestKey, SamplingParams, SequenceOutput, Timeline, Usage
from loadtests.report import Row
from router import measures
from router.flight import Flight
from router.jobs import Job
from router.spans import spans_of
from router.text.detokenize import Characters, Pieces, TextStream
from workers.meters import Meters
from workers.scheduling.work import StepKind, StepWork

RESULTS = pathlib.Path(__file__).parent.parent / "docs" / "benchmarks"
BATCHES = (1, 32, 128, 256)
ANSWER_TOKENS = 200
SCRAPE_SECONDS = 15.0
ROUNDS = 20_000
MUST = 0.01
KEY = RequestKey("r")
HANDED = Timeline(0.001, 0.02, 0.002, 1.0, "p0", 32, 2**20, claim_seconds=0.001, join_seconds=0.0001)
USAGE = Usage(1024, 1, 512)


def step_seconds(results: pathlib.Path = RESULTS) -> dict[int, float]:
    """Seconds of a decode step by batch, of the card on which they were shortest at batch 1."""
    found = []
    for path in results.glob("engine-*.json"):
        rows = {row["name"]: row["value"] for row in json.loads(path.read_text(encoding="utf-8"))["rows"]}
        if all(f"decode_b{batch}" in rows for batch in BATCHES):
            found.append({batch: batch / rows[f"decode_b{batch}"] for batch in BATCHES})
    return min(found, key=lambda steps: steps[1])


def each(work: Callable[[], object], rounds: int) -> float:
    """CPU seconds of one call."""
    began = time.process_time()
    for _ in range(rounds):
        work()
    return (time.process_time() - began) / rounds


def costs(rounds: int = ROUNDS) -> dict[str, float]:
    """Seconds of each thing that is measured: a worker's step, a relayed message, a request, a scrape of both."""
    registry = CollectorRegistry()
    meters = Meters(registry)
    work = StepWork(StepKind.DECODE, 256, 0, 0, 0.0, 256 * 1024)
    flight = _flight(None)
    clock = _ticking()

    def a_request() -> None:
        measures.waited(flight)
        measures.admission("default", "admitted")
        measures.first_token(flight)
        measures.finished(flight, 9.0)
        measures.ended(flight, 9.0)
        meters.first_token(HANDED, USAGE)
        meters.prefilled(0.001, 1024, 512)
        meters.announced(2**20)
        meters.read(2**20, 0.001)

    found = {
        "worker_step": each(lambda: meters.step(work, 0.005), rounds),
        "message": each(lambda: measures.outputs(flight, next(clock)), rounds),
        "request": each(a_request, rounds // 10),
        "scrape": each(lambda: (generate_latest(registry), generate_latest(REGISTRY)), rounds // 400),
    }
    traced = _flight(TraceContext(1, 2, sampled=True))
    found["spans"] = each(lambda: spans_of(traced, 9.0, lambda: 7), rounds // 10)
    return found


def fraction(cost: dict[str, float], batch: int, step: float) -> float:
    """Of a step: the worker's, a message for each sequence, and what falls upon it of requests and scrapes."""
    ended = batch / ANSWER_TOKENS
    return (cost["worker_step"] + batch * cost["message"] + ended * cost["request"]) / step + (
        cost["scrape"] / SCRAPE_SECONDS
    )


def measure(num_runs: int) -> Sequence[Row]:
    steps = step_seconds()
    runs = [costs() for _ in range(num_runs)]
    samples = [max(fraction(cost, batch, step) for batch, step in steps.items()) for cost in runs]
    median = {name: statistics.median(cost[name] for cost in runs) for name in runs[0]}
    detail = {f"b{batch}": fraction(median, batch, step) for batch, step in steps.items()}
    detail |= {f"step_b{batch}_ms": step * 1e3 for batch, step in steps.items()}
    detail |= {f"{name}_us": seconds * 1e6 for name, seconds in median.items()}
    note = "of the worst of four batches; worker and router together, though they are two processes"
    value = statistics.median(samples)
    return [
        Row("metrics_overhead_fraction", value, "fraction", "lower", MUST, samples=samples, note=note, detail=detail)
    ]


def _flight(trace: TraceContext | None) -> Flight:
    """A request that was handed over and is decoding."""
    words = Pieces(lambda token_id: chr(97 + token_id % 26).encode())
    job = Job("r", "m", tuple(range(1024)), SamplingParams(max_tokens=ANSWER_TOKENS), arrived_at=0.5, trace=trace)
    flight = Flight(job, KEY, lambda: TextStream(Characters(words), (), 0), 1.0)
    flight.marks.submit(1.001)
    flight.marks.first_token = 1.05
    flight.relay([SequenceOutput(KEY, 0, (1,), 1, usage=USAGE, timeline=HANDED)])
    flight.relay([SequenceOutput(KEY, 0, (2,), 2, finish=FinishReason.LENGTH, timeline=HANDED)])
    flight.outcome = "finished"
    return flight


def _ticking() -> Iterator[float]:
    now = 0.0
    while True:
        now += 0.0071
        yield now
