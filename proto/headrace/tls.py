"""TLS as a client of routers sees it, and what both ends have in common: files that are replaced while they are in use."""

import os
import pathlib
import ssl
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from headrace.clock import Clock, SystemClock
from headrace.config import TlsConfig
from headrace.errors import ConfigError

TLS_VARIABLE = "HEADRACE_TLS"  # a ClientTls as JSON, for a process that `headrace bench` becomes
LOOK_SECONDS = 1.0
T = TypeVar("T")


class Followed(Generic[T]):
    """Owns what files last were, made into something. It is made anew once they changed, by whoever asks then, and at most
    once a second; files that are not right change nothing. Any thread may ask."""

    def __init__(
        self,
        files: Sequence[str | None],
        make: Callable[[], T],
        clock: Clock,
        changed: Callable[[ConfigError | None], None] = lambda _: None,
    ) -> None:
        """ConfigError as `make` raises it. `changed` hears of each change, and what is not right with it."""
        self._files = [file for file in files if file is not None]
        self._make = make
        self._clock = clock
        self._changed = changed
        self._lock = threading.Lock()
        self._stamps = self._stamped()
        self._looked_at = clock.now()
        self._current = make()

    def current(self) -> T:
        with self._lock:
            now = self._clock.now()
            if now - self._looked_at >= LOOK_SECONDS:
                self._looked_at = now
                if (stamps := self._stamped()) != self._stamps:
                    self._stamps = stamps
                    self._make_anew()
            return self._current

    def _make_anew(self) -> None:
        try:
            self._current = self._make()
        except ConfigError as error:
            self._changed(error)
        else:
            self._changed(None)

    def _stamped(self) -> list[object]:
        """Other ones once a file, or what a link leads to, is another; a file that is gone has a stamp too."""
        return [_stamp(file) for file in self._files]


def _stamp(file: str) -> object:
    try:
        found = os.stat(file)
    except OSError as error:
        return error.errno
    return found.st_ino, found.st_mtime_ns, found.st_size


class FreshContext(ssl.SSLContext):
    """Asks for each connection which context it has: one that is in use cannot forget a CA."""

    _fresh: Callable[[], ssl.SSLContext]

    def __new__(cls, protocol: int, fresh: Callable[[], ssl.SSLContext]) -> "FreshContext":
        context = super().__new__(cls, protocol)
        context._fresh = fresh
        return context

    def wrap_bio(self, *arguments: Any, **options: Any) -> ssl.SSLObject:
        return self._fresh().wrap_bio(*arguments, **options)


@dataclass(frozen=True, slots=True)
class ClientTls:
    """How to meet a router that speaks TLS. `ca_file` None: whom this machine trusts. `cert_file` and `key_file` are shown
    to one that asks for a certificate. `server_name`: whose certificate it must be, where the address does not say so: a
    pod's, a forwarded port."""

    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    server_name: str | None = None

    @classmethod
    def of(cls, tls: TlsConfig | None) -> "ClientTls | None":
        """For who talks to the routers of a configuration. Routers that ask for a certificate are shown their own."""
        if tls is None:
            return None
        mutual = tls.client_ca_file is not None
        return cls(tls.ca_file, tls.cert_file if mutual else None, tls.key_file if mutual else None, tls.server_name)

    def context(self) -> ssl.SSLContext:
        """ConfigError when a file cannot be used."""
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
            if self.cert_file is not None:
                context.load_cert_chain(self.cert_file, self.key_file)
        except OSError as error:  # ssl.SSLError is one
            files = ", ".join(file for file in (self.ca_file, self.cert_file, self.key_file) if file is not None)
            raise ConfigError(f"cannot use {files} for TLS: {error.strerror or error}") from error
        return context

    def lasting_context(self) -> ssl.SSLContext:
        """For who outlives certificates, with asyncio: each connection has what the files hold by then."""
        followed = Followed((self.ca_file, self.cert_file, self.key_file), self.context, SystemClock())
        return FreshContext(ssl.PROTOCOL_TLS_CLIENT, followed.current)

    def pems(self) -> tuple[bytes | None, bytes | None, bytes | None]:
        """CA, key and certificate. ConfigError when one cannot be used."""
        self.context()
        ca_file = self.ca_file or ssl.get_default_verify_paths().cafile
        return _read(ca_file), _read(self.key_file), _read(self.cert_file)

    @property
    def extensions(self) -> dict[str, Any]:
        """Of an HTTP request by httpx."""
        return {"sni_hostname": self.server_name} if self.server_name is not None else {}


def _read(file: str | None) -> bytes | None:
    return pathlib.Path(file).read_bytes() if file is not None else None
