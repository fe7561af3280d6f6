"""What is measured of requests. Labels are bounded: tenants and classes are configured ones, the rest closed sets."""

from collections.abc import Callable, Collection
from functools import partial

from prometheus_client import Counter, Gauge, Histogram

from headrace import metrics
from headrace.values import Role
from router.decisions.view import View
from router.flight import STATES, Flight
from router.intervals import Intervals

SHED = Counter(metrics.SHED, "Requests refused before any work.", ["reason"])
FALLBACKS = Counter(metrics.FALLBACKS, "Requests placed again after a failure.", ["reason"])
PLACEMENTS = Counter(metrics.PLACEMENTS, "Placements by kind.", ["why"])
INDEX_FALLBACKS = Counter(metrics.INDEX_FALLBACKS, "Placements that passed over the index for a worker.", ["reason"])

DIVERTED = Counter(metrics.DIVERTED, "Requests that ran on another revision than their own.", ["reason"])

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
_REVISION_REQUESTS = Counter(
    metrics.REVISION_REQUESTS, "Requests that were placed while there was a canary.", ["revision", "outcome"]
)
_REVISION_TTFT = Histogram(metrics.REVISION_TTFT, "Seconds to a first token, by revision.", ["revision"])
_REVISION_TPOT = Histogram(
    metrics.REVISION_TPOT,
    "Mean seconds per token after the first, by revision.",
    ["revision"],
    buckets=[0.001 * 2**i for i in range(14)],
)
_CANARY_PERCENT = Gauge(metrics.CANARY_PERCENT, "The canary's share of conversations, as this router acts on it.")
_PREDICTED = Counter(metrics.PREDICTED_CACHED_TOKENS, "Cached prompt tokens that placement counted on.", ["worker"])
_ACTUAL = Counter(metrics.ACTUAL_CACHED_TOKENS, "Cached prompt tokens that the worker found.", ["worker"])
_ERROR = Gauge(
    metrics.INDEX_ERROR, "Tokens that the mirror promised and the worker did not have, of those promised.", ["worker"]
)


def watch(flights: Collection[Flight], view: Callable[[], View], num_passed_over: Callable[[], int]) -> None:
    """What is read whenever somebody asks for it; `flights` are those in the router, always."""

    def num_ready(role: Role) -> int:
        return sum(worker.role is role and not worker.draining for worker in view().workers)

    def num_in(state: str) -> int:
        return sum(flight.state == state for flight in flights)

    for role in Role:
        _READY.labels(role.value).set_function(partial(num_ready, role))
    for state in STATES:
        _IN_FLIGHT.labels(state).set_function(partial(num_in, state))
    _PASSED_OVER.set_function(num_passed_over)


def watch_canary(percent: Callable[[], float]) -> None:
    _CANARY_PERCENT.set_function(percent)


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
    if flight.revision and flight.placed is not None:
        _of_revision(flight, now)
    verdict = flight.verdict(now)
    if job.targets and verdict is not None:
        _SLO.labels(job.service_class, verdict).inc()


def _of_revision(flight: Flight, now: float) -> None:
    if flight.given_up_by:  # its time is neither's
        _REVISION_REQUESTS.labels(flight.given_up_by, "given_up").inc()
        return
    _REVISION_REQUESTS.labels(flight.revision, flight.outcome).inc()
    if flight.outcome == "finished" and flight.ttft_seconds is not None:
        _REVISION_TTFT.labels(flight.revision).observe(flight.ttft_seconds)
        if (tpot_seconds := flight.tpot_seconds(now)) is not None:
            _REVISION_TPOT.labels(flight.revision).observe(tpot_seconds)


def _exemplar(flight: Flight) -> dict[str, str] | None:
    """Where one of the observations can be looked at: only what is sent has something there."""
    trace = flight.job.trace
    return {"trace_id": trace.trace} if trace is not None and trace.sampled else None


def forget(worker_id: str) -> None:
    """The worker is gone: no series speaks of it any more."""
    for series in (_PREDICTED, _ACTUAL, _ERROR):
        series.remove(worker_id)
