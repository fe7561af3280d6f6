"""A cluster of one prefill and one decode pool as the autoscaler's pure half sees it; decisions are carried out at will."""

from dataclasses import dataclass, field, replace
from typing import Any

from cluster.planning.load import Target, Worker
from cluster.scaling.decide import decide
from cluster.scaling.values import Decision, Forecast, Inputs, Memory, PoolRules, PoolSeen, Rules, Size, Traffic
from headrace.costmodel import CostModel
from headrace.values import ParallelLayout, Role

WORKER = Worker(CostModel(1e-3, 2e-5, 5e-10, 5e-3, 1e-5, 3e-8), kv_tokens=500_000, max_num_seqs=256)
ONE = ParallelLayout()


def rules(*, most: int = 16, least: int = 0, prefill_tp: int = 1, **fields: Any) -> Rules:
    pools = {
        "decode": PoolRules(Role.DECODE, ONE, least, most),
        "prefill": PoolRules(Role.PREFILL, ParallelLayout(prefill_tp), least, most),
    }
    return Rules(pools, Target(2.0, 0.05, 0.99), **{"hold_seconds": 900.0, **fields})


def traffic(per_second: float, **fields: Any) -> Traffic:
    return replace(
        Traffic(1, per_second, 2000.0, 250.0, in_flight=1 if per_second else 0, judged=1000, attainment=1.0), **fields
    )


@dataclass
class World:
    """Time moves by `turn`; what is decided is there at once, unless `stuck` pools find no room."""

    rules: Rules
    sizes: dict[str, Size] = field(default_factory=lambda: {"decode": Size(1), "prefill": Size(1)})
    memory: Memory = field(default_factory=Memory)
    now: float = 1e6
    stuck: dict[str, float] = field(default_factory=dict)
    ready: dict[str, int] = field(default_factory=dict)
    seen: dict[str, dict[str, Any]] = field(default_factory=dict)
    history: list[Decision] = field(default_factory=list)

    def pool(self, name: str) -> PoolSeen:
        size = self.sizes[name]
        ready = self.ready.get(name, size.replicas) if name in self.stuck else size.replicas
        pending = size.replicas - ready
        fields: dict[str, Any] = {"pending": pending, "pending_seconds": self.now - self.stuck[name]} if pending else {}
        return replace(PoolSeen(size, WORKER, ready, min(size.lent, ready), **fields), **self.seen.get(name, {}))

    def inputs(self, load: Traffic, peak: float = 0.0, trusted: bool = True) -> Inputs:
        pools = {name: self.pool(name) for name in self.sizes}
        forecast = Forecast(max(peak, load.per_second), load.per_second)
        return Inputs(self.now, self.rules, pools, load, forecast, self.memory, trusted)

    def turn(self, load: Traffic, *, seconds: float = 30.0, peak: float = 0.0, trusted: bool = True) -> Decision:
        self.now += seconds
        decision = decide(self.inputs(load, peak, trusted))
        for name, size in decision.pools.items():
            if name in self.stuck and size.replicas > self.sizes[name].replicas:
                self.ready[name] = self.sizes[name].replicas
                self.stuck[name] = self.now
        self.sizes, self.memory = dict(decision.pools), decision.memory
        self.history.append(decision)
        return decision

    def settle(self, load: Traffic, *, hours: float = 3.0) -> Decision:
        for _ in range(int(hours * 120)):
            last = self.turn(load)
        return last
