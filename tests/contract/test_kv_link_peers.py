"""The contract of KvLink and KvServer where a peer is silent, stopped, killed, or ends."""

import contextlib
import signal
import socket
import threading

import pytest

from headrace.errors import LinkClosed
from tests.contract.link_ends import Process, Source, await_closed, await_stopped, in_background, pools_of, same, served
from tests.contract.links import (
    BIG_BLOCKS,
    WHOLE,
    Implementation,
    fill,
    filled_pool,
    pulls_of,
)

pytestmark = pytest.mark.torch


def test_close_ends_a_pull_whose_peer_is_silent(kind: Implementation) -> None:
    reading, go_on = threading.Event(), threading.Event()

    def wait(index: int) -> None:
        if index == 20:
            reading.set()
            go_on.wait()

    with served(kind, *pools_of(kind), wait) as link:
        pulling = in_background(link, pulls_of(range(BIG_BLOCKS)))
        assert reading.wait(10)
        link.close()
        assert isinstance(pulling.exception(5), LinkClosed)
        assert link.closed
        link.close()
        with pytest.raises(LinkClosed):
            link.pull(pulls_of([0]), WHOLE)
        go_on.set()


def test_close_ends_a_pull_that_is_still_forming_its_link(kind: Implementation, scheme: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        link = kind.link(
            f"{scheme}://token@127.0.0.1:{mute.getsockname()[1]}", filled_pool(2, kind.target_device), 10.0, None
        )
        pulling = in_background(link, pulls_of([0]))
        knocking, _ = mute.accept()
        link.close()
        assert isinstance(pulling.exception(5), LinkClosed)
        knocking.close()


def test_a_peer_that_never_answers_is_given_up_in_time(kind: Implementation, scheme: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        link = kind.link(
            f"{scheme}://token@127.0.0.1:{mute.getsockname()[1]}", filled_pool(2, kind.target_device), 0.2, None
        )
        with pytest.raises(LinkClosed):
            link.pull(pulls_of([0]), WHOLE)
        assert link.closed


def test_a_peer_killed_in_the_middle_of_a_payload_is_noticed_at_once(kind: Implementation, scheme: str) -> None:
    target = filled_pool(2, kind.target_device)
    neighbour = target.tensor[30:].clone()
    with Source(scheme, kind, "kill", 20) as peer:
        link = kind.link(peer.endpoint, target, 10.0, peer.hook)
        with pytest.raises(LinkClosed):
            link.pull(pulls_of(range(30)), WHOLE)
        died = peer.process.wait(5)
        assert died == -signal.SIGKILL
    assert link.closed
    assert same(target.tensor[30:], neighbour)


def test_a_killed_peers_replacement_is_read_by_a_new_link(kind: Implementation, scheme: str) -> None:
    target = filled_pool(2, kind.target_device)
    with Source(scheme, kind, "kill", 0) as peer, pytest.raises(LinkClosed):
        kind.link(peer.endpoint, target, 10.0, peer.hook).pull(pulls_of(range(30)), WHOLE)
    with Source(scheme, kind) as peer:
        link = kind.link(peer.endpoint, target, 10.0, None)
        link.pull(pulls_of(range(30)), WHOLE)
        link.close()
    assert same(target.tensor[:30], filled_pool(1, kind.source_device).tensor[:30])


def test_a_peer_that_is_stopped_and_wakes_up_late_changes_nothing(kind: Implementation, scheme: str) -> None:
    target = filled_pool(2, kind.target_device)
    with Source(scheme, kind, "stop", 20) as peer:
        link = kind.link(peer.endpoint, target, 60.0, peer.hook)
        pulling = in_background(link, pulls_of(range(BIG_BLOCKS)))
        await_stopped(peer)
        link.close()
        assert isinstance(pulling.exception(5), LinkClosed)
        # The blocks have a new owner by now.
        fill(target, 3)
        theirs = target.tensor.clone()
        peer.signal(signal.SIGCONT)
        again = kind.link(peer.endpoint, target, 10.0, None)
        again.pull(pulls_of([7]), WHOLE)
        again.close()
        theirs[7] = filled_pool(1, kind.source_device).tensor[7]
        assert same(target.tensor, theirs)


def test_a_peer_that_is_stopped_is_given_up_in_time(kind: Implementation, scheme: str) -> None:
    """Where it takes part. What takes none is read, and then it has to be there for the forming alone."""
    with Source(scheme, kind, "stop", 20 if kind.source_takes_part else -1) as peer:
        target = filled_pool(2, kind.target_device)
        link = kind.link(peer.endpoint, target, 1.0, None)
        if not kind.source_takes_part:
            link.pull(pulls_of([0]), WHOLE)
            peer.signal(signal.SIGSTOP)
            await_stopped(peer)
            with contextlib.suppress(*(() if kind.reads_stopped else (LinkClosed,))):
                link.pull(pulls_of(range(BIG_BLOCKS)), WHOLE)
                assert same(target.tensor[:BIG_BLOCKS], filled_pool(1, kind.source_device).tensor[:BIG_BLOCKS])
            link = kind.link(peer.endpoint, target, 1.0, None)
        with pytest.raises(LinkClosed):
            link.pull(pulls_of(range(BIG_BLOCKS)), WHOLE)
        peer.signal(signal.SIGCONT)


def test_a_stopped_reader_holds_up_neither_other_readers_nor_the_end(kind: Implementation, scheme: str) -> None:
    pool, target = pools_of(kind)
    server = kind.serve(pool, None)
    with Process("target", scheme, server.endpoint) as reader:
        assert reader.first_line == "pulling"
        reader.signal(signal.SIGSTOP)
        await_stopped(reader)
        link = kind.link(server.endpoint, target, 10.0, None)
        link.pull(pulls_of(range(BIG_BLOCKS)), WHOLE)
        assert same(target.tensor[:BIG_BLOCKS], pool.tensor[:BIG_BLOCKS])
        closing = threading.Thread(target=server.close, daemon=True)
        closing.start()
        closing.join(5)
        assert not closing.is_alive()
        await_closed(link)
        with pytest.raises(LinkClosed):
            link.pull(pulls_of([0]), WHOLE)


def test_closing_the_server_ends_all_that_it_started(kind: Implementation) -> None:
    before = set(threading.enumerate())
    pool, target = pools_of(kind)
    server = kind.serve(pool, None)
    links = [kind.link(server.endpoint, target, 10.0, None) for _ in range(3)]
    for link in links:
        link.pull(pulls_of([0]), WHOLE)
    server.close()
    server.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(5)
        assert not thread.is_alive(), thread.name
    for link in links:
        await_closed(link)
        with pytest.raises(LinkClosed):
            link.pull(pulls_of([0]), WHOLE)
