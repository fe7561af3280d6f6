"""All links by which one rank reads from peers: formed on first use, one thread a peer worker."""

import logging
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from queue import Empty, SimpleQueue

from headrace.errors import HeadraceError, IncompatiblePeer, InternalError, LinkClosed
from headrace.values import ParallelLayout
from workers.kv.layout import ModelShape, Piece, reshard_plan
from workers.kv.links.base import BlockPull, KvLink, PeerRanks, PullReceipt
from workers.kv.links.schemes import connect
from workers.kv.pool import KvPool

log = logging.getLogger(__name__)

Done = Callable[[PullReceipt | HeadraceError], None]
Job = tuple[PeerRanks, tuple[Piece, ...], Sequence[BlockPull], int, Done]

IDLE_SECONDS = 60.0


@lru_cache(maxsize=64)
def pieces_of(shape: ModelShape, source: ParallelLayout, target: ParallelLayout, rank: int) -> tuple[Piece, ...]:
    """What `rank` of the target reads."""
    return tuple(piece for piece in reshard_plan(shape, source, target) if piece.target_rank == rank)


class PeerLinks:
    """Owns the links of one rank. A pull waits only for earlier ones from the same peer: a silent peer holds up nobody
    else. Once `done` is called, the pull writes nothing more."""

    def __init__(
        self, pool: KvPool, endpoint: str, rank: int, layout: ParallelLayout, shape: ModelShape, seconds: float
    ) -> None:
        """`endpoint` is where `pool` can be read, by which the links to each peer are chosen."""
        self._pool = pool
        self._endpoint = endpoint
        self._rank = rank
        self._layout = layout
        self._shape = shape
        self._seconds = seconds
        self._lock = threading.Lock()
        self._peers: dict[tuple[str, int], _Peer] = {}
        self._closed = False

    def pull(self, peer: PeerRanks, blocks: Sequence[BlockPull], done: Done, after_step: int = 0) -> None:
        """Returns at once; `done` is called once, from another thread or from this one."""
        try:
            pieces = pieces_of(self._shape, peer.layout, self._layout, self._rank)
            if len(peer.endpoints) != peer.layout.world_size:
                raise IncompatiblePeer(
                    f"a peer of {peer.layout} must have {peer.layout.world_size} endpoints, got {len(peer.endpoints)}",
                    field="endpoints",
                )
        except IncompatiblePeer as error:
            done(error)
            return
        with self._lock:
            if not self._closed:
                known = self._peers.get(peer.key)
                if known is None:
                    known = self._peers[peer.key] = _Peer(self._pool, self._endpoint, self._seconds, peer.key)
                known.jobs.put((peer, pieces, blocks, after_step, done))
                return
        done(LinkClosed("link closed: this rank is closing"))

    def close_peer(self, key: tuple[str, int]) -> None:
        """Pulls from this peer, under way and queued, fail with LinkClosed; a later one forms new links."""
        with self._lock:
            peer = self._peers.pop(key, None)
        if peer is not None:
            peer.close()

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            self._closed = True
            peers = list(self._peers.values())
            self._peers.clear()
        for peer in peers:
            peer.close()


class _Peer:
    """One peer worker: a queue of pulls, the thread that carries them out, a link for each source rank it read from."""

    def __init__(self, pool: KvPool, endpoint: str, seconds: float, key: tuple[str, int]) -> None:
        self.jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._pool = pool
        self._endpoint = endpoint
        self._seconds = seconds
        self._lock = threading.Lock()
        self._links: dict[int, KvLink] = {}
        self._closed = False
        threading.Thread(target=self._work, name=f"pull:{key[0]}", daemon=True).start()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            links = list(self._links.values())
            self._links.clear()
        self.jobs.put(None)
        for link in links:
            link.close()

    def _work(self) -> None:
        while (job := self._next()) is not None:
            peer, pieces, blocks, after_step, done = job
            try:
                outcome: PullReceipt | HeadraceError = self._pull(peer, pieces, blocks, after_step)
            except HeadraceError as error:
                outcome = error
            except Exception as error:
                log.exception("a pull failed")
                outcome = InternalError(f"{type(error).__name__}: {error}")
            done(outcome)

    def _next(self) -> Job | None:
        while True:
            try:
                return self.jobs.get(timeout=IDLE_SECONDS)
            except Empty:
                with self._lock:
                    links = list(self._links.values())
                for link in links:
                    link.rest()

    def _pull(
        self, peer: PeerRanks, pieces: tuple[Piece, ...], blocks: Sequence[BlockPull], after_step: int
    ) -> PullReceipt:
        # Whoever still reads these blocks from here, as what they were, must find out before they change.
        self._pool.set_epochs((b.target, b.target_epoch) for b in blocks if b.target_epoch is not None)
        if len({piece.source_rank for piece in pieces}) == len(pieces):
            receipts = self._at_once(peer, pieces, blocks, after_step)
            seconds = max(receipt.seconds for receipt in receipts)
        else:  # a link carries out one pull at a time
            receipts = [self._link(peer, piece.source_rank).pull(blocks, piece, after_step) for piece in pieces]
            seconds = sum(receipt.seconds for receipt in receipts)
        return PullReceipt(len(blocks), sum(receipt.num_bytes for receipt in receipts), seconds)

    def _at_once(
        self, peer: PeerRanks, pieces: tuple[Piece, ...], blocks: Sequence[BlockPull], after_step: int
    ) -> list[PullReceipt]:
        """From all ranks that have a piece; whatever fails, what has begun is over when this raises."""
        ends: list[Callable[[], PullReceipt]] = []
        failed: list[Exception] = []
        receipts: list[PullReceipt] = []
        for piece in pieces:
            try:
                ends.append(self._link(peer, piece.source_rank).begin(blocks, piece, after_step))
            except Exception as error:
                failed.append(error)
                break
        for end in ends:
            try:
                receipts.append(end())
            except Exception as error:
                failed.append(error)
        if failed:
            raise failed[0]
        return receipts

    def _link(self, peer: PeerRanks, source_rank: int) -> KvLink:
        with self._lock:
            if self._closed:
                raise LinkClosed(f"link closed: links to {peer.worker_id} were closed from this side")
            link = self._links.get(source_rank)
            if link is None or link.closed:
                theirs = peer.endpoints[source_rank]
                link = self._links[source_rank] = connect(self._endpoint, theirs, self._pool, self._seconds)
            return link
