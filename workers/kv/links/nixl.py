"""A KvLink over NIXL reads, for clusters that run it already and for pools that change often: RDMA where the fabric has it,
TCP and shared memory elsewhere. Needs the extra `rdma`; serves pools in host memory and on GPUs alike.

The source registers its pool and its epoch words and takes no part in a read beyond what the transport under NIXL makes
of it. The target reads into staging of its own, and copies from there: a read that is given up may still arrive, and must
not arrive in the pool. Each link is an agent of its own, and ends with it.
"""

import base64
import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.errors import IncompatiblePeer
from workers.kv.layout import Piece, SlabLayout
from workers.kv.links.base import BlockPull, KvServer
from workers.kv.links.closing import Closing, abandonable
from workers.kv.links.endpoint import Endpoint
from workers.kv.links.link import Link
from workers.kv.links.pair import Message, Pair, reach
from workers.kv.links.server import Answer, LinkServer
from workers.kv.links.staged import Cut
from workers.kv.links.terms import ReadHook, Terms, check_epochs, check_read
from workers.kv.pool import KvPool
from workers.kv.shared_words import WORD_BYTES

SCHEME = "nixl"
MESSAGE_BYTES = 16 * 2**20
CUT = Cut(MESSAGE_BYTES, depth=1)
LOOK_SECONDS = 5e-5

Descriptors = NDArray[np.uint64]  # [n, 3]: address, bytes, device

_numbers = itertools.count(1)


def answer(pool: KvPool, seconds: float) -> Answer:
    """The source's end of each link."""
    return NixlSource(pool, seconds).answer


def serve(pool: KvPool, host: str, seconds: float) -> KvServer:
    """Opens `pool` to peers, over NIXL alone. `seconds` bounds the steps of forming a link."""
    return LinkServer(host, seconds, {SCHEME: answer(pool, seconds)})


def link(endpoint: str, pool: KvPool, seconds: float, hook: ReadHook | None = None) -> Link:
    """Reads into `pool`. `seconds` bounds forming, and each message."""
    return Link(NixlTransport(Endpoint.parse(endpoint), pool, seconds, hook))


class Agent:
    """A NIXL agent and what it has registered. One thread at a time; close() lets go of everything."""

    def __init__(self) -> None:
        os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
        from nixl._api import nixl_agent, nixl_agent_config

        self._agent: Any = nixl_agent(f"headrace-{os.getpid()}-{next(_numbers)}", nixl_agent_config(backends=["UCX"]))
        self._registered: list[tuple[Any, Tensor]] = []
        self._peer: str | None = None

    def register(self, memory: Tensor) -> None:
        self._registered.append((self._agent.register_memory(memory), memory))

    @property
    def metadata(self) -> str:
        return base64.b64encode(self._agent.get_agent_metadata()).decode()

    def meet(self, metadata: str) -> None:
        name = self._agent.add_remote_agent(base64.b64decode(metadata))
        self._peer = name.decode() if isinstance(name, bytes) else name

    def read(self, here: Descriptors, there: Descriptors, kinds: tuple[str, str], wait: Callable[[], None]) -> None:
        """Every part from there to here. `wait` is called between looks; what it raises gives the read up."""
        mine = self._agent.get_xfer_descs(here, kinds[0])
        theirs = self._agent.get_xfer_descs(there, kinds[1])
        handle = self._agent.initialize_xfer("READ", mine, theirs, self._peer)
        try:
            state = self._agent.transfer(handle)
            while state == "PROC":
                wait()
                state = self._agent.check_xfer_state(handle)
        finally:
            self._agent.release_xfer_handle(handle)
        if state != "DONE":
            raise RuntimeError(f"a read ended as {state}")

    def close(self) -> None:
        with contextlib.suppress(Exception):  # of a peer that is gone: nothing more is wanted of it
            if self._peer is not None:
                self._agent.remove_remote_agent(self._peer)
        with contextlib.suppress(Exception):
            for registered, _ in self._registered:
                self._agent.deregister_memory(registered)
        self._agent = None
        self._registered.clear()


