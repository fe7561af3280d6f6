"""What a staged link holds, and for how long."""

import contextlib
import weakref

import pytest
import torch

from workers.kv.layout import Piece, SlabLayout
from workers.kv.links import gloo
from workers.kv.links.base import BlockPull
from workers.kv.links.endpoint import Endpoint
from workers.kv.links.gloo import GlooCarrier
from workers.kv.links.link import Link
from workers.kv.links.pair import Pair
from workers.kv.links.staged import StagedTransport
from workers.kv.pool import KvPool

pytestmark = pytest.mark.torch

SLAB = SlabLayout(num_kv_heads=1, num_layers=1, block_size=4, head_dim=2, element_bytes=4)
WHOLE = Piece(0, 0, 0, 0, 1, 0, 0, 1)


def test_one_that_closed_for_nobody_pulled_keeps_no_staging() -> None:
    pools = [KvPool(SLAB, 2, torch.float32, torch.device("cpu")) for _ in range(2)]
    carriers: list[weakref.ref[GlooCarrier]] = []

    def make(pair: Pair, me: int) -> GlooCarrier:
        carrier = GlooCarrier(pools[0], pair, me, 10.0)
        carriers.append(weakref.ref(carrier))
        return carrier

    with contextlib.closing(gloo.serve(pools[1], "127.0.0.1", 10.0)) as server:
        where = Endpoint.parse(server.endpoint)
        link = Link(StagedTransport("gloo", where, pools[0], 10.0, make, gloo.MESSAGE_BYTES, dear=True))
        link.pull([BlockPull(0, 0, 1)], WHOLE)
        assert [carrier() is not None for carrier in carriers] == [True]
        link.rest()
        assert link.closed
        assert carriers[0]() is None, "two messages of 64 MiB, on a GPU"
