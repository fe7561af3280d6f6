"""A sample of the decisions, on disk: one JSON line each (router.decisions.record), in files that rotate.

The event loop only puts a value into a bounded queue; a thread makes the line and writes it. When it cannot keep up, or
the disk does not take it, decisions are dropped and counted; no request waits for its line, or fails with it.
"""

import contextlib
import fcntl
import logging
import logging.handlers
import os
import pathlib
import queue
import threading
from collections.abc import Callable, Iterator
from hashlib import blake2b
from io import TextIOWrapper

from prometheus_client import Counter

from headrace import metrics
from headrace.config import DecisionLogConfig
from headrace.errors import ConfigError
from headrace.values import RequestKey
from router.decisions.record import Decision, to_line

MAX_QUEUED = 256
CLOSE_SECONDS = 2.0
_LOGGED = Counter(metrics.DECISIONS_LOGGED, "Placements written to the decision log.")
_DROPPED = Counter(metrics.DECISIONS_DROPPED, "Placements that were sampled and not logged.", ["reason"])
_log = logging.getLogger(__name__)

Note = Callable[[RequestKey, Callable[[], Decision]], None]
"""Hears of every decision, and makes those that it keeps."""


class DecisionLog:
    """Owns the queue and the thread; the thread owns `file`. All decisions of a request are sampled, or none: by its name,
    so that nothing is drawn and retries stand beside what they followed."""

    def __init__(self, file: logging.Handler, fraction: float, unix_seconds: Callable[[], float]) -> None:
        self._file = file
        self._fraction = fraction
        self._unix_seconds = unix_seconds
        self._queue: queue.Queue[tuple[Decision, float] | None] = queue.Queue(MAX_QUEUED)
        self._thread = threading.Thread(target=self._write, name="decision-log", daemon=True)
        self._thread.start()

    def note(self, key: RequestKey, decision: Callable[[], Decision]) -> None:
        if not is_sampled(key.request_id, self._fraction):
            return
        try:
            self._queue.put_nowait((decision(), self._unix_seconds()))
        except queue.Full:
            _DROPPED.labels("queue").inc()

    def close(self) -> None:
        """Returns when all that was noted is written; a disk that hangs is not waited for."""
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=CLOSE_SECONDS)
        self._thread.join(CLOSE_SECONDS)
        if not self._thread.is_alive():
            self._file.close()

    def _write(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                line = to_line(*item)
            except Exception:
                _DROPPED.labels("encode").inc()
                _log.exception("a decision could not be written as JSON")
                continue
            self._file.handle(logging.makeLogRecord({"msg": line}))


class Rotating(logging.handlers.RotatingFileHandler):
    """Counts what was written, and what the disk did not take; the first of a row of failures is logged. After one the file
    is opened anew: what the old stream still holds would only grow, and fail again."""

    _failing = False

    def _open(self) -> TextIOWrapper:
        """A line that was cut off, by a full disk or a kill, stays one by itself."""
        stream = super()._open()
        if stream.tell() and not _ends_with_a_line(self.baseFilename):
            stream.write("\n")
        return stream

    def emit(self, record: logging.LogRecord) -> None:
        self._failed = False
        super().emit(record)
        if not self._failed:
            self._failing = False
            _LOGGED.inc()

    def handleError(self, record: logging.LogRecord) -> None:
        self._failed = True
        _DROPPED.labels("disk").inc()
        if not self._failing:
            _log.exception("the decision log cannot be written")
        self._failing = True
        stream, self.stream = self.stream, None
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()


def _ends_with_a_line(path: str) -> bool:
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"


def is_sampled(name: str, fraction: float) -> bool:
    """Whether the request of this name is among the fraction."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big") < fraction * 2**64


@contextlib.contextmanager
def decision_log(config: DecisionLogConfig, unix_seconds: Callable[[], float]) -> Iterator[Note]:
    """Where decisions are noted; nowhere without a path. ConfigError when the file cannot be had, or is another router's:
    two that rotate one file lose lines."""
    if config.path is None:
        yield lambda key, decision: None
        return
    path = pathlib.Path(config.path).expanduser()
    with contextlib.ExitStack() as ends:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT, 0o600)
            ends.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file = Rotating(path, maxBytes=config.max_bytes, backupCount=config.num_files - 1, encoding="utf-8")
        except BlockingIOError as error:
            raise ConfigError(f"router.decision_log.path: another router writes {path}", value=path) from error
        except OSError as error:
            raise ConfigError(f"router.decision_log.path: cannot write {path}: {error.strerror}", value=path) from error
        log = DecisionLog(file, config.fraction, unix_seconds)
        ends.callback(log.close)
        yield log.note
