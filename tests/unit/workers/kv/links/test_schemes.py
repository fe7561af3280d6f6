"""The try-out of the links that a rank offers, by its own reading end."""

import pytest
import torch

from headrace.errors import ConfigError, TransferFailed
from workers.kv.layout import SlabLayout
from workers.kv.links import gloo, nixl, schemes
from workers.kv.pool import KvPool

pytestmark = pytest.mark.torch

SLAB = SlabLayout(num_kv_heads=2, num_layers=2, block_size=4, head_dim=8, element_bytes=4)


@pytest.fixture
def pool() -> KvPool:
    made = KvPool(SLAB, 3, torch.float32, torch.device("cpu"))
    made.tensor.copy_(torch.randn(made.tensor.shape, generator=torch.Generator().manual_seed(1)))
    return made


def test_a_block_of_its_own_comes_over_each_link_and_only_the_trash_block_changes(pool: KvPool) -> None:
    before = pool.tensor.clone()
    server = schemes.serve(pool, "127.0.0.1", 10.0)
    schemes.try_out(pool, server.endpoint, 10.0)
    server.close()
    assert torch.equal(pool.tensor[:3], before[:3])
    assert pool.tensor[pool.trash_block].count_nonzero() == pool.tensor[0].numel()


def test_rdma_that_is_asked_for_and_not_installed_is_named(pool: KvPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "installed", lambda: False)
    with pytest.raises(ConfigError, match=r"handoff\.rdma: .* the extra rdma"):
        schemes.serve(pool, "127.0.0.1", 10.0, rdma=True)


def test_the_link_over_which_nothing_comes_is_named(pool: KvPool) -> None:
    server = schemes.serve(pool, "127.0.0.1", 10.0)
    server.close()
    with pytest.raises(TransferFailed, match=r"^gloo: a block of our own did not come over it: "):
        schemes.try_out(pool, server.endpoint, 1.0)


def test_the_link_that_fails_while_it_reads_is_named_with_its_reason(pool: KvPool) -> None:
    def fail(index: int) -> None:
        raise OSError("the cable is out")

    server = gloo.serve(pool, "127.0.0.1", 10.0, fail)
    with pytest.raises(TransferFailed, match=r"^gloo: .*the cable is out"):
        schemes.try_out(pool, server.endpoint, 10.0)
    server.close()


def test_what_comes_as_something_else_is_no_success(pool: KvPool) -> None:
    other = KvPool(SLAB, 3, torch.float32, torch.device("cpu"))
    server = schemes.serve(other, "127.0.0.1", 10.0)
    with pytest.raises(TransferFailed, match=r"^gloo: .* as something else"):
        schemes.try_out(pool, server.endpoint, 10.0)
    server.close()


def test_zeros_of_a_fresh_pool_are_not_taken_for_what_was_read() -> None:
    fresh, other = (KvPool(SLAB, 3, torch.float32, torch.device("cpu")) for _ in range(2))
    server = schemes.serve(other, "127.0.0.1", 10.0)
    with pytest.raises(TransferFailed, match=r"^gloo: .* as something else"):
        schemes.try_out(fresh, server.endpoint, 10.0)
    server.close()
