"""How a staged link cuts a read into messages, what it awaits before it knows, and what it holds for how long."""

import contextlib
import os
import threading
import weakref
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headrace.errors import IncompatiblePeer, LinkClosed, StaleBlocks
from workers.kv.layout import Piece, SlabLayout
from workers.kv.links import gloo
from workers.kv.links.base import BlockPull
from workers.kv.links.closing import Closing
from workers.kv.links.endpoint import Endpoint
from workers.kv.links.gloo import GlooCarrier
from workers.kv.links.group import Work
from workers.kv.links.link import Link
from workers.kv.links.pair import Message, Pair, Taken, reach
from workers.kv.links.server import LinkServer
from workers.kv.links.staged import TARGET, Cut, StagedSource, StagedTransport
from workers.kv.links.terms import Terms
from workers.kv.pool import KvPool

pytestmark = pytest.mark.torch

SLAB = SlabLayout(num_kv_heads=1, num_layers=1, block_size=4, head_dim=2, element_bytes=4)
WHOLE = Piece(0, 0, 0, 0, 1, 0, 0, 1)


def test_one_that_closed_for_nobody_pulled_keeps_no_staging() -> None:
    pools = [KvPool(SLAB, 2, torch.float32, torch.device("cpu")) for _ in range(2)]
    carriers: list[weakref.ref[GlooCarrier]] = []

    def make(pair: Pair, me: int) -> GlooCarrier:
        carrier = GlooCarrier(pools[0], pair, me, 10.0)
        carriers.append(weakref.ref(carrier))
        return carrier

    with contextlib.closing(gloo.serve(pools[1], "127.0.0.1", 10.0)) as server:
        where = Endpoint.parse(server.endpoint)
        link = Link(StagedTransport("gloo", where, pools[0], 10.0, make, gloo.CUT, dear=True))
        link.pull([BlockPull(0, 0, 1)], WHOLE)
        assert [carrier() is not None for carrier in carriers] == [True]
        link.rest()
        assert link.closed
        assert carriers[0]() is None, "two messages of 64 MiB, on a GPU"


