"""What one rank does, whichever process it lives in."""

from collections.abc import Callable
from typing import Any, Protocol

from workers.layout import ModelShape, SlabLayout
from workers.plan import StepPlan, StepResult
from workers.pool import KvPool
from workers.spec import WorkerSpec


class RankRunner(Protocol):
    """What a rank computes with. Owned by the rank's step thread; `pool` is read and written by its links beside it."""

    @property
    def pool(self) -> KvPool: ...

    @property
    def shape(self) -> ModelShape: ...

    @property
    def slab(self) -> SlabLayout: ...

    @property
    def num_blocks(self) -> int: ...

    def warm_up(self) -> None: ...

    def run(self, plan: StepPlan) -> StepResult | None:
        """The result on the last stage's tp rank 0, None on all other ranks."""
        ...


# (spec, rank, a torch.distributed store that all ranks of the worker share) → the rank's runner, weights loaded.
# Sent to the other ranks by pickle: a function of a module, or a functools.partial of one.
MakeRunner = Callable[[WorkerSpec, int, Any], RankRunner]


def rank_main(address: str, token: str, rank: int) -> None:
    """A rank other than 0, from joining to the end of its worker: blocks the calling thread.

    Joins rank 0 at `address` (from `ranks.listen`), learns there what to build, carries out what it is told. Returns
    when the executor closes. Raises WorkerLost when rank 0 is gone, and whatever this rank itself failed with.
    """
    raise NotImplementedError
