"""A KvLink for pools in the memory of GPUs of one machine: the target maps the source's pool and reads it by itself.

The source takes no part beyond handing out its memory. A kernel of few thread blocks, on a stream of high priority, reads
the peer's blocks and writes our own; when it has ended, the epoch words are read, from memory that both processes map.
A source that dies, stops or hangs cannot hold the reader up: what is mapped stays readable, as it was.
"""

import logging
import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch

from headrace.errors import IncompatiblePeer
from kernels.tuning import PullTile
from workers.kv.channel import UNIX, Channel, ChannelClosed, Listener
from workers.kv.device_memory import MappedMemory
from workers.kv.layout import Piece, SlabLayout
from workers.kv.links.base import BlockPull, KvServer
from workers.kv.links.block_copy import BlockCopy, Slabs
from workers.kv.links.closing import Closing, abandonable
from workers.kv.links.endpoint import Endpoint, Place, this_machine
from workers.kv.links.link import Link
from workers.kv.links.pair import Message, Pair, reach
from workers.kv.links.server import Answer, LinkServer
from workers.kv.links.terms import ReadHook, Terms, check_epochs, check_read
from workers.kv.pool import Exportable, KvPool
from workers.kv.shared_words import map_words

log = logging.getLogger(__name__)

SCHEME = "nvlink"
LOOK_SECONDS = 5e-5  # a look takes a hundredth of this


def place_of(pool: KvPool) -> Place:
    return Place(this_machine(), f"GPU-{torch.cuda.get_device_properties(pool.tensor.device).uuid}")


def answer(pool: KvPool, seconds: float) -> Answer:
    """The source's end of each link. `seconds` bounds the steps of forming it."""
    return NvlinkSource(pool, seconds).answer


def serve(pool: KvPool, host: str, seconds: float) -> KvServer:
    """Opens `pool` to peers on this machine, over nvlink alone."""
    return LinkServer(host, seconds, {SCHEME: answer(pool, seconds)}, place_of(pool))


def link(endpoint: str, pool: KvPool, seconds: float, hook: ReadHook | None = None) -> Link:
    """Reads into `pool`, which is in the memory of this process's GPU. `seconds` bounds forming."""
    return Link(NvlinkTransport(Endpoint.parse(endpoint), pool, seconds, hook))


class NvlinkSource:
    """What the source's end of a link does: hands out the pool's memory once, and stays to be heard of when it ends."""

    def __init__(self, pool: KvPool, seconds: float) -> None:
        self._pool = pool
        self._seconds = seconds

    def answer(self, pair: Pair, first: Message) -> None:
        pool, terms = self._pool, Terms.of(self._pool)
        exportable = _exportable(pool)
        name, token = f"{UNIX}headrace-{secrets.token_hex(8)}", secrets.token_urlsafe(16)
        listener = Listener(name, token, lambda channel: _hand_out(channel, exportable))
        forget = pair.closing.on_close(listener.close)
        pair.send(
            {
                **asdict(terms),
                "slab": asdict(pool.slab),
                "num_blocks": pool.num_blocks,
                "num_bytes": exportable.blocks.num_bytes,
                "handles": {"host": name, "port": 0, "token": token},
            }
        )
        terms.check(first)
        pair.next(2 * self._seconds)  # it is mapped
        listener.close()
        forget()
        pair.next(None)


def _exportable(pool: KvPool) -> Exportable:
    if pool.exportable is None:
        raise IncompatiblePeer("a pool in host memory has no nvlink", field="endpoint")
    return pool.exportable


def _hand_out(channel: Channel, exportable: Exportable) -> None:
    descriptors = [exportable.blocks.export(), exportable.words.export()]
    try:
        channel.send_descriptors(b"", descriptors)
    except ChannelClosed as error:
        log.info("a link's target left before it was given the memory: %s", error)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
        channel.close()


@dataclass(frozen=True, slots=True)
class Mapped:
    """A source's pool as this process sees it. `words`: an epoch a block, and last the plan whose writes are done."""

    slab: SlabLayout
    num_blocks: int
    blocks: MappedMemory
    words: memoryview


class NvlinkTransport:
    """The target's end. Owns the mapping of the peer's memory, and a stream."""

    dear = False

    def __init__(
        self,
        where: Endpoint,
        pool: KvPool,
        seconds: float,
        hook: ReadHook | None = None,
        tile: PullTile | None = None,
    ) -> None:
        self._where = where
        self._pool = pool
        self._seconds = seconds
        self._hook = hook
        self._copying = BlockCopy(pool.tensor.device, tile)
        self._own = Slabs(pool.tensor.data_ptr(), pool.slab)
        self.mapped: Mapped | None = None

    def form(self, closing: Closing) -> None:
        began = time.perf_counter()
        self._closing = closing
        where, terms = self._where, Terms.of(self._pool)
        pair = Pair(reach(where.host, where.port, where.token, self._seconds, closing), closing)
        pair.send({"scheme": SCHEME, **asdict(terms)})
        theirs = pair.next(self._seconds)
        terms.check(theirs)
        channel = reach(**theirs["handles"], seconds=self._seconds, closing=closing)
        try:
            _, (blocks, epochs) = channel.receive_descriptors(2, self._seconds)
        except ChannelClosed as error:
            closing.close(f"the peer did not hand out its memory: {error}")
            raise closing.error() from error
        finally:
            channel.close()
        words = map_words(epochs)
        device = self._pool.tensor.device
        try:
            memory = MappedMemory.of_descriptor(blocks, theirs["num_bytes"], device.index)
        except RuntimeError as error:
            raise IncompatiblePeer(
                f"{torch.cuda.get_device_name(device)} cannot map the memory of {where.place.device}: {error}",
                field="endpoint",
            ) from error
        self.mapped = Mapped(SlabLayout(**theirs["slab"]), theirs["num_blocks"], memory, words)
        pair.send({"mapped": True})
        log.info("mapped %d MiB of a peer in %.1f ms", memory.num_bytes >> 20, (time.perf_counter() - began) * 1e3)

    def await_step(self, step: int) -> None:
        """Looks again and again: what sets the word is the source's device, which can wake nobody here."""
        assert self.mapped is not None
        words = self.mapped.words
        last = len(words) - 1
        while words[last] < step:
            if self._closing.closed:
                raise self._closing.error()
            time.sleep(LOOK_SECONDS)

    def begin(self, blocks: Sequence[BlockPull], piece: Piece) -> Callable[[], int]:
        """What is done beside the kernel is done for all blocks at once: a third of the time of a short pull is here."""
        assert self.mapped is not None
        source = self.mapped
        sources, epochs, targets, _ = zip(*blocks, strict=True)
        check_read(source.slab, source.num_blocks, piece, sources)
        self._check_epochs(blocks, sources, epochs)
        wait = self._copying.begin(Slabs(source.blocks.address, source.slab), self._own, sources, targets, piece)

        def end() -> int:
            wait()
            if self._hook is not None:
                for index in range(len(blocks)):
                    abandonable(partial(self._hook, index), self._closing)
            self._check_epochs(blocks, sources, epochs)
            return len(blocks) * piece.num_bytes(self._pool.slab)

        return end

    def _check_epochs(self, blocks: Sequence[BlockPull], sources: tuple[int, ...], epochs: tuple[int, ...]) -> None:
        assert self.mapped is not None
        found = tuple(map(self.mapped.words.__getitem__, sources))
        if found != epochs:
            check_epochs(blocks, found)

    def release(self) -> None:
        if self.mapped is not None:
            mapped, self.mapped = self.mapped, None
            mapped.blocks.close()
