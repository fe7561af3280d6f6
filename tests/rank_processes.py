"""Processes that play the ranks of a worker, kept for a whole test run."""

import os
import pathlib
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import distributed

from headrace.values import ParallelLayout
from tests.forked import server
from workers.models.parallel import RankContext, form

REPLY_SECONDS = 100.0


class RankProcesses:
    """Any layout of at most `size` ranks, one job at a time."""

    def __init__(self, pipes: list[Connection], folder: pathlib.Path) -> None:
        self._pipes = pipes
        self._folder = folder
        self._jobs = 0

    def run(self, layout: ParallelLayout, job: Callable[..., Any], *args: Any) -> list[Any]:
        """job(context, *args) on every rank of a worker; what each returned. A rank's failure is raised here."""
        self._jobs += 1
        store = str(self._folder / str(self._jobs))
        pipes = self._pipes[: layout.world_size]
        for rank, pipe in enumerate(pipes):
            pipe.send((layout, rank, store, job, args))
        replies = []
        for rank, pipe in enumerate(pipes):
            if not pipe.poll(REPLY_SECONDS):
                raise TimeoutError(f"rank {rank} of {layout} has not answered for {REPLY_SECONDS} s")
            replies.append(pipe.recv())
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
        return replies


@contextmanager
def rank_processes(size: int, device: str = "cpu") -> Iterator[RankProcesses]:
    """On "cuda" each sees a GPU of its own alone; where there are too few, ranks share one, and have no process groups: a
    library would refuse that."""
    context = server()
    ends = [context.Pipe() for _ in range(size)]
    num_gpus = torch.cuda.device_count() if device == "cuda" else 0
    ranks = [
        context.Process(target=_serve, args=(theirs, rank, size, device, num_gpus), daemon=True)
        for rank, (_, theirs) in enumerate(ends)
    ]
    with tempfile.TemporaryDirectory() as folder:
        for rank in ranks:
            rank.start()
        try:
            yield RankProcesses([ours for ours, _ in ends], pathlib.Path(folder))
        finally:
            for (ours, _), rank in zip(ends, ranks, strict=True):
                ours.send(None)
                rank.join(timeout=10)
                if rank.is_alive():
                    rank.kill()
                    rank.join()


def _serve(pipe: Connection, rank: int, size: int, device: str, num_gpus: int) -> None:
    torch.set_num_threads(1)
    where = torch.device(device)
    alone = True
    if device == "cuda":
        alone, own = size <= num_gpus, rank % num_gpus
        os.environ["CUDA_VISIBLE_DEVICES"] = str(own)
        where = torch.device("cuda", 0)
        torch.cuda.set_device(where)
    while (order := pipe.recv()) is not None:
        layout, rank, store, job, args = order
        try:
            files = distributed.FileStore(store, layout.world_size)
            context = form(layout, rank, files, device=where) if alone else RankContext(layout, rank, where)
            pipe.send(job(context, *args))
            context.close()
        except Exception as error:  # raised again where the test runs
            pipe.send(error)
    os._exit(0)  # without torch's teardown, which takes seconds
