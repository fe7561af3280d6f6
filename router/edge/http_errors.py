"""Errors as OpenAI clients expect them: `{"error": {message, type, param, code}}`, with the status of the one table."""

import math
import re
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from headrace.errors import HeadraceError, meaning

_CODES = {
    "ModelNotFound": "model_not_found",
    "ContextLengthExceeded": "context_length_exceeded",
    "Unauthenticated": "invalid_api_key",
    "Overloaded": "rate_limit_exceeded",
    "QuotaExceeded": "rate_limit_exceeded",
}


def error_body(error: HeadraceError) -> dict[str, Any]:
    code = _CODES.get(error.type) or re.sub(r"(?<!^)(?=[A-Z])", "_", error.type).lower()
    return _body(error.message, meaning(error).openai_type, code, error.numbers.get("field"))


def error_response(error: HeadraceError) -> JSONResponse:
    means = meaning(error)
    headers = {}
    if means.retry_after_seconds is not None:
        headers["retry-after"] = str(math.ceil(means.retry_after_seconds))
    if not means.retryable and means.http_status >= 500:
        headers["x-should-retry"] = "false"  # the openai package sends anything above 499 twice more
    if means.http_status == 401:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(error_body(error), means.http_status, headers)


def http_error_response(error: HTTPException) -> JSONResponse:
    """What no error of ours stands for: unknown paths and methods, bodies that are too large."""
    code = {404: "not_found", 405: "method_not_allowed", 413: "body_too_large"}.get(error.status_code)
    body = _body(error.detail, "invalid_request_error", code, None)
    return JSONResponse(body, error.status_code, error.headers)


def _body(message: str, kind: str, code: str | None, param: str | None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
