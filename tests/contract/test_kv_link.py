"""The contract of workers.kv.links.base.KvLink and KvServer, kept by every implementation."""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from queue import SimpleQueue

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.errors import IncompatiblePeer, LinkClosed, StaleBlocks
from tests.contract.links import (
    BIG,
    BIG_BLOCKS,
    EPOCH,
    MAKE,
    WHOLE,
    Hook,
    Implementation,
    fill,
    filled_pool,
    pulls_of,
    why_not,
)
from workers.kv.layout import Piece, SlabLayout
from workers.kv.links.base import BlockPull, KvLink, PullReceipt
from workers.kv.pool import KvPool

pytestmark = pytest.mark.torch

ON_GPU = ("nccl", "nvlink")
FAULTS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
SMALL = SlabLayout(num_kv_heads=3, num_layers=4, block_size=4, head_dim=2, element_bytes=4)
OTHER = SlabLayout(num_kv_heads=2, num_layers=5, block_size=4, head_dim=2, element_bytes=4)
NUM_BLOCKS = 12


@pytest.fixture(params=[pytest.param(name, marks=[pytest.mark.gpu] if name in ON_GPU else []) for name in sorted(MAKE)])
def scheme(request: pytest.FixtureRequest) -> str:
    if reason := why_not(request.param):
        pytest.skip(reason)
    return str(request.param)


@pytest.fixture
def kind(scheme: str) -> Implementation:
    return MAKE[scheme]()


class Process:
    """One end in a process of its own."""

    def __init__(self, role: str, scheme: str, argument: str) -> None:
        command = [sys.executable, "-m", "tests.contract.link_process", role, scheme, argument]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        self.first_line = self.process.stdout.readline().decode().strip()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


class Source(Process):
    """Meets `fault` when block `at` has been read: by its own hand, or, where it takes no part, by the reader's, who then
    waits for what comes of it."""

    def __init__(self, scheme: str, kind: Implementation, fault: str = "", at: int = 0) -> None:
        own = {"fault": fault, "at": at} if fault and kind.source_takes_part else {}
        super().__init__("source", scheme, json.dumps(own))
        self.endpoint = self.first_line
        self.hook: Hook | None = None
        if fault and not own:
            self.hook = lambda index: self._meet(fault) if index == at else None

    def _meet(self, fault: str) -> None:
        self.signal(FAULTS[fault])
        threading.Event().wait(5)


def pools_of(kind: Implementation) -> tuple[KvPool, KvPool]:
    """A source's and a target's, of different content."""
    return filled_pool(1, kind.source_device), filled_pool(2, kind.target_device)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Wherever they lie."""
    return torch.equal(one.cpu(), other.cpu())


def await_closed(link: KvLink) -> None:
    """Until it has heard of the other end's end."""
    while not link.closed:
        os.sched_yield()


@contextlib.contextmanager
def served(kind: Implementation, pool: KvPool, target: KvPool, hook: Hook | None = None) -> Iterator[KvLink]:
    server = kind.serve(pool, hook)
    link = kind.link(server.endpoint, target, 10.0, hook)
    try:
        yield link
    finally:
        link.close()
        server.close()


def in_background(link: KvLink, blocks: list[BlockPull], piece: Piece = WHOLE) -> "Future[PullReceipt]":
    outcome: Future[PullReceipt] = Future()

    def pull() -> None:
        try:
            outcome.set_result(link.pull(blocks, piece))
        except Exception as error:
            outcome.set_exception(error)

    threading.Thread(target=pull, daemon=True).start()
    return outcome


