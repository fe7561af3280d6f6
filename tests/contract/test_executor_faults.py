"""The same contract where a rank dies, hangs, raises or does not come, and at the end."""

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import wait

import pytest

from headrace.errors import CheckpointError, HeadraceError, WorkerLost
from headrace.values import ParallelLayout
from tests.contract.toy_runner import Toy
from tests.contract.toy_workers import LIMITS, Worker, children, spec_of
from workers.kv.links.base import BlockPull
from workers.ranks.build import build_executor
from workers.ranks.group import RankLimits
from workers.ranks.rank import rank_main
from workers.ranks.rendezvous import listen

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("forked_ranks")]


@pytest.mark.parametrize("layout", [ParallelLayout(2, 1), ParallelLayout(1, 2)], ids=str)
def test_a_killed_rank_fails_everything_at_once(layout: ParallelLayout) -> None:
    worker = Worker.of(layout, Toy(at_rank=1, hang_at=2))
    try:
        worker.fill(range(4), (0,))
        steps = [worker.executor.step(worker.plan(range(4), (0,))) for _ in range(2)]
        digesting = worker.executor.digests([(0, 4)])
        children(worker.executor)[0].kill()
        reason = worker.executor.failed.result(20)
        assert "rank 1" in str(reason)
        for future in (*steps, digesting):
            assert isinstance(future.exception(20), WorkerLost)
        assert isinstance(worker.executor.step(worker.plan(range(4), (0,))).exception(20), WorkerLost)
        assert isinstance(worker.executor.pull(worker.peer, [BlockPull(0, 0, 1)]).exception(20), WorkerLost)
    finally:
        worker.executor.close()
    assert all(child.returncode is not None for child in children(worker.executor))


def test_what_rank_0_waits_for_is_given_up_when_another_rank_is_lost() -> None:
    worker = Worker.of(ParallelLayout(2, 1), Toy(at_rank=0, hang_at=1))
    step = worker.executor.step(worker.plan(range(4), (0,)))
    children(worker.executor)[0].kill()
    assert isinstance(step.exception(20), WorkerLost)
    worker.executor.close()
    assert worker.executor._rank0 is not None
    assert not worker.executor._rank0._thread.is_alive()


def test_what_another_rank_waits_for_is_given_up_when_rank_0_is_lost() -> None:
    """As a Ray actor's rank, whose process goes on: no thread of it is left waiting."""
    spec = spec_of(ParallelLayout(2, 1), token="secret")
    rendezvous = listen("127.0.0.1", "secret")
    limits = RankLimits(start_seconds=60, step_seconds=0.5, silent_seconds=60, close_seconds=1)
    with ThreadPoolExecutor(1) as elsewhere:
        joined = elsewhere.submit(rank_main, rendezvous.address, "secret", 1)
        executor = build_executor(spec, rendezvous, make_runner=Toy(at_rank=1, hang_at=1), limits=limits)
        rank1 = [thread for thread in threading.enumerate() if thread.name == "rank1"]
        assert len(rank1) == 1
        executor.step(Worker(executor).plan(range(4), (0,)))
        assert "did not end step 1" in str(executor.failed.result(20))
        assert isinstance(joined.exception(20), WorkerLost)
        rank1[0].join(10)
        assert not rank1[0].is_alive()
        executor.close()


@pytest.mark.parametrize("awaited", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_raises_fails_everything(rank: int, awaited: bool) -> None:
    worker = Worker.of(ParallelLayout(2, 1), Toy(at_rank=rank, raise_at=2, awaited=awaited))
    try:
        steps = [worker.executor.step(worker.plan(range(4), (0,))) for _ in range(2)]
        assert steps[0].result(20)
        step = steps[1]
        assert isinstance(step.exception(20), WorkerLost)
        assert "told to fail" in str(worker.executor.failed.result(20))
    finally:
        worker.executor.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_hangs_in_a_step_fails_everything_within_the_bound(rank: int) -> None:
    limits = RankLimits(start_seconds=60, step_seconds=0.5, silent_seconds=60, close_seconds=1)
    worker = Worker.of(ParallelLayout(2, 1), Toy(at_rank=rank, hang_at=1), limits)
    try:
        step = worker.executor.step(worker.plan(range(4), (0,)))
        assert isinstance(step.exception(20), WorkerLost)
        assert "did not end step 1" in str(worker.executor.failed.result(20))
    finally:
        worker.executor.close()
    assert children(worker.executor)[0].returncode is not None


def test_a_stopped_rank_is_noticed_without_a_step_and_does_not_outlive_close() -> None:
    limits = RankLimits(start_seconds=60, step_seconds=60, silent_seconds=2, close_seconds=1)
    worker = Worker.of(ParallelLayout(2, 1), limits=limits)
    (child,) = children(worker.executor)
    child.send_signal(signal.SIGSTOP)
    assert "silent" in str(worker.executor.failed.result(20))
    worker.executor.close()
    assert child.returncode == -signal.SIGKILL


def test_close_ends_all_ranks_and_may_be_called_again() -> None:
    worker = Worker.of(ParallelLayout(2, 2))
    step = worker.executor.step(worker.plan(range(4), (0,)))
    step.result(20)
    worker.executor.close()
    assert [child.returncode for child in children(worker.executor)] == [0, 0, 0]
    worker.executor.close()
    assert not worker.executor.failed.done(), "closing is no failure"
    assert isinstance(worker.executor.step(worker.plan(range(4), (0,))).exception(20), WorkerLost)


@pytest.mark.parametrize("rank", [0, 1])
def test_what_a_rank_fails_with_while_loading_is_raised(rank: int) -> None:
    toy = Toy(at_rank=rank, raise_on_load=True)
    with pytest.raises(CheckpointError, match="truncated") as caught:
        build_executor(spec_of(ParallelLayout(2, 1)), make_runner=toy, limits=LIMITS)
    assert caught.value.numbers == {"file": "model.safetensors"}


def test_ranks_from_elsewhere_join_with_the_token() -> None:
    spec = spec_of(ParallelLayout(2, 1), token="secret")
    rendezvous = listen("127.0.0.1", "secret")
    with pytest.raises(HeadraceError):
        rank_main(rendezvous.address, "another", 1)
    with ThreadPoolExecutor(1) as elsewhere:
        joined = elsewhere.submit(rank_main, rendezvous.address, "secret", 1)
        executor = build_executor(spec, rendezvous, make_runner=Toy(), limits=LIMITS)
        executor.close()
        joined.result(20)


def test_ranks_that_do_not_come_are_named() -> None:
    limits = RankLimits(start_seconds=0.2)
    with pytest.raises(WorkerLost, match=r"ranks \[1, 2, 3\]"):
        build_executor(spec_of(ParallelLayout(2, 2)), listen("127.0.0.1", "secret"), make_runner=Toy(), limits=limits)


def test_ranks_do_not_outlive_a_killed_rank_0() -> None:
    program = (
        "import sys\n"
        "from tests.contract.toy_workers import Worker, children\n"
        "from headrace.values import ParallelLayout\n"
        "worker = Worker.of(ParallelLayout(2, 1))\n"
        "print(children(worker.executor)[0].pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as rank0:
        assert rank0.stdout is not None
        orphan = int(rank0.stdout.readline())
        watched = os.pidfd_open(orphan)
        rank0.kill()
        ended = wait([watched], timeout=10)
        os.close(watched)
        assert ended, "the child ends when rank 0 does"
