"""Where a rank's pool can be read, as one string that travels between workers: what is offered, to whom, and the secret.

    nvlink://token@10.0.0.1:4711?machine=…&device=GPU-…

Several offers are joined by "+", the preferred one first. It holds a secret: show it to peers alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qs, quote, urlsplit

from headrace.errors import IncompatiblePeer


@dataclass(frozen=True, slots=True)
class Place:
    """Where a pool lies. Machines are equal where processes can pass each other open files: one kernel since its start,
    one network namespace. "" is unknown and equals nothing."""

    machine: str = ""
    device: str = ""

    def shares_machine(self, other: "Place") -> bool:
        return self.machine == other.machine != ""


@dataclass(frozen=True, slots=True)
class Endpoint:
    schemes: tuple[str, ...]
    token: str
    host: str
    port: int
    place: Place = Place()

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        facts = (("machine", self.place.machine), ("device", self.place.device))
        query = "&".join(f"{name}={quote(value)}" for name, value in facts if value)
        return f"{'+'.join(self.schemes)}://{self.token}@{host}:{self.port}{'?' if query else ''}{query}"

    @classmethod
    def parse(cls, text: str) -> "Endpoint":
        """IncompatiblePeer where it is none. The message leaves the token out."""
        where = urlsplit(text)
        try:
            host, port, token = where.hostname, where.port, where.username
        except ValueError:
            host = port = token = None
        if not where.scheme or not host or not port or not token:
            raise IncompatiblePeer("an endpoint must be scheme://token@host:port", field="endpoint")
        return cls(tuple(where.scheme.split("+")), token, host, port, place_in(text))


def schemes_of(text: str) -> Sequence[str]:
    """What an endpoint offers, whatever follows."""
    return text.partition("://")[0].split("+")


def place_in(text: str) -> Place:
    """Where an endpoint says that its pool lies."""
    facts = parse_qs(urlsplit(text).query)
    return Place(*("".join(facts.get(name, ())) for name in ("machine", "device")))


def this_machine() -> str:
    """Equal on two processes that can reach each other's abstract Unix sockets; "" where it cannot be told."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}.{Path('/proc/self/ns/net').stat().st_ino}"
    except OSError:
        return ""
