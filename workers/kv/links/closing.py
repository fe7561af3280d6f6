"""Ending what waits for a peer, from any thread."""

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import TypeVar

from headrace.errors import LinkClosed

T = TypeVar("T")


class Closing:
    """The end of something that closes once: the reason, and what must be let go then.

    Functions given to on_close run once, on the thread that closes first; at once when it is closed already.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reason: str | None = None
        self._releases: list[Callable[[], object]] = []

    @property
    def closed(self) -> bool:
        return self._reason is not None

    def error(self) -> LinkClosed:
        return LinkClosed(f"link closed: {self._reason}")

    def on_close(self, release: Callable[[], object]) -> Callable[[], None]:
        """The function returned takes `release` back: what it would have let go is gone already."""
        with self._lock:
            if self._reason is None:
                self._releases.append(release)
                return lambda: self._forget(release)
        release()
        return lambda: None

    def _forget(self, release: Callable[[], object]) -> None:
        with self._lock:
            if release in self._releases:
                self._releases.remove(release)

    def close(self, reason: str) -> None:
        """Idempotent; the first reason stays."""
        with self._lock:
            if self._reason is not None:
                return
            self._reason = reason
            releases, self._releases = self._releases, []
        for release in releases:
            release()


def abandonable(work: Callable[[], T], closing: Closing) -> T:
    """work(), for calls that cannot be interrupted but end by themselves: on a thread of its own, which is left alone
    when `closing` closes first (LinkClosed then). What work() acquires, it hands to `closing` itself."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            value = work()
        except Exception as error:  # whatever it is, the waiting thread raises it
            if done.set_running_or_notify_cancel():
                done.set_exception(error)
        else:
            if done.set_running_or_notify_cancel():
                done.set_result(value)

    forget = closing.on_close(done.cancel)
    threading.Thread(target=run, name="link-call", daemon=True).start()
    try:
        return done.result()
    except CancelledError:
        raise closing.error() from None
    finally:
        forget()