@st.composite
def reads(draw: st.DrawFn) -> tuple[list[tuple[int, int]], Piece]:
    """Some blocks, each into another, and a piece that both slabs have room for."""
    sources = draw(st.lists(st.integers(0, NUM_BLOCKS - 1), min_size=1, max_size=NUM_BLOCKS, unique=True))
    targets = draw(st.permutations(range(NUM_BLOCKS)))
    num_heads = draw(st.integers(1, min(SMALL.num_kv_heads, OTHER.num_kv_heads)))
    num_layers = draw(st.integers(1, min(SMALL.num_layers, OTHER.num_layers)))
    piece = Piece(
        source_rank=0,
        target_rank=0,
        source_head=draw(st.integers(0, SMALL.num_kv_heads - num_heads)),
        target_head=draw(st.integers(0, OTHER.num_kv_heads - num_heads)),
        num_heads=num_heads,
        source_layer=draw(st.integers(0, SMALL.num_layers - num_layers)),
        target_layer=draw(st.integers(0, OTHER.num_layers - num_layers)),
        num_layers=num_layers,
    )
    return list(zip(sources, targets, strict=False)), piece


def test_any_piece_of_any_blocks_arrives_bit_equal_and_nothing_else_changes(kind: Implementation) -> None:
    pool = filled_pool(1, kind.source_device, SMALL, NUM_BLOCKS)
    target = filled_pool(2, kind.target_device, OTHER, NUM_BLOCKS)
    with served(kind, pool, target) as link:

        @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
        @given(reads())
        def check(read: tuple[list[tuple[int, int]], Piece]) -> None:
            blocks, piece = read
            expected = target.tensor.clone()
            for source_block, target_block in blocks:
                expected[
                    target_block,
                    piece.target_head : piece.target_head + piece.num_heads,
                    piece.target_layer : piece.target_layer + piece.num_layers,
                ] = pool.tensor[
                    source_block,
                    piece.source_head : piece.source_head + piece.num_heads,
                    piece.source_layer : piece.source_layer + piece.num_layers,
                ]
            receipt = link.pull([BlockPull(s, EPOCH, t) for s, t in blocks], piece)
            assert same(target.tensor, expected)
            assert receipt.num_blocks == len(blocks)
            assert receipt.num_bytes == len(blocks) * piece.num_bytes(SMALL)

        check()


def test_a_pull_of_many_messages_is_bit_equal_by_digest(kind: Implementation) -> None:
    pool, target = pools_of(kind)
    with served(kind, pool, target) as link:
        receipt = link.pull([BlockPull(b, EPOCH, BIG_BLOCKS - 1 - b) for b in range(BIG_BLOCKS)], WHOLE)
    assert receipt.num_bytes == BIG_BLOCKS * BIG.block_bytes
    for block in (0, 15, 16, 17, BIG_BLOCKS - 1):
        mirrored = target.head_layer_digests(BIG_BLOCKS - 1 - block, BIG.block_size)
        assert mirrored == pool.head_layer_digests(block, BIG.block_size)


@pytest.mark.parametrize("at", [0, 20, BIG_BLOCKS - 1], ids=["first message", "second message", "last block"])
def test_an_epoch_that_changes_while_it_is_read_is_noticed(kind: Implementation, at: int) -> None:
    pool, target = pools_of(kind)
    armed = True

    def change(index: int) -> None:
        if armed and index == at:
            pool.set_epochs([(at, EPOCH + 1)])

    with served(kind, pool, target, change) as link:
        with pytest.raises(StaleBlocks, match=f"block {at}"):
            link.pull(pulls_of(range(BIG_BLOCKS)), WHOLE)
        assert not link.closed
        armed = False
        pool.set_epochs([(at, EPOCH)])
        link.pull(pulls_of(range(BIG_BLOCKS)), WHOLE)
        assert same(target.tensor[:BIG_BLOCKS], pool.tensor[:BIG_BLOCKS])


