"""Who may look. Pure.

Where keys are configured: who holds the operator's (those of the tenant `default`); the page itself is open, it holds
nothing. Where there are none: this machine alone, by a name of its own, so that no page of others can read it through a
browser that runs here (DNS rebinding).
"""

import ipaddress
from dataclasses import dataclass

from headrace.errors import ConfigError, Unauthenticated
from headrace.values import DEFAULT_TENANT
from router.keyring import Keyring

# Nothing from elsewhere, nothing inline, no HTML from text.
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


@dataclass(frozen=True, slots=True)
class Admitted:
    pass


@dataclass(frozen=True, slots=True)
class Refused:
    status: int
    why: str


class Guard:
    """`keyring` is the error where the keys that are configured cannot be read: then nobody may look."""

    def __init__(self, keyring: Keyring | ConfigError) -> None:
        self._keyring = keyring

    def admit(self, authorization: str | None, peer: str, host: str) -> Admitted | Refused:
        """`peer`: the address that asks; `host`: the name that it asks by."""
        if isinstance(self._keyring, ConfigError):
            return Refused(503, f"the console is closed: {self._keyring.message}")
        if not self._keyring.has_keys:
            if is_loopback(peer) and is_loopback(_name_of(host)):
                return Admitted()
            return Refused(
                403,
                "without API keys the console answers to this machine alone: ask by localhost (through a tunnel, or "
                "kubectl port-forward), or configure router.api_keys",
            )
        try:
            tenant = self._keyring.tenant(authorization)
        except Unauthenticated as error:
            return Refused(401, error.message)
        if tenant != DEFAULT_TENANT:
            return Refused(403, f"the console is the operator's, and this key is of the tenant {tenant}")
        return Admitted()


def is_loopback(name: str) -> bool:
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False


def _name_of(host: str) -> str:
    """Of a Host header: without the port."""
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdigit() and (name.endswith("]") or ":" not in name) else host
