"""KvPool: what is read, written, copied, and how an epoch moves."""

import pytest
import torch

from workers.kv.layout import Piece, SlabLayout
from workers.kv.pool import KvPool

pytestmark = pytest.mark.torch

SLAB = SlabLayout(num_kv_heads=2, num_layers=3, block_size=4, head_dim=2, element_bytes=4)
NUM_BLOCKS = 6


@pytest.fixture
def pool() -> KvPool:
    made = KvPool(SLAB, NUM_BLOCKS, torch.float32, torch.device("cpu"))
    made.tensor.copy_(torch.arange(made.tensor.numel()).view(made.tensor.shape))
    return made


def piece(source_head: int = 0, target_head: int = 0, num_heads: int = 1, layer: int = 0, num_layers: int = 1) -> Piece:
    return Piece(0, 0, source_head, target_head, num_heads, layer, layer, num_layers)


def test_a_block_is_one_slab_and_the_trash_block_follows_the_last(pool: KvPool) -> None:
    assert pool.trash_block == NUM_BLOCKS
    assert pool.tensor[0].is_contiguous()
    assert pool.tensor.stride() == (96, 48, 16, 8, 2, 1)
    assert pool.tensor.numel() * 4 == (NUM_BLOCKS + 1) * SLAB.block_bytes


def test_what_is_read_is_contiguous_and_in_the_order_asked(pool: KvPool) -> None:
    read = pool.read([4, 1], piece(source_head=1, layer=1, num_layers=2))
    assert read.is_contiguous()
    assert read.shape == (2, 1, 2, 2, 4, 2)
    assert torch.equal(read[0, 0], pool.tensor[4, 1, 1:3])
    assert torch.equal(read[1, 0], pool.tensor[1, 1, 1:3])


def test_a_read_is_a_copy(pool: KvPool) -> None:
    read = pool.read([0], piece(num_heads=2, num_layers=3))
    kept = read.clone()
    pool.tensor.zero_()
    assert torch.equal(read, kept)


def test_a_write_changes_its_piece_of_its_blocks_alone(pool: KvPool) -> None:
    before = pool.tensor.clone()
    content = -torch.ones(2, 1, 1, 2, 4, 2)
    pool.write([5, 2], piece(target_head=1, layer=2), content)
    expected = before.clone()
    expected[[5, 2], 1, 2] = -1
    assert torch.equal(pool.tensor, expected)


def test_copies_are_whole_blocks_in_order(pool: KvPool) -> None:
    first, second = pool.tensor[0].clone(), pool.tensor[1].clone()
    pool.copy_blocks([(1, 2), (0, 1), (1, 3)])
    assert torch.equal(pool.tensor[2], second)
    assert torch.equal(pool.tensor[1], first)
    assert torch.equal(pool.tensor[3], first)


def test_epochs_start_at_zero_and_move_by_block(pool: KvPool) -> None:
    pool.set_epochs([(3, 2**40), (0, 7)])
    assert pool.epochs.tolist() == [7, 0, 0, 2**40, 0, 0, 0]


def test_a_digest_covers_filled_positions_of_each_head_and_layer(pool: KvPool) -> None:
    before = pool.head_layer_digests(2, filled=3)
    pool.tensor[2, :, :, :, 3] = 99.0
    assert pool.head_layer_digests(2, filled=3) == before
    pool.tensor[2, 1, 2, 0, 0, 0] += 1
    after = pool.head_layer_digests(2, filled=3)
    changed = [(h, layer) for h in range(2) for layer in range(3) if after[h][layer] != before[h][layer]]
    assert changed == [(1, 2)]


def test_digests_of_equal_bytes_are_equal_in_two_byte_floats() -> None:
    slab = SlabLayout(1, 1, 4, 2, 2)
    pools = [KvPool(slab, 1, torch.bfloat16, torch.device("cpu")) for _ in range(2)]
    for one in pools:
        one.tensor[0] = 1.5
    assert pools[0].head_layer_digests(0, 4) == pools[1].head_layer_digests(0, 4)
