"""The stages of one worker as threads of a process: each has its runner, and the plans in order."""

import pathlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue

import torch
from torch import distributed

from headrace.config import EngineConfig
from headrace.values import ParallelLayout
from workers.models.checkpoint import Checkpoint
from workers.models.parallel import form
from workers.ranks.runner import Runner
from workers.scheduling.plan import StepPlan, StepResult


class Pipeline:
    """Of stages on a CPU, one rank each. A stage's failure is that of the step, and of all that follow."""

    def __init__(self, runners: list[Runner]) -> None:
        self._runners = runners
        self._ordered: list[SimpleQueue[tuple[StepPlan, Future[StepResult]] | None]] = [SimpleQueue() for _ in runners]
        self._threads = [
            threading.Thread(target=self._obey, args=(runner, plans), daemon=True)
            for runner, plans in zip(runners, self._ordered, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def launch(self, plan: StepPlan) -> "Future[StepResult]":
        future: Future[StepResult] = Future()
        for plans in self._ordered:
            plans.put((plan, future))
        return future

    def close(self) -> None:
        for plans in self._ordered:
            plans.put(None)
        for thread in self._threads:
            thread.join(20)
            assert not thread.is_alive(), "every stage has come to its end"

    @staticmethod
    def _obey(runner: Runner, plans: "SimpleQueue[tuple[StepPlan, Future[StepResult]] | None]") -> None:
        future: Future[StepResult] | None = None
        try:
            while (ordered := plans.get()) is not None:
                plan, future = ordered
                if (result := runner.run(plan)) is not None:
                    future.set_result(result)
            runner.settle()
        except Exception as error:
            if future is not None and not future.done():
                future.set_exception(error)


@contextmanager
def pipeline(folder: pathlib.Path, num_stages: int, engine: EngineConfig) -> Iterator[Pipeline]:
    layout, store = ParallelLayout(1, num_stages), distributed.HashStore()  # type: ignore[attr-defined]
    with ThreadPoolExecutor(num_stages) as threads:
        contexts = list(threads.map(lambda rank: form(layout, rank, store, timeout_seconds=20), range(num_stages)))
    checkpoint = Checkpoint.open(folder)
    stages = Pipeline([Runner(checkpoint, layout, context.rank, engine, context) for context in contexts])
    try:
        yield stages
    finally:
        stages.close()


def one_thread_each() -> Iterator[None]:
    """Of torch's, for a test's while: bits and tiny models want no more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
