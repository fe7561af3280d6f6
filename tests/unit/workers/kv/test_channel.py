"""Channels: who is let in, what arrives, and how either end learns of the other's end."""

import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import pytest

from headrace.errors import Unauthenticated
from workers.kv.channel import Channel, ChannelClosed, Listener, connect


@pytest.fixture
def admitted() -> SimpleQueue[Channel]:
    return SimpleQueue()


@pytest.fixture
def listener(admitted: SimpleQueue[Channel]) -> Iterator[Listener]:
    made = Listener("127.0.0.1", "secret", admitted.put)
    yield made
    made.close()


@pytest.fixture
def ends(listener: Listener, admitted: SimpleQueue[Channel]) -> Iterator[tuple[Channel, Channel]]:
    mine = connect("127.0.0.1", listener.port, "secret")
    theirs = admitted.get(timeout=5)
    yield mine, theirs
    mine.close()
    theirs.close()


def test_frames_arrive_whole_and_in_order(ends: tuple[Channel, Channel]) -> None:
    mine, theirs = ends
    frames = [b"", b"one", bytes(100_000), b"last"]
    for frame in frames:
        mine.send(frame)
    assert [theirs.receive() for _ in frames] == frames
    theirs.send(b"back")
    assert mine.receive() == b"back"
    assert mine.local_host == "127.0.0.1"


def test_frames_of_many_senders_do_not_mix(ends: tuple[Channel, Channel]) -> None:
    mine, theirs = ends
    with ThreadPoolExecutor(4) as pool:
        for value in range(40):
            pool.submit(mine.send, bytes([value]) * 50_000)
        got = [theirs.receive() for _ in range(40)]
    assert sorted(frame[0] for frame in got) == list(range(40))
    assert all(frame == frame[:1] * 50_000 for frame in got)


@pytest.mark.parametrize("closer", [0, 1])
def test_both_ends_learn_of_a_close(ends: tuple[Channel, Channel], closer: int) -> None:
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(end.receive) for end in ends]
        ends[closer].close()
        for future in waiting:
            assert isinstance(future.exception(5), ChannelClosed)
    for end in ends:
        end.close()
        with pytest.raises(ChannelClosed):
            end.send(b"too late")


def test_a_close_ends_a_send_that_nobody_reads(ends: tuple[Channel, Channel]) -> None:
    mine, _ = ends
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(mine.send, bytes(2**26))
        mine.close()
        assert isinstance(sending.exception(5), ChannelClosed)


def test_a_frame_has_a_largest_size(ends: tuple[Channel, Channel]) -> None:
    mine, theirs = ends
    mine.send(bytes(101))
    with pytest.raises(ChannelClosed, match="at most 100 bytes, got 101"):
        theirs.receive(max_bytes=100)


def test_who_does_not_know_the_token_is_not_let_in(listener: Listener, admitted: SimpleQueue[Channel]) -> None:
    with pytest.raises((Unauthenticated, ChannelClosed)):
        connect("127.0.0.1", listener.port, "guess")
    connect("127.0.0.1", listener.port, "secret").close()
    admitted.get(timeout=5).close()
    assert admitted.empty()


def test_a_listener_that_does_not_know_the_token_gets_nothing(admitted: SimpleQueue[Channel]) -> None:
    impostor = Listener("127.0.0.1", "another", admitted.put)
    with pytest.raises((Unauthenticated, ChannelClosed)):
        connect("127.0.0.1", impostor.port, "secret")
    impostor.close()


def test_a_caller_that_says_nothing_keeps_nobody_out(listener: Listener, admitted: SimpleQueue[Channel]) -> None:
    with socket.create_connection(("127.0.0.1", listener.port)):
        connect("127.0.0.1", listener.port, "secret").close()
        admitted.get(timeout=5).close()


def test_nobody_is_reached_where_nobody_listens(listener: Listener) -> None:
    listener.close()
    listener.close()
    with pytest.raises(ChannelClosed, match="cannot reach"):
        connect("127.0.0.1", listener.port, "secret")
    assert not any(thread.name == f"accept:{listener.port}" for thread in threading.enumerate())


def test_a_listener_needs_a_token() -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        Listener("127.0.0.1", "", lambda channel: channel.close())


@pytest.fixture
def local_ends() -> Iterator[tuple[Channel, Channel]]:
    """Of an abstract Unix socket."""
    admitted = SimpleQueue[Channel]()
    name = f"@headrace-test-{os.getpid()}"
    listener = Listener(name, "secret", admitted.put)
    mine = connect(name, listener.port, "secret")
    theirs = admitted.get(timeout=5)
    yield mine, theirs
    mine.close()
    theirs.close()
    listener.close()


def test_open_files_go_with_a_frame_on_this_machine(local_ends: tuple[Channel, Channel]) -> None:
    mine, theirs = local_ends
    reading, writing = os.pipe()
    mine.send_descriptors(b"a pipe", [writing])
    os.close(writing)
    mine.send(b"and a frame")
    frame, (received,) = theirs.receive_descriptors(1, 5)
    assert frame == b"a pipe"
    assert theirs.receive() == b"and a frame"
    os.write(received, b"through it")
    assert os.read(reading, 100) == b"through it"
    os.close(received)
    os.close(reading)


def test_a_frame_without_the_files_that_were_wanted_is_refused(local_ends: tuple[Channel, Channel]) -> None:
    mine, theirs = local_ends
    mine.send(b"nothing with it")
    with pytest.raises(ChannelClosed, match="wanted a frame and 2 descriptors, got 0"):
        theirs.receive_descriptors(2, 5)


def test_who_sends_no_files_is_given_up(local_ends: tuple[Channel, Channel]) -> None:
    with pytest.raises(ChannelClosed, match="timed out"):
        local_ends[0].receive_descriptors(1, 0.01)


def test_a_local_listener_lets_in_who_knows_the_token_alone() -> None:
    name = f"@headrace-test-token-{os.getpid()}"
    listener = Listener(name, "secret", Channel.close)
    with pytest.raises((Unauthenticated, ChannelClosed)):
        connect(name, 0, "another")
    listener.close()
    with pytest.raises(ChannelClosed, match="cannot reach"):
        connect(name, 0, "secret")
