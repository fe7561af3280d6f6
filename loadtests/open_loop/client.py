"""What the open loop needs of a client: one small protocol, and what both clients raise."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from headrace.errors import ConfigError, ModelNotFound, Unavailable
from loadtests.open_loop.answers import Answer, Ask

Call = Callable[[Answer], Awaitable[None]]


class Unreachable(Unavailable):
    """No answer at all: the connection was refused or broke. Any other error is the server's own word."""


class OwnLimit(ConfigError):
    """This machine allows no more, whatever the server would: the run ends, for it would measure that."""


@dataclass(frozen=True, slots=True)
class Served:
    """What the server says that it serves. `max_context_tokens` 0: it does not say."""

    model: str
    max_context_tokens: int


def chosen(models: Sequence[Served], wanted: str | None) -> Served:
    """The one of that name, or the first; ModelNotFound names those that there are."""
    found = next((served for served in models if wanted in (None, served.model)), None)
    if found is None:
        names = ", ".join(served.model for served in models)
        raise ModelNotFound(f"model must be one of {names}, got {wanted!r}", field="model")
    return found


class Client(Protocol):
    """A way to a server."""

    async def served(self) -> Served:
        """The model that requests ask for, as `chosen`; Unreachable where nobody answers."""
        ...

    def prepare(self, ask: Ask) -> Call:
        """All that can be done before a request's time. The call sends it, tells the Answer of its tokens, and returns at
        the end of the whole answer; a HeadraceError says why there is none. Cancelling it gives the request up."""
        ...
