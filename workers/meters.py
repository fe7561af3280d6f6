"""What a worker measures, under the names of `headrace.metrics`. Owned by the worker's service; counts, decides nothing."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from headrace import metrics
from headrace.errors import HeadraceError
from headrace.values import Timeline, Usage
from workers.scheduling.work import StepWork
from workers.watched import Now, Watched

_STEP_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_QUEUE_BUCKETS = tuple(0.001 * 2**at for at in range(15))
_TRANSFER_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0, 5.0)
DEVICE_FAULTS = {"nccl": ("NCCL", "DistBackendError"), "cuda": ("CUDA", "AcceleratorError", "cuBLAS")}


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
        self._queue_seconds = Histogram(
            metrics.WORKER_QUEUE,
            "Seconds until a prompt began here, or until its ticket went.",
            ["kind"],
            buckets=_QUEUE_BUCKETS,
            registry=registry,
        )
        self._hit_tokens = Counter(
            metrics.PREFIX_HIT_TOKENS, "Prompt tokens that were found computed.", ["tier"], registry=registry
        )
        self._query_tokens = Counter(
            metrics.PREFIX_QUERY_TOKENS, "Prompt tokens that were looked for.", registry=registry
        )
        self._watched = Watched()
        registry.register(self._watched)
        self._device_errors = Counter(
            metrics.DEVICE_ERRORS, "Errors of CUDA or NCCL that a step or a read met.", ["kind"], registry=registry
        )
        for kind in DEVICE_FAULTS:  # a series that began with its first error would not be seen to grow by it
            self._device_errors.labels(kind)
        self._link_ends = Counter(metrics.LINK_ENDS, "Links to peers that ended.", ["kind"], registry=registry)

    def watch(self, now: Callable[[], Now]) -> None:
        """What is looked up when somebody scrapes; by the running event loop, whose state it is."""
        self._watched.watch(now)

    def costs(self, per_hour: float) -> None:
        """What its GPUs cost, whatever they do."""
        Gauge(metrics.COST_PER_HOUR, "Price of its GPUs for an hour.", registry=self.registry).set(per_hour)

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

    def announced(self, num_bytes: int) -> None:
        """Finished blocks that a peer may read now."""
        self._handoff_bytes.labels("out").inc(num_bytes)

    def first_token(self, timeline: Timeline, usage: Usage) -> None:
        """Of a router's request. What a hand-off's prompt found was found on the prefill worker, which counts it."""
        if timeline.prefill_worker:
            self._queue_seconds.labels("claim").observe(timeline.claim_seconds)
        else:
            self._queue_seconds.labels("local").observe(timeline.queue_seconds)
            self._looked_up(usage.prompt_tokens, usage.cached_tokens)

    def prefilled(self, queue_seconds: float, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        """A ticket's prompt is computed."""
        self._queue_seconds.labels("ticket").observe(queue_seconds)
        self._looked_up(num_prompt_tokens, num_cached_tokens)

    def _looked_up(self, num_tokens: int, num_found: int) -> None:
        self._query_tokens.inc(num_tokens)
        self._hit_tokens.labels("device").inc(num_found)

    def link_ended(self, kind: str) -> None:
        """`kind` "": it ended before it was known how the peer could be read."""
        self._link_ends.labels(kind or "none").inc()

    def failed(self, error: BaseException) -> None:
        """A step or a read failed: it counts where CUDA or NCCL is to blame."""
        kind = device_fault(error)
        if kind is not None:
            self._device_errors.labels(kind).inc()

    def handoff_failed(self, error: HeadraceError) -> None:
        """By the error's class: a closed set."""
        self._handoff_failures.labels(error.type).inc()
        self.failed(error)


def device_fault(error: BaseException | None) -> str | None:
    """ "nccl" or "cuda", where the error, or what it came of, is one of these libraries'."""
    while error is not None:
        said = f"{type(error).__name__}: {error}"
        for kind, signs in DEVICE_FAULTS.items():
            if any(sign in said for sign in signs):
                return kind
        error = error.__cause__
    return None
