"""What a link does around its transport: formed once, closed once, let go when nobody uses it."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from headrace.errors import IncompatiblePeer, LinkClosed, StaleBlocks
from workers.kv.layout import Piece
from workers.kv.links.base import BlockPull
from workers.kv.links.closing import Closing
from workers.kv.links.link import Link

PIECE = Piece(0, 0, 0, 0, 1, 0, 0, 1)
BLOCKS = [BlockPull(0, 1, 0)]


class Recorded:
    """A transport that carries out what a test wants."""

    dear = False

    def __init__(self, forming: Callable[[], object] = int, moving: Callable[[], object] = int) -> None:
        self.calls: list[str] = []
        self._forming, self._moving = forming, moving

    def form(self, closing: Closing) -> None:
        self.calls.append("form")
        self._forming()

    def await_step(self, step: int) -> None:
        self.calls.append(f"await {step}")

    def begin(self, blocks: Sequence[BlockPull], piece: Piece) -> Callable[[], int]:
        def end() -> int:
            self.calls.append("transfer")
            self._moving()
            return 7

        return end

    def release(self) -> None:
        self.calls.append("release")


def fails_with(error: Exception) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


def test_it_is_formed_by_the_first_pull_and_let_go_once() -> None:
    transport = Recorded()
    link = Link(transport)
    assert transport.calls == []
    assert [link.pull(BLOCKS, PIECE).num_bytes for _ in range(2)] == [7, 7]
    link.close()
    link.close()
    assert transport.calls == ["form", "transfer", "transfer", "release"]
    with pytest.raises(LinkClosed, match="closed from this side"):
        link.pull(BLOCKS, PIECE)


def test_it_waits_for_a_step_of_the_source_before_it_reads() -> None:
    transport = Recorded()
    Link(transport).pull(BLOCKS, PIECE, after_step=7)
    assert transport.calls == ["form", "await 7", "transfer"]


@pytest.mark.parametrize("dear", [False, True])
def test_one_that_is_dear_to_keep_closes_when_nobody_pulls(dear: bool) -> None:
    transport = Recorded()
    transport.dear = dear
    link = Link(transport)
    link.rest()
    assert not link.closed
    link.pull(BLOCKS, PIECE)
    link.rest()
    assert link.closed is dear


def test_one_that_was_never_formed_has_nothing_to_let_go() -> None:
    transport = Recorded()
    Link(transport).close()
    assert transport.calls == []


def test_stale_blocks_leave_it_open() -> None:
    link = Link(Recorded(moving=fails_with(StaleBlocks("moved"))))
    for _ in range(2):
        with pytest.raises(StaleBlocks):
            link.pull(BLOCKS, PIECE)
    assert not link.closed


@pytest.mark.parametrize("error", [LinkClosed("gone"), IncompatiblePeer("other")])
def test_an_error_of_ours_goes_up_as_it_is_and_closes(error: Exception) -> None:
    transport = Recorded(forming=fails_with(error))
    link = Link(transport)
    with pytest.raises(type(error), match=str(error)):
        link.pull(BLOCKS, PIECE)
    assert transport.calls == ["form", "release"]


def test_any_other_error_closes_with_its_words() -> None:
    link = Link(Recorded(moving=fails_with(RuntimeError("CUDA driver: out"))))
    with pytest.raises(LinkClosed, match="RuntimeError: CUDA driver: out"):
        link.pull(BLOCKS, PIECE)
    assert link.closed


def test_what_is_closed_while_it_moves_is_let_go_after_it_has_moved() -> None:
    moving, go_on = threading.Event(), threading.Event()

    def move() -> None:
        moving.set()
        go_on.wait()

    transport = Recorded(moving=move)
    link = Link(transport)
    with ThreadPoolExecutor(1) as pool:
        pulling = pool.submit(link.pull, BLOCKS, PIECE)
        moving.wait()
        link.close()
        assert transport.calls == ["form", "transfer"]
        go_on.set()
        assert isinstance(pulling.exception(), LinkClosed)
    assert transport.calls == ["form", "transfer", "release"]


def test_a_pull_that_has_begun_holds_its_link_until_it_has_ended() -> None:
    transport = Recorded()
    link = Link(transport)
    end = link.begin(BLOCKS, PIECE)
    assert transport.calls == ["form"]
    link.close()
    assert transport.calls == ["form"], "it is still used"
    with pytest.raises(LinkClosed, match="closed from this side"):
        end()
    assert transport.calls == ["form", "transfer", "release"]
    with pytest.raises(LinkClosed):
        link.begin(BLOCKS, PIECE)
