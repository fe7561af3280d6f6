"""What a link over mapped memory does around its kernel: between host memory of this process. The kernel and the mapping:
tests/contract and tests/gpu, with GPUs."""

import importlib
import importlib.util
import sys
import threading
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from headrace.errors import LinkClosed, StaleBlocks
from workers.kv.layout import Piece, SlabLayout
from workers.kv.links.base import BlockPull
from workers.kv.links.closing import Closing
from workers.kv.links.endpoint import Endpoint
from workers.kv.links.link import Link
from workers.kv.pool import KvPool

pytestmark = pytest.mark.torch

SLAB = SlabLayout(num_kv_heads=1, num_layers=1, block_size=4, head_dim=2, element_bytes=4)
WHOLE = Piece(0, 0, 0, 0, 1, 0, 0, 1)
PULLS = [BlockPull(block, 5, block) for block in range(3)]


class Copying:
    """In the place of the kernel: `meanwhile` is what happens while it runs."""

    def __init__(self, meanwhile: Callable[[], object]) -> None:
        self.meanwhile = meanwhile
        self.num_begun = 0

    def begin(self, *asked: object) -> Callable[[], object]:
        self.num_begun += 1
        return lambda: self.meanwhile()


class Memory:
    address = 0
    num_closed = 0

    def close(self) -> None:
        self.num_closed += 1


@pytest.fixture
def nvlink(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """On a host without CUDA too: what allocates there is not asked."""
    pytest.importorskip("triton", reason="triton is not installed")
    lacks_cuda = importlib.util.find_spec("cuda") is None
    if lacks_cuda:
        monkeypatch.setitem(sys.modules, "workers.kv.device_memory", SimpleNamespace(MappedMemory=Memory))
    yield importlib.import_module("workers.kv.links.nvlink")
    if lacks_cuda:
        del sys.modules["workers.kv.links.nvlink"]
        monkeypatch.delattr("workers.kv.links.nvlink")


def mapped(
    nvlink: ModuleType, monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[], object] = int
) -> tuple[Link, Any]:
    """A link whose source's words are a test's: epoch 5 of each of its blocks, and last the plan that is done."""
    source = SimpleNamespace(words=array("q", [5] * 4 + [0]), memory=Memory(), copying=Copying(meanwhile))

    class Mapped(nvlink.NvlinkTransport):  # type: ignore[misc,name-defined]
        def form(self, closing: Closing) -> None:
            self._closing = closing
            self.mapped = nvlink.Mapped(SLAB, 4, source.memory, memoryview(source.words))

    monkeypatch.setattr(nvlink, "BlockCopy", lambda device, tile: source.copying)
    pool = KvPool(SLAB, 4, torch.float32, torch.device("cpu"))
    return Link(Mapped(Endpoint.parse("nvlink://token@127.0.0.1:1"), pool, 10.0)), source


def test_a_read_that_raced_with_the_end_of_a_pin_is_discarded(
    nvlink: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The block had its old epoch when the kernel began, and another owner when it ended. The link is none the worse."""
    link, source = mapped(nvlink, monkeypatch, lambda: source.words.__setitem__(1, 6))
    with pytest.raises(StaleBlocks, match="block 1 is at epoch 6, was asked for at 5"):
        link.pull(PULLS, WHOLE)
    assert source.copying.num_begun == 1, "it was read"
    assert not link.closed
    source.words[1] = 5
    source.copying.meanwhile = int
    assert link.pull(PULLS, WHOLE).num_bytes == 3 * SLAB.block_bytes


def test_blocks_that_have_changed_hands_before_are_not_read(
    nvlink: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, source = mapped(nvlink, monkeypatch)
    source.words[2] = 9
    with pytest.raises(StaleBlocks, match="block 2"):
        link.pull(PULLS, WHOLE)
    assert source.copying.num_begun == 0


def test_nothing_is_read_before_the_plan_that_writes_it_is_done(
    nvlink: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked, link, source = threading.Event(), *mapped(nvlink, monkeypatch)
    monkeypatch.setattr(nvlink.time, "sleep", lambda seconds: looked.set())
    with ThreadPoolExecutor(1) as pulling:
        pull = pulling.submit(link.pull, PULLS, WHOLE, after_step=7)
        try:
            assert looked.wait(10)
            assert source.copying.num_begun == 0
        finally:
            source.words[-1] = 7
        assert pull.result(10).num_blocks == 3


def test_a_plan_that_is_never_done_is_waited_for_no_longer_than_the_link_is_open(
    nvlink: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its source is stopped or dead: nothing else would end it. What it had mapped is let go then."""
    looked, link, source = threading.Event(), *mapped(nvlink, monkeypatch)
    monkeypatch.setattr(nvlink.time, "sleep", lambda seconds: looked.set())
    with ThreadPoolExecutor(1) as pulling:
        pull = pulling.submit(link.pull, PULLS, WHOLE, after_step=7)
        assert looked.wait(10)
        link.close()
        try:
            with pytest.raises(LinkClosed, match="closed from this side"):
                pull.result(10)
        finally:
            source.words[-1] = 7
    assert source.copying.num_begun == 0
    assert source.memory.num_closed == 1
