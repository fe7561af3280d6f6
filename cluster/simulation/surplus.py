"""Where the GPU-hours of a week go: one cause after the other.

Each is what its cause adds to those before it, so that all together are what was held:

    rate       the fewest workers that keep the targets at the true rate of the moment
    measuring  that rate is measured, over a window that lags, and rounded up
    lengths    only means of lengths are known: they are taken as wider spread than they are
    bursts     arrivals come in bursts, of more than Poisson's variance
    ahead      the most within the lead, in the place of the rate of now
    reaction   what waits, KV, and what requests missed
    holding    what is kept though it is not needed now: the hold, and a pool that waits until less is clear
    leaving    workers that drain hold their GPUs, for as long as they have sequences: what was held beyond all that
"""

from dataclasses import dataclass, field, replace
from functools import lru_cache

from cluster.planning.load import Load
from cluster.planning.sizing import Sized, size
from cluster.scaling.needs import load_of
from cluster.scaling.values import Decision, Inputs
from cluster.simulation.fluid import World

CAUSES = ("rate", "measuring", "lengths", "bursts", "ahead", "reaction", "holding")


@dataclass
class Surplus:
    """Owns the sums of one run."""

    world: World
    gpu_hours: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0.0))

    def of(self, gpu_hours: float) -> dict[str, float]:
        """All causes of so many that were held."""
        return {**self.gpu_hours, "leaving": gpu_hours - sum(self.gpu_hours.values())}

    def add(self, inputs: Inputs, decision: Decision, true_rate: float, seconds: float) -> None:
        """One turn, as it stays for `seconds`."""
        level = max(inputs.traffic.level, 1e-3)
        load = load_of(inputs, level)
        peak = load_of(inputs, max(inputs.forecast.peak, level))
        steps = [
            0.0,
            _fewest(self.world, Load(round(true_rate, 1), self.world.lengths)),
            _fewest(self.world, replace(load, lengths=self.world.lengths, gap_scv=1.0)),
            _fewest(self.world, replace(load, gap_scv=1.0)),
            _fewest(self.world, load),
            _fewest(self.world, peak),
            sum(decision.needs.workers.values()),
            sum(size.replicas for size in decision.pools.values()),
        ]
        for cause, before, after in zip(CAUSES, steps[:-1], steps[1:], strict=True):
            self.gpu_hours[cause] += (after - before) * seconds / 3600


@lru_cache(maxsize=1 << 14)
def _fewest(world: World, load: Load) -> float:
    found = size(world.worker, world.worker, load, world.target)
    return float(found.pools.num_workers) if isinstance(found, Sized) else 0.0
