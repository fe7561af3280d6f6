"""The contract of a KvLink: one rank reads blocks of one peer rank's pool into its own (design 5.3).

Only its owner writes a pool: the target pulls. A link belongs to one pair of ranks and one epoch of their connection;
it is disposable: after any error or timeout it is closed for good on both ends, and a new one is formed. A pull counts
only if the source's epoch word of every block is unchanged after the read.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from headrace.values import ParallelLayout
from workers.kv.layout import Piece


@dataclass(frozen=True, slots=True)
class PeerRanks:
    """A peer worker as a place to read from: one endpoint per rank, in rank order."""

    worker_id: str
    generation: int
    layout: ParallelLayout
    endpoints: tuple[str, ...]
    node: str = ""

    @property
    def key(self) -> tuple[str, int]:
        return (self.worker_id, self.generation)


class BlockPull(NamedTuple):
    """Read block `source` as it was at `epoch` into block `target`. Numbers are indices in the two pools.

    `target_epoch`, where given, is set in our pool before `target` is written: who still reads the block as what it was
    finds out. The plan that makes it known to the steps (StepPlan.fresh) may come later.
    """

    source: int
    epoch: int
    target: int
    target_epoch: int | None = None


@dataclass(frozen=True, slots=True)
class PullReceipt:
    """What a pull moved, and how long it took on the slowest rank that took part."""

    num_blocks: int
    num_bytes: int
    seconds: float


class KvLink(Protocol):
    """The reading end. One pull at a time; `close` may come from any thread and ends a pull that is under way."""

    @property
    def closed(self) -> bool: ...

    def pull(self, blocks: Sequence[BlockPull], piece: Piece, after_step: int = 0) -> PullReceipt:
        """Reads the piece of every block, once the source has done the plan `after_step` (not 0 only where the choice of
        the link says that it awaits steps); the receipt's seconds begin there. Blocks the calling thread, never an event
        loop; returns when the bytes are in our pool and visible to what is launched on the compute stream afterwards.

        Raises StaleBlocks when an epoch had moved (the target blocks' content is then undefined; the link stays
        usable), LinkClosed when the link closed, timed out or failed (it is then closed for good).
        """
        ...

    def begin(self, blocks: Sequence[BlockPull], piece: Piece, after_step: int = 0) -> Callable[[], PullReceipt]:
        """A pull in two parts, of which the first waits for no bytes: pulls over other links may begin before the function
        returned is called, on the same thread, which it must be. Both raise as pull does."""
        ...

    def rest(self) -> None:
        """Nobody has pulled for a while, and nobody does just now: a link that holds what is missed elsewhere closes."""
        ...

    def close(self) -> None:
        """Idempotent. A pull under way raises LinkClosed within a second, whatever the peer does."""
        ...


class KvServer(Protocol):
    """The readable end of one rank: lets peers' links read its pool for as long as it is open."""

    @property
    def endpoint(self) -> str:
        """What a peer's `connect` needs, such as "gloo://10.0.0.1:4711"."""
        ...

    def close(self) -> None:
        """Idempotent. Ends all links that read from here; returns within a second."""
        ...
