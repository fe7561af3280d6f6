"""The serving side of links of every kind: one listener a rank, a thread for each link that reads from here."""

import contextlib
import logging
import secrets
from collections.abc import Callable, Mapping

from headrace.errors import IncompatiblePeer, LinkClosed
from workers.kv.channel import Channel, Listener
from workers.kv.links.closing import Closing
from workers.kv.links.endpoint import Endpoint, Place
from workers.kv.links.pair import Message, Pair

log = logging.getLogger(__name__)

# Serves one link until it closes: given its pair and the first message of the target, which names the scheme.
Answer = Callable[[Pair, Message], None]


class LinkServer:
    """A KvServer. Owns its listener and the serving ends of all links; offers the schemes that it has answers for, the
    preferred one first. Its endpoint holds the secret that a reader must know."""

    def __init__(self, host: str, seconds: float, answers: Mapping[str, Answer], place: Place | None = None) -> None:
        """`seconds` bounds the wait for a target's first message."""
        self._seconds = seconds
        self._answers = answers
        self._closing = Closing()
        token = secrets.token_urlsafe(16)
        listener = Listener(host, token, self._serve)
        self._closing.on_close(listener.close)
        self._endpoint = str(Endpoint(tuple(answers), token, host, listener.port, place or Place()))

    @property
    def endpoint(self) -> str:
        return self._endpoint

    def close(self) -> None:
        self._closing.close("the server closed")

    def _serve(self, channel: Channel) -> None:
        link = Closing()
        pair = Pair(channel, link)
        forget = self._closing.on_close(lambda: link.close("the server closed"))
        try:
            first = pair.next(self._seconds)
            answer = self._answers.get(first.get("scheme", ""))
            if answer is None:
                raise IncompatiblePeer(f"a link must be one of {', '.join(self._answers)}, got {first.get('scheme')}")
            answer(pair, first)
        except LinkClosed:
            pass  # the way every link ends; its target knows the reason
        except Exception as error:  # a request that makes no sense, or a hook: the target is told, and the link ends
            log.warning("a read from here failed", exc_info=error)
            _tell(pair, error)
        finally:
            link.close("the link ended")
            forget()


def _tell(pair: Pair, error: Exception) -> None:
    with contextlib.suppress(LinkClosed):  # nobody is left to be told
        pair.send({"error": f"{type(error).__name__}: {error}"})
