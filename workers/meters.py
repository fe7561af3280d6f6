"""What a worker measures, under the names of `headrace.metrics`. Owned by the worker's service; counts, decides nothing."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from headrace import metrics
from headrace.values import BlockCounts
from workers.scheduling.work import StepWork

_STEP_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_TRANSFER_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0, 5.0)


class Meters:
    """One set per worker, in the registry it was given."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self._steps = Counter(metrics.STEPS, "Engine steps.", registry=registry)
        self._step_seconds = Histogram(
            metrics.STEP_SECONDS,
            "Duration of a step on its slowest rank.",
            ["kind"],
            buckets=_STEP_BUCKETS,
            registry=registry,
        )
        self._batch = Gauge(metrics.BATCH_SEQUENCES, "Sequences in the last step.", registry=registry)
        self._tokens = Counter(metrics.SCHEDULED_TOKENS, "Tokens computed.", ["kind"], registry=registry)
        self._handoff_seconds = Histogram(
            metrics.HANDOFF_SECONDS,
            "Reading one round of blocks.",
            ["side"],
            buckets=_TRANSFER_BUCKETS,
            registry=registry,
        )
        self._handoff_bytes = Counter(metrics.HANDOFF_BYTES, "KV bytes handed over.", ["side"], registry=registry)
        self._handoff_failures = Counter(
            metrics.HANDOFF_FAILURES, "Hand-offs that failed.", ["reason"], registry=registry
        )
        self._preemptions = Gauge(metrics.PREEMPTIONS, "Sequences preempted.", registry=registry)
        self._blocks = Gauge(metrics.KV_BLOCKS, "KV blocks by state.", ["state"], registry=registry)
        self._in_flight = Gauge(metrics.IN_FLIGHT, "Requests that are here now.", ["state"], registry=registry)
        self._tasks = Gauge(metrics.TASKS, "Tasks of the event loop.", registry=registry)
        self._breaker = Gauge(metrics.REDIS_BREAKER, "1 while Redis is not waited for.", registry=registry)

    def watch(
        self,
        blocks: Callable[[], BlockCounts],
        in_flight: Mapping[str, Callable[[], int]],
        preemptions: Callable[[], int],
        breaker_open: Callable[[], bool],
    ) -> None:
        """What is looked up when somebody scrapes."""
        for field in fields(BlockCounts):
            self._blocks.labels(field.name).set_function(partial(_state, blocks, field.name))
        loop = asyncio.get_running_loop()
        self._tasks.set_function(lambda: len(asyncio.all_tasks(loop)))
        for state, count in in_flight.items():
            self._in_flight.labels(state).set_function(count)
        self._preemptions.set_function(preemptions)
        self._breaker.set_function(breaker_open)

    def step(self, work: StepWork, seconds: float) -> None:
        self._steps.inc()
        self._step_seconds.labels(work.kind).observe(seconds)
        self._batch.set(work.num_sequences)
        num_decodes = work.num_sequences - work.num_prefills
        if num_decodes:
            self._tokens.labels("decode").inc(num_decodes)
        if work.prefill_tokens:
            self._tokens.labels("prefill").inc(work.prefill_tokens)

    def read(self, num_bytes: int, seconds: float) -> None:
        self._handoff_seconds.labels("in").observe(seconds)
        self._handoff_bytes.labels("in").inc(num_bytes)

    def handoff_failed(self, reason: str) -> None:
        """`reason` is the error's class: a closed set."""
        self._handoff_failures.labels(reason).inc()


def _state(blocks: Callable[[], BlockCounts], name: str) -> float:
    return float(getattr(blocks(), name))