class NixlSource:
    """What the source's end of a link does: says where the pool lies, and stays to be heard of when it ends."""

    def __init__(self, pool: KvPool, seconds: float) -> None:
        self._pool = pool
        self._seconds = seconds
        self._making = threading.Lock()
        self._agent: Agent | None = None

    def answer(self, pair: Pair, first: Message) -> None:
        pool, terms = self._pool, Terms.of(self._pool)
        pair.send(
            {
                **asdict(terms),
                "slab": asdict(pool.slab),
                "num_blocks": pool.num_blocks,
                "agent": self._registered().metadata,
                "blocks": [pool.tensor.data_ptr(), max(pool.tensor.get_device(), 0), _kind(pool.tensor)],
                "epochs": pool.epochs.data_ptr(),
            }
        )
        terms.check(first)
        pair.next(None)

    def _registered(self) -> Agent:
        with self._making:
            if self._agent is None:
                self._agent = Agent()
                self._agent.register(self._pool.tensor)
                self._agent.register(self._pool.epochs)
            return self._agent


class NixlTransport:
    """The target's end. Owns an agent, staging for one message, and room for epoch words."""

    dear = False

    def __init__(self, where: Endpoint, pool: KvPool, seconds: float, hook: ReadHook | None = None) -> None:
        self._where = where
        self._pool = pool
        self._seconds = seconds
        self._hook = hook
        self._agent: Agent | None = None

    def form(self, closing: Closing) -> None:
        self._closing = closing
        where, terms = self._where, Terms.of(self._pool)
        pair = Pair(reach(where.host, where.port, where.token, self._seconds, closing), closing)
        pair.send({"scheme": SCHEME, **asdict(terms)})
        theirs = pair.next(self._seconds)
        terms.check(theirs)
        self._slab, self._num_blocks = SlabLayout(**theirs["slab"]), int(theirs["num_blocks"])
        self._source, self._device, self._source_kind = theirs["blocks"]
        self._source_epochs = int(theirs["epochs"])
        self._staging = torch.empty(0, dtype=torch.uint8, device=self._pool.tensor.device)
        self._words = torch.empty(0, dtype=torch.int64)

        def meet() -> Agent:
            agent = Agent()
            agent.meet(theirs["agent"])
            return agent

        self._agent = abandonable(meet, closing)

    def await_step(self, step: int) -> None:
        raise IncompatiblePeer(f"nixl awaits no steps, was asked for plan {step}", field="after_step")

    def begin(self, blocks: Sequence[BlockPull], piece: Piece) -> Callable[[], int]:
        """One message at a time, each waited for: nothing of it is ahead."""
        return partial(self._transfer, blocks, piece)

    def _transfer(self, blocks: Sequence[BlockPull], piece: Piece) -> int:
        sources = [block.source for block in blocks]
        targets = [block.target for block in blocks]
        check_read(self._slab, self._num_blocks, piece, sources)
        self._check_epochs(blocks, sources)
        block_bytes = piece.num_bytes(self._pool.slab)
        for part in CUT.parts(len(blocks), block_bytes):
            content = self._read(sources[part], piece, block_bytes)
            if self._hook is not None:
                for index in range(part.start, part.stop):
                    abandonable(partial(self._hook, index), self._closing)
            self._pool.write(targets[part], piece, content)
            self._pool.settle()
        self._check_epochs(blocks, sources)
        return len(blocks) * block_bytes

    def _read(self, sources: Sequence[int], piece: Piece, block_bytes: int) -> Tensor:
        """The piece of each block, as it lies in a message."""
        num_bytes = len(sources) * block_bytes
        if self._staging.numel() < num_bytes:
            room = max(num_bytes, min(MESSAGE_BYTES, self._pool.tensor.nbytes))
            self._staging = torch.empty(room, dtype=torch.uint8, device=self._pool.tensor.device)
            self._pool.settle()  # a step may have given this memory back before its kernels ran
            self._own.register(self._staging)
        offsets, run_bytes = runs(self._slab, piece)
        there = np.add.outer(np.array(sources, dtype=np.uint64) * np.uint64(self._slab.block_bytes), offsets).ravel()
        here = np.arange(len(there), dtype=np.uint64) * np.uint64(run_bytes)
        kinds = _kind(self._staging), self._source_kind
        mine = _descriptors(here + np.uint64(self._staging.data_ptr()), run_bytes, max(self._staging.get_device(), 0))
        self._own.read(
            mine, _descriptors(there + np.uint64(self._source), run_bytes, self._device), kinds, self._waiting()
        )
        slab = self._pool.slab
        shape = (len(sources), piece.num_heads, piece.num_layers, 2, slab.block_size, slab.head_dim)
        return self._staging[:num_bytes].view(self._pool.tensor.dtype).view(shape)

    def _check_epochs(self, blocks: Sequence[BlockPull], sources: Sequence[int]) -> None:
        count = len(sources)
        if self._words.numel() < count:
            self._words = torch.empty(2 * count, dtype=torch.int64)
            self._own.register(self._words)
        here = np.arange(count, dtype=np.uint64) * np.uint64(WORD_BYTES) + np.uint64(self._words.data_ptr())
        there = np.array(sources, dtype=np.uint64) * np.uint64(WORD_BYTES) + np.uint64(self._source_epochs)
        both = _descriptors(here, WORD_BYTES, 0), _descriptors(there, WORD_BYTES, 0)
        self._own.read(*both, ("DRAM", "DRAM"), self._waiting())
        check_epochs(blocks, self._words[:count].tolist())

    @property
    def _own(self) -> Agent:
        assert self._agent is not None
        return self._agent

    def _waiting(self) -> Callable[[], None]:
        deadline = time.monotonic() + self._seconds

        def wait() -> None:
            if time.monotonic() > deadline:
                self._closing.close(f"a read took more than {self._seconds:g} s")
            if self._closing.closed:
                raise self._closing.error()
            time.sleep(LOOK_SECONDS)

        return wait

    def release(self) -> None:
        """On a thread of its own: the transport may wait for a peer that is gone."""
        agent, self._agent = self._agent, None
        self._staging = self._words = torch.empty(0)  # the agent keeps what may still be written until it is closed
        if agent is not None:
            threading.Thread(target=agent.close, name="link-end", daemon=True).start()


