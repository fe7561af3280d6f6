"""What a process writes to stderr: lines of text, or an object a line.

A record belongs to a request by its `extra={"request_id": …}`, or by the request that the running task serves (`serving`).
"""

import json
import logging
import sys
import traceback
from contextvars import ContextVar
from datetime import UTC, datetime

from headrace.tracing import TraceContext

_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_serving: ContextVar[tuple[str, TraceContext | None]] = ContextVar("serving", default=("", None))


def serving(request_id: str, trace: TraceContext | None = None) -> None:
    """From now on the task works for this request: what it logs names it. Tasks of its own inherit that."""
    _serving.set((request_id, trace))


class JsonFormatter(logging.Formatter):
    """One object a record: time (UTC), level, logger, message; request_id and trace_id where there are any; what else the
    record's `extra` holds under `fields`."""

    def format(self, record: logging.LogRecord) -> str:
        request_id, trace = _serving.get()
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "request_id": getattr(record, "request_id", "") or request_id,
            "trace_id": getattr(record, "trace_id", "") or (trace.trace if trace is not None else ""),
        }
        line |= getattr(record, "fields", {})
        if record.exc_info and record.exc_info[0] is not None:
            line["exception"] = "".join(traceback.format_exception(*record.exc_info))
        return json.dumps({key: value for key, value in line.items() if value != ""}, default=str)


def configure(kind: str, level: int = logging.INFO) -> None:
    """For the whole process, once: `kind` as `logs.format` of the configuration has it. Text leaves handlers that there are
    alone; lines of JSON with other lines between them would be neither."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if kind == "json" else logging.Formatter(_TEXT))
    logging.basicConfig(level=level, handlers=[handler], force=kind == "json")
