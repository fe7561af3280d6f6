"""The nvlink KvLink where its contract (tests.contract.test_kv_link) cannot see: memory, streams, and the self-test."""

import gc
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from headrace.errors import LinkClosed
from tests.contract.link_ends import Source, await_closed, same
from tests.contract.links import BIG, BIG_BLOCKS, EPOCH, MAKE, WHOLE, filled_pool, pulls_of
from workers.kv.links import schemes
from workers.kv.links.base import BlockPull
from workers.kv.pool import KvPool

pytestmark = [pytest.mark.torch, pytest.mark.gpu]
CUDA = torch.device("cuda", 0)
BLOCKS_BYTES = BIG_BLOCKS * BIG.block_bytes


def test_the_memory_of_a_dead_peer_is_free_when_its_link_has_closed() -> None:
    kind, target = MAKE["nvlink"](), filled_pool(2, CUDA)
    with Source("nvlink", kind) as peer:  # what the first link of a process costs it is not its peer's memory
        kind.link(peer.endpoint, target, 10.0, None).pull(pulls_of([0]), WHOLE)
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info(kind.source_device)[0]
    with Source("nvlink", kind) as peer:
        link = kind.link(peer.endpoint, target, 10.0, None)
        link.pull(pulls_of(range(BIG_BLOCKS)), WHOLE)
        assert before - torch.cuda.mem_get_info(kind.source_device)[0] > BLOCKS_BYTES
        peer.process.kill()
        peer.process.wait()
        await_closed(link)
        # the thread that closed it may still be at it
        while before - torch.cuda.mem_get_info(kind.source_device)[0] > BLOCKS_BYTES // 2:
            os.sched_yield()
    assert same(target.tensor[:BIG_BLOCKS], filled_pool(1, CUDA).tensor[:BIG_BLOCKS])


def test_a_pools_memory_is_free_when_nobody_has_it() -> None:
    free = []
    for _ in range(3):
        pool = KvPool(BIG, 400, torch.float32, CUDA)
        assert not pool.tensor.any()
        del pool
        gc.collect()
        torch.cuda.empty_cache()
        free.append(torch.cuda.mem_get_info(CUDA)[0])
    # the first takes with it what the first use of a device costs
    assert free[0] - free[2] < BLOCKS_BYTES


def test_a_settled_pool_holds_what_the_stream_was_given() -> None:
    pool = filled_pool(1, CUDA)
    other = torch.cuda.Stream(CUDA)
    torch.cuda._sleep(200_000_000)
    pool.tensor[3].fill_(7.0)
    pool.settle()
    with torch.cuda.stream(other):
        assert (pool.tensor[3] == 7.0).all()


def test_a_pull_is_there_for_what_is_launched_after_it_and_waits_for_no_step() -> None:
    """A step that runs meanwhile on the compute stream reads other blocks: the pull ends before it does."""
    pool, target = filled_pool(1, CUDA), filled_pool(2, CUDA)
    server = schemes.serve(pool, "127.0.0.1", 10.0)
    own = schemes.serve(target, "127.0.0.1", 10.0)
    link = schemes.connect(own.endpoint, server.endpoint, target, 10.0)
    link.pull(pulls_of([0]), WHOLE)
    torch.cuda._sleep(2_000_000_000)
    step_ends = torch.cuda.Event()
    step_ends.record()
    link.pull([BlockPull(7, EPOCH, 9)], WHOLE)
    assert not step_ends.query()
    copied = target.tensor[9].clone()
    torch.cuda.synchronize()
    assert same(copied, pool.tensor[7])
    link.close()
    server.close()
    own.close()


def test_a_pull_that_awaits_a_step_reads_what_the_step_wrote() -> None:
    """It is asked for while the step still runs, and begins when the device says that it has written."""
    pool, target = filled_pool(1, CUDA), filled_pool(2, CUDA)
    server = schemes.serve(pool, "127.0.0.1", 10.0)
    own = schemes.serve(target, "127.0.0.1", 10.0)
    link = schemes.connect(own.endpoint, server.endpoint, target, 10.0)
    link.pull(pulls_of([0]), WHOLE)
    for step in (1, 2):
        torch.cuda._sleep(200_000_000)
        pool.tensor[7].fill_(float(step))
        pool.wrote(step)
        torch.cuda._sleep(200_000_000)
        sampled = torch.cuda.Event()
        sampled.record()
        link.pull([BlockPull(7, EPOCH, 9)], WHOLE, step)
        assert not sampled.query()
        torch.cuda.synchronize()
        assert (target.tensor[9] == float(step)).all()
    link.close()
    server.close()
    own.close()


def test_a_pull_whose_step_never_comes_ends_with_its_link() -> None:
    pool, target = filled_pool(1, CUDA), filled_pool(2, CUDA)
    server = schemes.serve(pool, "127.0.0.1", 10.0)
    link = schemes.connect(server.endpoint, server.endpoint, target, 10.0)
    link.pull(pulls_of([0]), WHOLE)
    with ThreadPoolExecutor(1) as pulling:
        outcome = pulling.submit(link.pull, pulls_of([1]), WHOLE, 5)
        server.close()
        assert isinstance(outcome.exception(10), LinkClosed)


def test_nothing_is_compiled_once_a_pools_links_were_tried_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever number of blocks is pulled: a compiler at work would hold the first such hand-off up."""
    from triton import knobs

    compiled: list[object] = []
    pool, target = filled_pool(1, CUDA), filled_pool(2, CUDA)
    server = schemes.serve(pool, "127.0.0.1", 10.0)
    own = schemes.serve(target, "127.0.0.1", 10.0)
    schemes.try_out(target, own.endpoint, 10.0)
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda **_: compiled.append(1))
    link = schemes.connect(own.endpoint, server.endpoint, target, 10.0)
    for count in (1, 2, 4, 7, 16, BIG_BLOCKS):
        link.pull(pulls_of(range(count)), WHOLE)
    assert not compiled
    link.close()
    server.close()
    own.close()