def runs(slab: SlabLayout, piece: Piece) -> tuple[Descriptors, int]:
    """The contiguous runs of a piece in a block of the source: offsets in bytes, and the bytes of each."""
    layer_bytes = slab.layer_stride * slab.element_bytes
    if piece.num_layers == slab.num_layers:
        first, count, run_bytes = (
            piece.source_head * slab.num_layers * layer_bytes,
            1,
            piece.num_heads * slab.num_layers,
        )
    else:
        first = (piece.source_head * slab.num_layers + piece.source_layer) * layer_bytes
        count, run_bytes = piece.num_heads, piece.num_layers
    steps = np.arange(count, dtype=np.uint64) * np.uint64(slab.num_layers * layer_bytes)
    return steps + np.uint64(first), run_bytes * layer_bytes


def _descriptors(addresses: NDArray[np.uint64], num_bytes: int, device: int) -> Descriptors:
    found = np.empty((len(addresses), 3), dtype=np.uint64)
    found[:, 0], found[:, 1], found[:, 2] = addresses, num_bytes, device
    return found


def _kind(memory: Tensor) -> str:
    return "VRAM" if memory.device.type == "cuda" else "DRAM"


def installed() -> bool:
    """Whether the extra is there."""
    import importlib.util

    return importlib.util.find_spec("nixl") is not None
