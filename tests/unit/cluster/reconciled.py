"""A small world for reconcile(): it carries actions out, lets workers become ready, finish draining and die at will."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import assert_never

from cluster.lifecycle import (
    FOUND_SECONDS,
    Action,
    Desired,
    DesiredPool,
    Drain,
    History,
    Observed,
    ObservedWorker,
    Phase,
    Remove,
    SetRole,
    Start,
)
from cluster.reconcile import reconcile
from cluster.rollouts import Rollouts
from headrace.values import ParallelLayout, Role

ONE = ParallelLayout()
TWO = ParallelLayout(tp=2)


@dataclass
class World:
    """Workers by id, as a controller would keep them; time moves only when told."""

    now: float = 0.0
    workers: dict[str, ObservedWorker] = field(default_factory=dict)
    history: dict[str, History] = field(default_factory=dict)
    rollouts: Rollouts = field(default_factory=Rollouts)

    @property
    def observed(self) -> Observed:
        return Observed(list(self.workers.values()), dict(self.history))

    def act(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Start():
                    assert action.worker_id not in self.workers, "two workers in one slot"
                    past = self.history.get(action.worker_id, History())
                    assert action.generation > past.generation, "a generation came back"
                    assert self.now >= past.not_before, "started within its delay"
                    self.history[action.worker_id] = past.started(action.generation)
                    self.workers[action.worker_id] = ObservedWorker(
                        action.pool,
                        action.index,
                        action.generation,
                        action.role,
                        action.layout,
                        Phase.STARTING,
                        self.now,
                        revision=action.revision,
                    )
                case SetRole():
                    self.workers[action.worker_id] = replace(self.workers[action.worker_id], role=action.role)
                case Drain():
                    assert self.workers[action.worker_id].phase is Phase.READY
                    self.set_phase(action.worker_id, Phase.DRAINING)
                case Remove():
                    worker = self.workers.pop(action.worker_id)
                    assert worker.generation == action.generation
                    assert worker.phase not in (Phase.READY, Phase.DRAINING), "removed a worker that serves"
                case _:
                    assert_never(action)

    def set_phase(self, worker_id: str, phase: Phase) -> None:
        worker = self.workers[worker_id]
        if phase is Phase.DEAD:
            served = self.now - worker.since if worker.phase is Phase.READY else 0.0
            self.history[worker_id] = self.history[worker_id].failed(self.now, served, "died")
        self.workers[worker_id] = replace(worker, phase=phase, since=self.now)

    def progress(self) -> None:
        """What starts becomes ready, what drains is drained."""
        for worker in list(self.workers.values()):
            if worker.phase is Phase.STARTING:
                self.set_phase(worker.worker_id, Phase.READY)
            elif worker.phase is Phase.DRAINING:
                self.set_phase(worker.worker_id, Phase.DRAINED)

    def settle(self, desired: Desired) -> int:
        """Ticks until nothing is left to do, at most 64."""
        for tick in range(64):
            actions = reconcile(desired, self.observed, self.now, None, self.rollouts)
            staying = all(its.phase is Phase.READY and its.leaves_at is None for its in self.workers.values())
            if not actions and staying and all(its.is_found(self.now) for its in self.workers.values()):
                waiting = [past.not_before for past in self.history.values() if past.not_before > self.now]
                if not waiting:
                    return tick
            self.act(actions)
            self.progress()
            self.now += 1.0 if actions or not staying else FOUND_SECONDS
        raise AssertionError(f"never settled: {self.workers}")


def settled(**replicas: int) -> tuple[World, Desired]:
    desired = Desired({name: DesiredPool(Role(name), count) for name, count in replicas.items()})
    world = World()
    world.settle(desired)
    return world, desired