def test_a_read_that_races_with_the_blocks_next_owner_is_right_or_discarded(kind: Implementation) -> None:
    """The pins end while they are read: one block a pull, at any moment of it, gets a new epoch and new content."""
    pool, target = pools_of(kind)
    epochs = [EPOCH] * BIG_BLOCKS
    chance, begun, ended = random.Random(5), SimpleQueue[int | None](), SimpleQueue[int]()
    for block in range(BIG_BLOCKS):
        pool.tensor[block].fill_(EPOCH)
    pool.settle()

    def hand_on() -> None:
        while (block := begun.get()) is not None:
            pool.set_epochs([(block, epochs[block] + 1)])
            pool.tensor[block].fill_(epochs[block] + 1)
            pool.settle()
            ended.put(block)

    owner = threading.Thread(target=hand_on, daemon=True)
    owner.start()
    discarded = 0
    with served(kind, pool, target) as link:
        link.pull(pulls_of([0]), WHOLE)
        for _ in range(60):
            read = chance.sample(range(BIG_BLOCKS), 24)
            begun.put(chance.randrange(BIG_BLOCKS))
            try:
                link.pull([BlockPull(block, epochs[block], block) for block in read], WHOLE)
            except StaleBlocks:
                discarded += 1
            else:
                for block in read:
                    assert (target.tensor[block] == epochs[block]).all()
            epochs[ended.get()] += 1
    begun.put(None)
    owner.join()
    assert 0 < discarded < 60


def test_an_epoch_that_has_changed_before_is_noticed_and_nothing_written(kind: Implementation) -> None:
    pool, target = pools_of(kind)
    before = target.tensor.clone()
    pool.set_epochs([(3, EPOCH + 1)])
    with served(kind, pool, target) as link, pytest.raises(StaleBlocks, match="block 3 is at epoch 6"):
        link.pull(pulls_of(range(8)), WHOLE)
    assert same(target.tensor, before)


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


def test_a_wrong_token_reads_nothing(kind: Implementation) -> None:
    server = kind.serve(filled_pool(1, kind.source_device), None)
    try:
        scheme, _, rest = server.endpoint.partition("://")
        link = kind.link(f"{scheme}://another@{rest.partition('@')[2]}", filled_pool(2, kind.target_device), 10.0, None)
        with pytest.raises(LinkClosed, match="token"):
            link.pull(pulls_of([0]), WHOLE)
    finally:
        server.close()


@pytest.mark.parametrize(
    ("slab", "field"),
    [
        (SlabLayout(4, 4, 32, 128, 4), "block_size"),
        (SlabLayout(4, 4, 64, 64, 4), "head_dim"),
    ],
)
def test_pools_that_do_not_fit_are_refused_by_field(kind: Implementation, slab: SlabLayout, field: str) -> None:
    with served(kind, filled_pool(1, kind.source_device), filled_pool(2, kind.target_device, slab)) as link:
        with pytest.raises(IncompatiblePeer, match=field):
            link.pull(pulls_of([0]), WHOLE)
        assert link.closed


def test_a_request_that_makes_no_sense_is_answered_and_harms_no_other_link(kind: Implementation) -> None:
    pool, target = pools_of(kind)
    server = kind.serve(pool, None)
    good, bad = (kind.link(server.endpoint, target, 10.0, None) for _ in range(2))
    try:
        good.pull(pulls_of([0]), WHOLE)
        with pytest.raises(LinkClosed, match=f"blocks must be from 0 to {BIG_BLOCKS - 1}"):
            bad.pull([BlockPull(BIG_BLOCKS + 7, EPOCH, 0)], WHOLE)
        good.pull(pulls_of([1]), WHOLE)
        assert same(target.tensor[:2], pool.tensor[:2])
    finally:
        good.close()
        server.close()


def test_case_13_a_read_that_fails_at_block_k_is_an_explicit_message(kind: Implementation) -> None:
    def fail(index: int) -> None:
        if index == 20:
            raise OSError("cannot post block 20")

    with served(kind, *pools_of(kind), fail) as link:
        with pytest.raises(LinkClosed, match="cannot post block 20"):
            link.pull(pulls_of(range(BIG_BLOCKS)), WHOLE)
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


def await_stopped(peer: Process) -> None:
    """Until the process has stopped."""
    os.waitid(os.P_PID, peer.process.pid, os.WSTOPPED | os.WNOWAIT)


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
