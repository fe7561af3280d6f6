"""A pair's control channel: messages, the store that both ends hold, and the end."""

import socket
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist

from headrace.errors import LinkClosed
from workers.kv.channel import Channel
from workers.kv.links.closing import Closing
from workers.kv.links.pair import Pair

pytestmark = pytest.mark.torch


@pytest.fixture
def ends() -> Iterator[tuple[Pair, Pair]]:
    one, other = (Channel(stream) for stream in socket.socketpair())
    made = Pair(one, Closing()), Pair(other, Closing())
    yield made
    for end in made:
        end.closing.close("the test is over")


def test_messages_arrive_in_order_and_store_entries_are_not_among_them(ends: tuple[Pair, Pair]) -> None:
    one, other = ends
    one.send({"n": 1})
    one.store.set("key", b"\x00\xff")
    one.send({"n": 2})
    assert [other.next(5)["n"] for _ in range(2)] == [1, 2]
    assert bytes(other.store.get("key")) == b"\x00\xff"
    assert bytes(one.store.get("key")) == b"\x00\xff"
    assert other.store.check(["key"])
    assert not other.store.check(["key", "another"])


def test_what_one_end_sets_the_other_waits_for(ends: tuple[Pair, Pair]) -> None:
    one, other = ends
    with pytest.raises(dist.DistStoreError, match="no late from the peer"):
        other.store.wait(["late"], timedelta(milliseconds=1))
    one.store.set("late", "now")
    other.store.wait(["late"], timedelta(seconds=5))


def test_the_end_of_one_is_the_end_of_the_other(ends: tuple[Pair, Pair]) -> None:
    one, other = ends
    one.closing.close("enough")
    with pytest.raises(LinkClosed, match="the peer is gone"):
        other.next(5)
    with pytest.raises(LinkClosed, match="enough"):
        one.next(5)
    with pytest.raises(LinkClosed):
        other.send({})
    with pytest.raises(dist.DistStoreError):
        other.store.get("anything")


def test_an_error_is_the_reason_at_the_other_end(ends: tuple[Pair, Pair]) -> None:
    one, other = ends
    one.send({"error": "OSError: disk on fire"})
    with pytest.raises(LinkClosed, match="the peer failed: OSError: disk on fire"):
        other.next(5)


def test_silence_closes(ends: tuple[Pair, Pair]) -> None:
    with pytest.raises(LinkClosed, match=r"said nothing for 0\.01 s"):
        ends[0].next(0.01)
    assert ends[0].closing.closed


@pytest.mark.parametrize("frame", [b"{", b"[]", b'{"set": "k"}', b'{"set": "k", "value": "zz"}', b"7"])
def test_what_is_no_message_closes(frame: bytes) -> None:
    stream, other = socket.socketpair()
    raw, pair = Channel(stream), Pair(Channel(other), Closing())
    raw.send(frame)
    with pytest.raises(LinkClosed, match="no message"):
        pair.next(5)
    raw.close()