@given(st.integers(0, 300), st.integers(1, 9), st.integers(1, 200))
def test_messages_are_all_blocks_once_in_order_and_as_few_as_may_be(
    num_blocks: int, block_bytes: int, message_bytes: int
) -> None:
    step = max(1, message_bytes // block_bytes)
    parts = Cut(message_bytes, 3).parts(num_blocks, block_bytes)
    assert [block for part in parts for block in range(part.start, part.stop)] == list(range(num_blocks))
    assert all(part.stop - part.start <= step for part in parts)
    assert len(parts) == -(-num_blocks // step)


class Counted(GlooCarrier):
    """Notes what its link asks of it."""

    def __init__(self, pool: KvPool, pair: Pair, me: int, notes: list[str]) -> None:
        super().__init__(pool, pair, me, 10.0)
        self._notes = notes

    def receive(self, part: slice) -> tuple[Tensor, Work]:
        self._notes.append(f"await {part.stop - part.start}")
        return super().receive(part)

    def finish(self, sent: Work) -> None:
        super().finish(sent)
        self._notes.append("came")

    def write(self, part: slice, content: Tensor) -> None:
        self._notes.append(f"write {part.stop - part.start}")
        super().write(part, content)


def test_what_is_awaited_before_the_epochs_are_known_is_dropped_where_they_moved_and_the_link_goes_on() -> None:
    pools = [KvPool(SLAB, 10, torch.float32, torch.device("cpu")) for _ in range(2)]
    pools[1].tensor.normal_()
    cut, notes = Cut(2 * SLAB.block_bytes, depth=2), list[str]()
    source = StagedSource(pools[1], lambda pair, me: GlooCarrier(pools[1], pair, me, 10.0), cut, None)
    with contextlib.closing(LinkServer("127.0.0.1", 10.0, {"gloo": source.answer})) as server:
        where = Endpoint.parse(server.endpoint)

        def make(pair: Pair, me: int) -> Counted:
            return Counted(pools[0], pair, me, notes)

        with contextlib.closing(Link(StagedTransport("gloo", where, pools[0], 10.0, make, cut))) as link:
            pools[1].set_epochs([(7, 1)])
            with pytest.raises(StaleBlocks, match="block 7 is at epoch 1"):
                link.pull([BlockPull(block, 0, block) for block in range(10)], WHOLE)
            assert notes == ["await 2", "await 2", "came", "came"]
            assert not pools[0].tensor.any()
            notes.clear()
            link.pull([BlockPull(block, int(block == 7), block) for block in range(10)], WHOLE)
            assert torch.equal(pools[0].tensor[:10], pools[1].tensor[:10])
            assert notes[:6] == ["await 2", "await 2", "came", "write 2", "await 2", "came"]
            assert sum(note.startswith("await") for note in notes) == 5
            assert link.pull([], WHOLE).num_bytes == 0


def test_ends_that_cut_otherwise_do_not_read_from_each_other() -> None:
    pools = [KvPool(SLAB, 2, torch.float32, torch.device("cpu")) for _ in range(2)]
    with contextlib.closing(gloo.serve(pools[1], "127.0.0.1", 10.0)) as server:
        other = Cut(2**20, depth=gloo.CUT.depth)

        def make(pair: Pair, me: int) -> GlooCarrier:
            return GlooCarrier(pools[0], pair, me, 10.0)

        link = Link(StagedTransport("gloo", Endpoint.parse(server.endpoint), pools[0], 10.0, make, other))
        with pytest.raises(IncompatiblePeer, match="cut must be"):
            link.pull([BlockPull(0, 0, 1)], WHOLE)
        assert link.closed


@pytest.mark.parametrize(
    ("cut", "got"), [({}, "None"), ({"cut": asdict(gloo.CUT)}, r"{'message_bytes': \d+, 'depth': \d+}")]
)
def test_ends_of_a_version_that_knows_of_no_cut_or_packs_no_numbers_are_refused_by_name(cut: Message, got: str) -> None:
    """A request whose numbers were a list was no word of a refusal, but a fault of the link with each new peer."""
    pools = [KvPool(SLAB, 2, torch.float32, torch.device("cpu")) for _ in range(2)]
    terms = {**cut, **asdict(Terms.of(pools[1]))}

    def before(pair: Pair, first: Message) -> None:
        pair.send(terms)
        pair.next(None)

    with contextlib.closing(LinkServer("127.0.0.1", 10.0, {"gloo": before})) as server:
        link = gloo.link(server.endpoint, pools[0], 10.0)
        with pytest.raises(IncompatiblePeer, match=rf"cut must be .* got {got}$"):
            link.pull([BlockPull(0, 0, 1)], WHOLE)
    with contextlib.closing(gloo.serve(pools[1], "127.0.0.1", 10.0)) as server:
        where, closing = Endpoint.parse(server.endpoint), Closing()
        target = Pair(reach(where.host, where.port, where.token, 10.0, closing), closing)
        target.send({"scheme": "gloo", **terms})
        assert "cut" in target.next(10.0)
        with pytest.raises(LinkClosed, match=rf"IncompatiblePeer: cut must be .* got {got}$"):
            target.next(10.0)


class Noted(GlooCarrier):
    """A source's, which notes the threads that its reads begin on, and lets the first message's end be waited for."""

    def __init__(self, pool: KvPool, pair: Pair, me: int, threads: list[str], gone: threading.Event) -> None:
        super().__init__(pool, pair, me, 10.0)
        self._threads, self._gone = threads, gone
        self.num_gone = 0

    def begin(self, blocks: Sequence[int], piece: Piece) -> None:
        self._threads.append(threading.current_thread().name)
        super().begin(blocks, piece)

    def finish(self, sent: Work) -> None:
        super().finish(sent)
        self._gone.wait(10)
        self.num_gone += 1


def test_a_request_begins_on_the_thread_that_reads_it_and_one_that_comes_too_soon_on_the_one_that_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The target has all of a read before the source has seen that its last message is gone."""
    pools = [KvPool(SLAB, 10, torch.float32, torch.device("cpu")) for _ in range(2)]
    pools[1].tensor.normal_()
    cut, threads, gone = Cut(2 * SLAB.block_bytes, depth=2), list[str](), threading.Event()
    too_soon: list[Message] = []
    take_with = Pair.take_with

    def noting(pair: Pair, work: Callable[[Message], Taken]) -> None:
        def taken(message: Message) -> Taken:
            found = work(message)
            if isinstance(found, dict):
                too_soon.append(found)
            return found

        take_with(pair, taken)

    monkeypatch.setattr(Pair, "take_with", noting)
    carriers: list[Noted] = []

    def make_noted(pair: Pair, me: int) -> Noted:
        carriers.append(Noted(pools[1], pair, me, threads, gone))
        return carriers[-1]

    source = StagedSource(pools[1], make_noted, cut, None)
    with contextlib.closing(LinkServer("127.0.0.1", 10.0, {"gloo": source.answer})) as server:
        where = Endpoint.parse(server.endpoint)

        def make(pair: Pair, me: int) -> GlooCarrier:
            return GlooCarrier(pools[0], pair, me, 10.0)

        with contextlib.closing(Link(StagedTransport("gloo", where, pools[0], 10.0, make, cut))) as link:
            gone.set()
            while "link-control" not in threads:  # the first may come before anybody takes, others too soon
                link.pull([BlockPull(block, 0, block) for block in range(10)], WHOLE)
            assert torch.equal(pools[0].tensor[:10], pools[1].tensor[:10])
            while carriers[0].num_gone < 5 * len(threads):
                os.sched_yield()
            gone.clear()
            link.pull([BlockPull(0, 0, 1), BlockPull(1, 0, 0)], WHOLE)
            before = len(too_soon)
            with ThreadPoolExecutor(1) as pulling:
                third = pulling.submit(link.pull, [BlockPull(9, 0, 8)], WHOLE)
                while len(too_soon) == before:
                    os.sched_yield()
                gone.set()
                third.result(10)
            assert torch.equal(pools[0].tensor[:2].flip(0), pools[1].tensor[:2])
            assert torch.equal(pools[0].tensor[8], pools[1].tensor[9])
    assert threads[-1] != "link-control"


@pytest.mark.parametrize("num_early", [1, 2])
def test_a_peer_that_has_several_requests_open_is_answered_in_their_order(
    num_early: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ours never has. The last comes when the one before it has been taken and not begun: begun ahead of that, it would
    hold the turn that the thread which is to end it waits for."""
    pools = [KvPool(SLAB, 10, torch.float32, torch.device("cpu")) for _ in range(2)]
    pools[1].tensor.normal_()
    blocks = [[2 * number, 2 * number + 1] for number in range(num_early + 1)]
    numbers = [{"blocks": array("q", of).tobytes().hex(), "epochs": bytes(16).hex()} for of in blocks]
    requests: list[Message] = [{"piece": asdict(WHOLE), **of} for of in numbers]
    seen: list[Message] = []
    take_with, take = Pair.take_with, Pair.take

    def noting(pair: Pair, work: Callable[[Message], Taken]) -> None:
        def taken(message: Message) -> Taken:
            found = work(message)
            seen.append(message)
            return found

        take_with(pair, taken)

    def taking(pair: Pair, seconds: float | None) -> Taken:
        found = take(pair, seconds)
        if found == requests[-2]:
            target.send(requests[-1])
            while requests[-1] not in seen:
                os.sched_yield()
        return found

    def make(pair: Pair, me: int) -> GlooCarrier:
        carrier = GlooCarrier(pools[1], pair, me, 10.0)
        while pair._messages.qsize() < num_early:
            os.sched_yield()
        return carrier

    monkeypatch.setattr(Pair, "take_with", noting)
    monkeypatch.setattr(Pair, "take", taking)
    source = StagedSource(pools[1], make, gloo.CUT, None)
    with contextlib.closing(LinkServer("127.0.0.1", 10.0, {"gloo": source.answer})) as server:
        where, closing = Endpoint.parse(server.endpoint), Closing()
        target = Pair(reach(where.host, where.port, where.token, 10.0, closing), closing)
        target.send({"scheme": "gloo", "cut": gloo.CUT.told, **asdict(Terms.of(pools[0]))})
        target.next(10.0)
        carrier = GlooCarrier(pools[0], target, TARGET, 10.0)
        for request in requests[:-1]:
            target.send(request)
        for of in blocks:
            carrier.begin(of, WHOLE)
            content, coming = carrier.receive(slice(0, 2))
            assert target.next(10.0) == {"epochs": bytes(16).hex()}
            carrier.finish(coming)
            assert target.next(10.0) == {"epochs": bytes(16).hex()}
            assert torch.equal(content, pools[1].tensor[of])
