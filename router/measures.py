"""What is measured of requests. Labels are bounded: tenants and classes are configured ones, the rest closed sets."""

from collections.abc import Callable
from functools import partial

from prometheus_client import Counter, Gauge, Histogram

from headrace import metrics
from headrace.values import Role
from router.flight import STATES, Flight
from router.intervals import Intervals

SHED = Counter(metrics.SHED, "Requests refused before any work.", ["reason"])
FALLBACKS = Counter(metrics.FALLBACKS, "Requests placed again after a failure.", ["reason"])
PLACEMENTS = Counter(metrics.PLACEMENTS, "Placements by kind.", ["why"])
INDEX_FALLBACKS = Counter(metrics.INDEX_FALLBACKS, "Placements that passed over the index for a worker.", ["reason"])

_REQUESTS = Counter(metrics.REQUESTS, "Requests by how they ended.", ["model", "outcome"])
_ADMISSIONS = Counter(metrics.ADMISSIONS, "New requests by what admission decided.", ["tenant", "outcome"])
_TENANT_TOKENS = Counter(metrics.TENANT_TOKENS, "Tokens of the requests that ended.", ["tenant", "kind"])
_SLO = Counter(metrics.SLO, "Requests of a class with targets, by what they missed.", ["service_class", "outcome"])
_SHARED = Counter(metrics.SHARED_ANSWERS, "Answers that cost no new tokens, and those kept.", ["tenant", "how"])
_READY = Gauge(metrics.WORKERS_READY, "Workers that answer and take requests.", ["role"])
_PASSED_OVER = Gauge(metrics.WORKERS_PASSED_OVER, "Workers that failed too often and are left alone for a while.")
_IN_FLIGHT = Gauge(metrics.IN_FLIGHT, "Requests that are in the router now.", ["state"])
_QUEUE = Histogram(metrics.ROUTER_QUEUE, "Seconds a request waited in the router.", ["model"])
_TTFT = Histogram(metrics.TTFT, "Seconds from a request's arrival to its first token.", ["model"])
_STAGES = Histogram(
    metrics.TTFT_STAGE,
    "Seconds of it in each stage; all stages together are it.",
    ["model", "stage"],
    buckets=[0.0005 * 2**i for i in range(16)],
)
_TPOT = Histogram(
    metrics.TPOT, "Mean seconds per token after the first.", ["model"], buckets=[0.001 * 2**i for i in range(14)]
)
_ITL = Intervals(metrics.ITL, "Seconds between two messages to a client.")
_E2E = Histogram(metrics.E2E, "Seconds from a request's arrival to its last token.", ["model"])
_PREDICTED = Counter(metrics.PREDICTED_CACHED_TOKENS, "Cached prompt tokens that placement counted on.", ["worker"])
_ACTUAL = Counter(metrics.ACTUAL_CACHED_TOKENS, "Cached prompt tokens that the worker found.", ["worker"])
_ERROR = Gauge(
    metrics.INDEX_ERROR, "Tokens that the mirror promised and the worker did not have, of those promised.", ["worker"]
)


def watch(num_ready: Callable[[Role], int], num_in: Callable[[str], int], num_passed_over: Callable[[], int]) -> None:
    """What is read whenever somebody asks for it."""
    for role in Role:
        _READY.labels(role.value).set_function(partial(num_ready, role))
    for state in STATES:
        _IN_FLIGHT.labels(state).set_function(partial(num_in, state))
    _PASSED_OVER.set_function(num_passed_over)


def admission(tenant: str, outcome: str) -> None:
    _ADMISSIONS.labels(tenant, outcome).inc()


def shared(tenant: str, how: str) -> None:
    _SHARED.labels(tenant, how).inc()


def waited(flight: Flight) -> None:
    """It is the request's turn."""
    _QUEUE.labels(flight.job.model).observe(flight.queue_seconds)


def outputs(flight: Flight, now: float) -> None:
    """Its worker said more, for every token: hence no histogram of the library's."""
    if flight.last_output_at is not None:
        _ITL.of(flight.job.model).observe(now - flight.last_output_at)
    flight.last_output_at = now


def first_token(flight: Flight) -> None:
    """Its worker has begun to answer."""
    model, exemplar = flight.job.model, _exemplar(flight)
    if flight.ttft_seconds is not None:
        _TTFT.labels(model).observe(flight.ttft_seconds, exemplar)
    for stage, seconds in flight.stages.items():
        _STAGES.labels(model, stage).observe(seconds, exemplar)


def truth(worker_id: str, predicted_tokens: int, found_tokens: int, error: float) -> None:
    """What the index said of a worker, against what it found."""
    _PREDICTED.labels(worker_id).inc(predicted_tokens)
    _ACTUAL.labels(worker_id).inc(found_tokens)
    _ERROR.labels(worker_id).set(error)


def finished(flight: Flight, now: float) -> None:
    model, exemplar = flight.job.model, _exemplar(flight)
    _E2E.labels(model).observe(now - flight.marks.arrived, exemplar)
    tpot_seconds = flight.tpot_seconds(now)
    if tpot_seconds is not None:
        _TPOT.labels(model).observe(tpot_seconds, exemplar)


def ended(flight: Flight, now: float) -> None:
    """The request is over, whichever way."""
    job = flight.job
    _REQUESTS.labels(job.model, flight.outcome).inc()
    usage = flight.usage()
    if flight.ttft_seconds is not None:
        for kind, number in (
            ("prompt", usage.prompt_tokens),
            ("cached", usage.cached_tokens),
            ("generated", flight.num_generated),
        ):
            _TENANT_TOKENS.labels(job.tenant, kind).inc(number)
    verdict = flight.verdict(now)
    if job.targets and verdict is not None:
        _SLO.labels(job.service_class, verdict).inc()


def _exemplar(flight: Flight) -> dict[str, str] | None:
    """Where one of the observations can be looked at: only what is sent has something there."""
    trace = flight.job.trace
    return {"trace_id": trace.trace} if trace is not None and trace.sampled else None


def forget(worker_id: str) -> None:
    """The worker is gone: no series speaks of it any more."""
    for series in (_PREDICTED, _ACTUAL, _ERROR):
        series.remove(worker_id)
