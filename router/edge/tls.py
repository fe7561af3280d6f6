"""TLS of both edges, by the files of `router.tls`. They are read again once they changed, so that a certificate that was
renewed needs no restart.

Only new connections look at the files, and at most once a second: each has what was right when it came. Files that are
not (a certificate whose key has not come yet, an expired one) are said to the log, and what was there before stays.
"""

import contextlib
import logging
import pathlib
import ssl
from dataclasses import dataclass
from typing import Any

import grpc
from prometheus_client import Gauge
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from headrace import metrics
from headrace.clock import Clock
from headrace.config import TlsConfig
from headrace.errors import ConfigError, Unauthenticated
from headrace.tls import Followed, FreshContext
from router.edge.connections import CERTIFICATE_SHOWN
from router.edge.http_errors import error_body

_OPEN_PATHS = ("/health", "/ready")
_PARTIAL_CHAIN = ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
_END = Gauge(metrics.CERTIFICATE_END, "Unix time at which the certificate ends; 0 without one.")
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Material:
    """What the files held, found right: they make one context, and one configuration of gRPC's."""

    context: ssl.SSLContext
    for_grpc: Any
    ends_at: float


class Certificates:
    """Owns what the files last held. Asked by the event loop and by gRPC's threads."""

    def __init__(self, config: TlsConfig, clock: Clock) -> None:
        """ConfigError names the key and the file that is not right."""
        self._config = config
        files = (config.cert_file, config.key_file, config.client_ca_file)
        self._followed = Followed(files, lambda: read(config), clock, self._tell)
        self.current = self._followed.current
        self._told_grpc = self.current()
        _END.set_function(lambda: self.current().ends_at)

    def _tell(self, fault: ConfigError | None) -> None:
        if fault is None:
            log.info("router.tls: new connections have what is in %s now", self._config.cert_file)
        else:
            log.warning("the certificate of before stays: %s", fault.message)

    def http_context(self) -> ssl.SSLContext:
        return FreshContext(ssl.PROTOCOL_TLS_SERVER, lambda: self.current().context)

    def grpc_credentials(self) -> Any:
        """A client without a certificate is not heard at all where `client_ca_file` is given."""
        mutual = self._config.client_ca_file is not None
        return grpc.dynamic_ssl_server_credentials(self._told_grpc.for_grpc, self._news_for_grpc, mutual)

    def _news_for_grpc(self) -> Any:
        """None: what it was told last still holds."""
        material = self.current()
        if material is self._told_grpc:
            return None
        self._told_grpc = material
        return material.for_grpc


class CertificateGate:
    """In front of the HTTP edge where clients must show a certificate. One by another CA ends the handshake; without any
    there is an answer to probes alone, which have none to show."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not scope.get(CERTIFICATE_SHOWN) and scope["path"] not in _OPEN_PATHS:
            error = Unauthenticated("a client certificate is needed here, signed by router.tls.client_ca_file")
            await JSONResponse(error_body(error), 401)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def read(config: TlsConfig) -> Material:
    """What the files hold; ConfigError when a client would not take it."""
    cert, key = _bytes(config.cert_file, "cert_file"), _bytes(config.key_file, "key_file")
    clients = None if config.client_ca_file is None else _bytes(config.client_ca_file, "client_ca_file")
    if b"-----BEGIN CERTIFICATE-----" not in cert:
        raise _wrong("cert_file", config.cert_file, "holds no certificate in PEM")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(config.cert_file, config.key_file, password=_no_password)
    except OSError as error:  # ssl.SSLError is one
        reason = error.reason if isinstance(error, ssl.SSLError) else error.strerror
        broken = f"holds no key in PEM, or {config.cert_file} is broken: {reason}"
        mismatch = f"is not the key of {config.cert_file}"
        raise _wrong("key_file", config.key_file, mismatch if reason == "KEY_VALUES_MISMATCH" else broken) from error
    if config.client_ca_file is not None and clients is not None:
        try:
            context.load_verify_locations(config.client_ca_file)
        except OSError as error:
            raise _wrong("client_ca_file", config.client_ca_file, "holds no certificate in PEM") from error
        context.verify_mode = ssl.CERT_OPTIONAL  # and CertificateGate behind it
    certificates = grpc.ssl_server_certificate_configuration([(key, cert)], clients)
    return Material(context, certificates, _ends_at(context, config.cert_file))


def _ends_at(context: ssl.SSLContext, cert_file: str) -> float:
    """Until when it is right, as Unix time, by a handshake with a client that trusts this very certificate. ConfigError
    when that would not take it: expired, not valid yet, for another purpose."""
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname = False
    trusting.verify_flags |= _PARTIAL_CHAIN
    trusting.load_verify_locations(cert_file)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = trusting.wrap_bio(to_client, to_server)
    server = context.wrap_bio(to_server, to_client, server_side=True)
    try:
        for side in (client, server, client):
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
    except ssl.SSLError as error:
        why = error.verify_message if isinstance(error, ssl.SSLCertVerificationError) else error.reason
        raise _wrong("cert_file", cert_file, f"no client would take it: {why}") from error
    shown = client.getpeercert()
    assert shown is not None
    return float(ssl.cert_time_to_seconds(str(shown["notAfter"])))


def _no_password() -> str:
    raise ConfigError(
        "router.tls.key_file: the key is encrypted; it must lie there without a password", key="router.tls.key_file"
    )


def _bytes(file: str, name: str) -> bytes:
    try:
        return pathlib.Path(file).read_bytes()
    except OSError as error:
        raise _wrong(name, file, f"cannot be read: {error.strerror}") from error


def _wrong(name: str, file: str, why: str) -> ConfigError:
    return ConfigError(f"router.tls.{name}: {file} {why}", key=f"router.tls.{name}", value=file)
