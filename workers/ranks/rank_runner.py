"""What a rank computes with, as its thread sees it, and how it is made."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from workers.kv.layout import ModelShape, SlabLayout
from workers.kv.pool import KvPool
from workers.scheduling.plan import StepPlan, StepResult
from workers.spec import WorkerSpec


@dataclass(frozen=True, slots=True)
class UnderWay:
    """A step that was launched on a device: `wait` returns its result, None on ranks that do not draw, once the device has
    done it. Results are awaited in the order of the launches, by one thread, which may be another than the launching one.
    """

    wait: Callable[[], StepResult | None]


# done, with its result where the rank draws, or to be awaited: the same of all steps of a runner. On our word that a step
# is done peers read what it wrote, and links write what it left.
Launched = StepResult | None | UnderWay


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

    def launch(self, plan: StepPlan) -> Launched:
        """The result on the last stage's tp rank 0, None on all other ranks."""
        ...

    def close(self) -> None:
        """Called last, on all ranks alike, when their steps have ended."""
        ...

    def abandon(self) -> None:
        """Another rank is lost: what waits for it ends soon. Called by any thread, at most once, beside anything."""
        ...


# (spec, rank, a torch.distributed store that all ranks of the worker share) → the rank's runner, weights loaded.
# Sent to the other ranks by pickle: a function of a module, or a functools.partial of one.
MakeRunner = Callable[[WorkerSpec, int, Any], RankRunner]
