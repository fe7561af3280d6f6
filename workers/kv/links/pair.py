"""What the two ends of a link say beside the payload: one control channel a pair, for its whole life.

It carries the rendezvous of the payload's transport, requests, epochs, and liveness: its end is the peer's death, noticed
at once. Messages are JSON objects. {"set": key, "value": hex} belongs to the store and {"error": text} closes the pair;
all others are `next`'s.
"""

import json
import threading
from collections.abc import Callable
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any

import torch.distributed as dist

from headrace.errors import Unauthenticated
from workers.kv.channel import Channel, ChannelClosed, connect
from workers.kv.links.closing import Closing, abandonable

Message = dict[str, Any]
Taken = Message | Callable[[], None]  # what is left to do with a message, where something has been done

_Store: Any = dist.Store  # type: ignore[attr-defined]


class Pair:
    """One end. Any thread may send; one thread takes messages. `closing` ends it from anywhere, and hears of the
    channel's end from the pair's reader thread."""

    def __init__(self, channel: Channel, closing: Closing) -> None:
        self._channel = channel
        self._messages: SimpleQueue[Taken | None] = SimpleQueue()
        self._taken_with: Callable[[Message], Taken] | None = None
        self.closing = closing
        self.host = channel.local_host
        self.store = PairStore(self)
        closing.on_close(channel.close)
        closing.on_close(self.store.close)
        closing.on_close(lambda: self._messages.put(None))
        threading.Thread(target=self._read, name="link-control", daemon=True).start()

    def _read(self) -> None:
        try:
            while True:
                message: Message = json.loads(self._channel.receive())
                if not isinstance(message, dict):
                    raise TypeError(f"a message must be an object, got {type(message).__name__}")
                if "set" in message:
                    self.store.receive(message["set"], bytes.fromhex(message["value"]))
                elif "error" in message:
                    self.closing.close(f"the peer failed: {message['error']}")
                else:
                    self._messages.put(message if self._taken_with is None else self._taken_with(message))
        except ChannelClosed as error:
            self.closing.close(f"the peer is gone: {error}")
        except (ValueError, KeyError, TypeError) as error:
            self.closing.close(f"the peer sent what is no message: {error}")

    def send(self, message: Message) -> None:
        """LinkClosed when the pair is closed; it is then."""
        try:
            self._channel.send(json.dumps(message).encode())
        except ChannelClosed as error:
            self.closing.close(f"the peer is gone: {error}")
            raise self.closing.error() from error

    def next(self, seconds: float | None) -> Message:
        """The peer's next message. LinkClosed when the pair is closed, as it is after `seconds` of silence."""
        message = self.take(seconds)
        assert isinstance(message, dict), "take_with is for who takes"
        return message

    def take_with(self, work: Callable[[Message], Taken]) -> None:
        """From here on `work` is done with each message on the thread that reads, before the next is read; it neither
        raises nor waits for the peer. `take` gets what it returns, or a message that came before."""
        self._taken_with = work

    def take(self, seconds: float | None) -> Taken:
        """As next()."""
        try:
            taken = self._messages.get(timeout=seconds)
        except Empty:
            self.closing.close(f"the peer said nothing for {seconds} s")
            taken = None
        if taken is None:
            raise self.closing.error()
        return taken


def reach(host: str, port: int, token: str, seconds: float, closing: Closing) -> Channel:
    """A channel to a peer's listener, which `closing` closes. LinkClosed when there is none within about 2 × `seconds`, or
    at once when `closing` closes; it is then closed."""

    def work() -> Channel:
        channel = connect(host, port, token, seconds)
        closing.on_close(channel.close)
        return channel

    try:
        return abandonable(work, closing)
    except (ChannelClosed, Unauthenticated) as error:
        closing.close(str(error))
        raise closing.error() from error


class PairStore(_Store):  # type: ignore[misc]
    """A torch.distributed store that both ends of a pair hold whole: what one sets, the other is sent. No third process
    serves it, and none asks a dead peer. It has set, get, check and wait, which is what forming a group needs."""

    def __init__(self, pair: Pair) -> None:
        super().__init__()
        self._pair = pair
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._closed = False

    def receive(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def set(self, key: str, value: bytes | str) -> None:
        raw = value.encode() if isinstance(value, str) else bytes(value)
        self.receive(key, raw)
        self._pair.send({"set": key, "value": raw.hex()})

    def get(self, key: str) -> bytes:
        self.wait([key])
        with self._changed:
            return self._values[key]

    def check(self, keys: list[str]) -> bool:
        with self._changed:
            return all(key in self._values for key in keys)

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=5)) -> None:
        with self._changed:
            there = self._changed.wait_for(
                lambda: self._closed or all(key in self._values for key in keys), timeout.total_seconds()
            )
            if self._closed or not there:
                raise dist.DistStoreError(f"no {', '.join(keys)} from the peer within {timeout}")
