"""What a link over NCCL finds in the environment, and how it goes about its staging. The link itself: tests/contract, with
two GPUs."""

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from workers.kv.layout import Piece, SlabLayout
from workers.kv.links.base import BlockPull
from workers.kv.links.endpoint import Endpoint
from workers.kv.links.group import PairGroup
from workers.kv.links.link import Link
from workers.kv.links.pair import Pair
from workers.kv.links.server import LinkServer
from workers.kv.links.staged import Cut, StagedSource, StagedTransport
from workers.kv.pool import KvPool

pytestmark = pytest.mark.torch


def test_nccl_which_reads_the_environment_with_its_first_message_finds_no_multicast(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nccl = pytest.importorskip("workers.kv.links.nccl", reason="triton is not installed")
    monkeypatch.delenv("NCCL_NVLS_ENABLE", raising=False)
    monkeypatch.setenv("TORCH_NCCL_ENABLE_MONITORING", "1")
    with nccl._as_we_need():
        assert os.environ["TORCH_NCCL_ENABLE_MONITORING"] == "0"
    assert os.environ["TORCH_NCCL_ENABLE_MONITORING"] == "1"
    assert os.environ["NCCL_NVLS_ENABLE"] == "0"


class LateCopy:
    """A BlockCopy over host memory that does nothing before it must: before what follows it on its stream, or is waited
    for. Naming other blocks before is what may not happen."""

    def __init__(self, device: torch.device, tile: object) -> None:
        self.stream = self
        self._started: list[Callable[[], object]] = []

    def number(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        assert not self._started, "nobody waited for the last"
        self._numbers = list(sources), list(targets)

    def start(self, source: Any, target: Any, part: slice, piece: Piece) -> None:
        sources, targets = (numbers[part] for numbers in self._numbers)
        taken = slice(piece.source_head, piece.source_head + piece.num_heads)
        given = slice(piece.target_head, piece.target_head + piece.num_heads)
        read, written = _memory(source, max(sources) + 1), _memory(target, max(targets) + 1)
        self._started.append(lambda: written[:, given].index_copy_(0, torch.tensor(targets), read[sources, taken]))

    def wait(self) -> None:
        started, self._started = self._started, []
        for copy in started:
            copy()


def _memory(slabs: Any, num_blocks: int) -> torch.Tensor:
    """[block, K, the rest], in bytes."""
    num_bytes = num_blocks * slabs.slab.block_bytes
    memory = (ctypes.c_char * num_bytes).from_address(slabs.address)
    return torch.frombuffer(memory, dtype=torch.uint8).view(num_blocks, slabs.slab.num_kv_heads, -1)


class Computing:
    """In the place of the stream that computes: who has waited for it. Both ends do, each on a thread of its own."""

    def __init__(self) -> None:
        self.waits: list[int] = []

    def synchronize(self) -> None:
        self.waits.append(threading.get_ident())


class GlooPair(PairGroup):
    """What a communicator is to a carrier, between pools in host memory."""

    def __init__(self, pair: Pair, me: int) -> None:
        super().__init__(pair, me, 10.0)
        self.staging: list[torch.Tensor] = []


def test_a_message_goes_out_behind_its_gather_and_comes_into_its_room_behind_the_last_ones_scatter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nccl = pytest.importorskip("workers.kv.links.nccl", reason="triton is not installed")
    slab = SlabLayout(num_kv_heads=2, num_layers=1, block_size=4, head_dim=2, element_bytes=4)
    pools = [KvPool(slab, 32, torch.float32, torch.device("cpu")) for _ in range(2)]
    pools[0].tensor.normal_()
    monkeypatch.setattr(nccl, "BlockCopy", LateCopy)
    cut = Cut(4 * slab.block_bytes, depth=3)

    @contextlib.contextmanager
    def behind(stream: LateCopy) -> Iterator[None]:
        stream.wait()
        yield

    monkeypatch.setattr(torch.cuda, "stream", behind)
    computing, made = Computing(), list[GlooPair]()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: computing)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)

    def carriers(pool: KvPool) -> Callable[[Pair, int], Any]:
        def make(pair: Pair, me: int) -> Any:
            made.append(GlooPair(pair, me))
            return nccl.NcclCarrier(pool, made[-1], me, nccl.Settings(cut))

        return make

    source = StagedSource(pools[0], carriers(pools[0]), cut, None)
    with contextlib.closing(LinkServer("127.0.0.1", 10.0, {"late": source.answer})) as server:
        where = Endpoint.parse(server.endpoint)
        link = Link(StagedTransport("late", where, pools[1], 10.0, carriers(pools[1]), cut, dear=True))
        with contextlib.closing(link):
            link.pull([BlockPull(block, 0, 31 - block) for block in range(32)], Piece(0, 0, 0, 0, 2, 0, 0, 1))
            assert torch.equal(pools[1].tensor[:32].flip(0), pools[0].tensor[:32])
            pools[1].tensor.zero_()
            link.pull([BlockPull(block, 0, block) for block in range(0, 32, 3)], Piece(0, 0, 1, 0, 1, 0, 0, 1))
            assert torch.equal(pools[1].tensor[:32:3, 0], pools[0].tensor[:32:3, 1])
            assert not pools[1].tensor[:32, 1].any()
            assert not pools[1].tensor[1:32:3].any()
            num_staged = sum(len(pair.staging) for pair in made)
            assert len(computing.waits) == num_staged == 6, "a step may still use memory that it has given back"


def test_numbers_of_blocks_are_in_memory_of_the_stream_that_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that another stream has given back may be in use there still."""
    block_copy = pytest.importorskip("workers.kv.links.block_copy", reason="triton is not installed")
    empty, on = torch.empty, list[object]()
    of: list[object] = []

    class Stream:
        def __init__(self, device: torch.device, priority: int) -> None:
            pass

        @staticmethod
        def priority_range() -> tuple[int, int]:
            return 0, -1

    @contextlib.contextmanager
    def stream(which: object) -> Iterator[None]:
        on.append(which)
        yield
        on.pop()

    def made(*shape: int, **kind: Any) -> torch.Tensor:
        of.append(on[-1] if on else None)
        return empty(*shape, **kind)

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", object)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(torch, "empty", made)
    copying = block_copy.BlockCopy(torch.device("cpu"))
    assert of == [copying.stream]
