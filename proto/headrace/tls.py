"""TLS as a client of routers sees it."""

import pathlib
import ssl
from dataclasses import dataclass
from typing import Any

from headrace.config import TlsConfig
from headrace.errors import ConfigError

TLS_VARIABLE = "HEADRACE_TLS"  # a ClientTls as JSON, for a process that `headrace bench` becomes


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

    def pems(self) -> tuple[bytes | None, bytes | None, bytes | None]:
        """CA, key and certificate. ConfigError when one cannot be read."""
        self.context()
        ca_file = self.ca_file or ssl.get_default_verify_paths().cafile
        return _read(ca_file), _read(self.key_file), _read(self.cert_file)

    @property
    def extensions(self) -> dict[str, Any]:
        """Of an HTTP request by httpx."""
        return {"sni_hostname": self.server_name} if self.server_name is not None else {}


def _read(file: str | None) -> bytes | None:
    return pathlib.Path(file).read_bytes() if file is not None else None
