"""The contract between the engine and the ranks that compute: an Executor is tp × pp ranks behind one call each.

The engine (in rank 0's process) submits plans and pulls; the ranks carry plans out in order, and pulls beside them.
All calls return at once; futures complete on a thread of the executor. When any rank dies, every future that is not
done fails with WorkerLost within seconds, `failed` completes with the reason, and the executor takes no more work.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

from headrace.values import ParallelLayout
from workers.kv.layout import ModelShape
from workers.kv.links.base import BlockPull, PeerRanks, PullReceipt
from workers.ranks.profiles import RankProfile
from workers.scheduling.plan import StepPlan, StepResult


class Executor(Protocol):
    """See the module. `num_blocks` and `block_bytes` (over all ranks) are known once it is built."""

    @property
    def layout(self) -> ParallelLayout: ...

    @property
    def shape(self) -> ModelShape: ...

    @property
    def num_blocks(self) -> int: ...

    @property
    def block_bytes(self) -> int: ...

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Where peers can read each rank's pool (KvServer.endpoint), in rank order."""
        ...

    @property
    def failed(self) -> Future[Exception]:
        """Completes, with the reason as its result, when a rank is lost."""
        ...

    def step(self, plan: StepPlan) -> Future[StepResult]:
        """Carries the plan out after all earlier ones. At most two are in flight."""
        ...

    def pull(self, peer: PeerRanks, blocks: Sequence[BlockPull], after_step: int = 0) -> Future[PullReceipt]:
        """Every rank reads its pieces of `blocks` from the peer's ranks, by the reshard plan, once each of those has done
        the peer's plan `after_step`; links are formed on first use. The receipt sums bytes over ranks. Fails with
        StaleBlocks, LinkClosed or IncompatiblePeer."""
        ...

    def close_links(self, peer: tuple[str, int]) -> None:
        """Closes all links that read from this (worker id, generation); pulls under way fail with LinkClosed."""
        ...

    def digests(self, blocks: Sequence[tuple[int, int]]) -> Future[tuple[bytes, ...]]:
        """For each (block, filled positions): a digest of those positions over all layers and KV heads, equal for
        equal content whatever the layout; after all steps before it. TransferFailed where ranks that hold the same heads
        and layers differ in them. A debug aid and a test's oracle."""
        ...

    def profile(self, num_steps: int) -> Future[tuple[RankProfile, ...]]:
        """Of the next steps, so many or as many as come before end_profile(), by every rank in order. One at a time."""
        ...

    def end_profile(self) -> None:
        """The profile that is being taken, if any, ends with what it has."""
        ...

    def close(self) -> None:
        """Ends all ranks and links. Idempotent; futures that are not done fail with WorkerLost."""
        ...
