"""One error tree, and the one table that says what each means to a gRPC client, an HTTP client and a retry.

HeadraceError
├── InvalidRequest              the client's fault; names field, value and what is allowed
│   ├── ContextLengthExceeded
│   └── ModelNotFound
├── Unauthenticated
├── Overloaded                  refused early; retry_after_seconds says when to come back
│   └── QuotaExceeded           by its tenant's own quota; names the quota and its limit
├── Unavailable                 nobody can serve it just now
│   ├── NoWorkers
│   ├── Draining
│   └── WorkerLost              the worker that owned the request is gone
├── DeadlineExceeded
├── RequestCancelled
├── IncompatiblePeer            two workers that must not share KV; names the field
├── TransferFailed              a hand-off failed; the request is placed again or ends
│   ├── LinkClosed
│   └── StaleBlocks
├── ConfigError                 names the key, the value and the range
├── CheckpointError             names the file and the tensor or field
└── InternalError
"""

from collections.abc import Mapping
from dataclasses import dataclass


class HeadraceError(Exception):
    """Base of all errors that cross a process border. `numbers` carries limits and actual values as text."""

    def __init__(self, message: str, *, retry_after_seconds: float | None = None, **numbers: object) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_seconds = retry_after_seconds
        self.numbers: dict[str, str] = {key: str(value) for key, value in numbers.items()}

    @property
    def type(self) -> str:
        return type(self).__name__


class Amount(str):
    """How much was given, where that says more than what it was: shown without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."


class InvalidRequest(HeadraceError):
    """A request that cannot be served as it is: `field` is the client's own name for the parameter."""

    def __init__(self, message: str, *, field: str | None = None, **numbers: object) -> None:
        super().__init__(message, retry_after_seconds=None, **numbers)
        self.field = field
        if field is not None:
            self.numbers["field"] = field

    @classmethod
    def out_of_range(cls, field: str, value: object, allowed: str) -> "InvalidRequest":
        shown = _shown(value)
        return cls(f"{field} must be {allowed}, got {shown}", field=field, value=shown, allowed=allowed)


class ContextLengthExceeded(InvalidRequest): ...


class ModelNotFound(InvalidRequest): ...


class Unauthenticated(HeadraceError): ...


class Overloaded(HeadraceError): ...


class QuotaExceeded(Overloaded): ...


class Unavailable(HeadraceError): ...


class NoWorkers(Unavailable): ...


class Draining(Unavailable): ...


class WorkerLost(Unavailable): ...


class DeadlineExceeded(HeadraceError): ...


class RequestCancelled(HeadraceError): ...


class IncompatiblePeer(HeadraceError): ...


class TransferFailed(HeadraceError): ...


class LinkClosed(TransferFailed): ...


class StaleBlocks(TransferFailed): ...


class ConfigError(HeadraceError):
    @classmethod
    def out_of_range(cls, key: str, value: object, allowed: str) -> "ConfigError":
        shown = _shown(value)
        return cls(f"{key}: must be {allowed}, got {shown}", key=key, value=shown, allowed=allowed)


class CheckpointError(HeadraceError): ...


class InternalError(HeadraceError): ...


@dataclass(frozen=True, slots=True)
class Meaning:
    """What an error is at the edges. `retryable`: the same request may succeed elsewhere or later."""

    grpc_code: str
    http_status: int
    openai_type: str
    retryable: bool
    retry_after_seconds: float | None = None


MEANINGS: Mapping[type[HeadraceError], Meaning] = {
    InvalidRequest: Meaning("INVALID_ARGUMENT", 400, "invalid_request_error", False),
    ContextLengthExceeded: Meaning("INVALID_ARGUMENT", 400, "invalid_request_error", False),
    ModelNotFound: Meaning("NOT_FOUND", 404, "invalid_request_error", False),
    Unauthenticated: Meaning("UNAUTHENTICATED", 401, "authentication_error", False),
    Overloaded: Meaning("RESOURCE_EXHAUSTED", 429, "rate_limit_error", True, 1.0),
    QuotaExceeded: Meaning("RESOURCE_EXHAUSTED", 429, "rate_limit_error", True, 1.0),
    Unavailable: Meaning("UNAVAILABLE", 503, "server_error", True, 1.0),
    NoWorkers: Meaning("UNAVAILABLE", 503, "server_error", True, 2.0),
    Draining: Meaning("UNAVAILABLE", 503, "server_error", True, 1.0),
    WorkerLost: Meaning("UNAVAILABLE", 503, "server_error", True, 1.0),
    DeadlineExceeded: Meaning("DEADLINE_EXCEEDED", 504, "timeout_error", False),
    RequestCancelled: Meaning("CANCELLED", 499, "cancelled", False),
    IncompatiblePeer: Meaning("FAILED_PRECONDITION", 500, "server_error", False),
    TransferFailed: Meaning("UNAVAILABLE", 503, "server_error", True, 1.0),
    LinkClosed: Meaning("UNAVAILABLE", 503, "server_error", True, 1.0),
    StaleBlocks: Meaning("UNAVAILABLE", 503, "server_error", True, 1.0),
    ConfigError: Meaning("FAILED_PRECONDITION", 500, "server_error", False),
    CheckpointError: Meaning("FAILED_PRECONDITION", 500, "server_error", False),
    InternalError: Meaning("INTERNAL", 500, "server_error", False),
}

_BY_NAME: Mapping[str, type[HeadraceError]] = {kind.__name__: kind for kind in MEANINGS}


def meaning(error: HeadraceError) -> Meaning:
    """The error's row of the table, or its nearest ancestor's; its own retry_after_seconds wins over the row's."""
    row = next((MEANINGS[kind] for kind in type(error).__mro__ if kind in MEANINGS), MEANINGS[InternalError])
    if error.retry_after_seconds is None:
        return row
    return Meaning(row.grpc_code, row.http_status, row.openai_type, row.retryable, error.retry_after_seconds)


def rebuild(name: str, message: str, numbers: Mapping[str, str]) -> HeadraceError:
    """An error that came over the wire, as its own class (InternalError when this build does not know it)."""
    kind = _BY_NAME.get(name, InternalError)
    error = kind(message)
    error.numbers = dict(numbers)
    if isinstance(error, InvalidRequest):
        error.field = numbers.get("field")
    return error
