"""Which KvLink reads from an endpoint, and which server a pool gets; the only place that knows them all. What is not used
is not imported: a host without a GPU has neither CUDA nor Triton."""

import contextlib
from types import ModuleType

import torch

from headrace.errors import ConfigError, HeadraceError, TransferFailed
from workers.kv.layout import Piece
from workers.kv.links import gloo
from workers.kv.links.base import BlockPull, KvLink, KvServer
from workers.kv.links.choice import GLOO, NCCL, NIXL, NVLINK, choose
from workers.kv.links.endpoint import schemes_of
from workers.kv.links.server import LinkServer
from workers.kv.pool import KvPool

MARKS = 113  # exact in bfloat16 too; prime, so that no two rows of a block are alike


def serve(pool: KvPool, host: str, seconds: float, *, rdma: bool = False) -> KvServer:
    """Opens `pool` to peers, over all that may join it to one, the best first. `seconds` bounds the wait for each of a
    peer's messages. `rdma`: over NIXL too; ConfigError where that is not installed."""
    reads = {NIXL: _nixl().answer(pool, seconds)} if rdma else {}
    if pool.exportable is None:
        return LinkServer(host, seconds, {**reads, GLOO: gloo.answer(pool, seconds)})
    from workers.kv.links import nccl, nvlink

    answers = {NVLINK: nvlink.answer(pool, seconds), **reads, NCCL: nccl.answer(pool, seconds)}
    return LinkServer(host, seconds, answers, nvlink.place_of(pool))


def _nixl() -> ModuleType:
    from workers.kv.links import nixl

    if not nixl.installed():
        raise ConfigError("handoff.rdma: NIXL is not installed here: it comes with the extra rdma", key="handoff.rdma")
    return nixl


def try_out(pool: KvPool, endpoint: str, seconds: float) -> None:
    """Moves a block of `pool` into its trash block over each link that `endpoint`, where it is served, offers to peers, as
    one of them would; before anyone holds a block. It is marked meanwhile: a pool begins with zeros everywhere, and they
    would be found whatever a link had read, or if it had read nothing. The first pull of a peer then finds everything made.
    TransferFailed names the link that fails, and why."""
    slab, source, target = pool.slab, pool.tensor[0], pool.tensor[pool.trash_block]
    before = source.clone()
    marks = torch.arange(source.numel(), device=source.device).remainder_(MARKS).add_(1)
    whole = Piece(0, 0, 0, 0, slab.num_kv_heads, 0, 0, slab.num_layers)
    block = [BlockPull(0, int(pool.epochs[0]), pool.trash_block)]
    for scheme in schemes_of(endpoint):
        source.copy_(marks.view(source.shape))
        target.zero_()
        pool.settle()
        try:
            if scheme == NCCL:
                from workers.kv.links import nccl

                nccl.try_out(pool, 0, pool.trash_block)
            else:
                with contextlib.closing(_link(scheme, endpoint, pool, seconds)) as link:
                    link.pull(block, whole)
        except HeadraceError as error:
            raise TransferFailed(f"{scheme}: a block of our own did not come over it: {error.message}") from error
        if not torch.equal(source, target):
            raise TransferFailed(f"{scheme}: a block of our own came over it as something else")
    source.copy_(before)
    pool.settle()


def connect(ours: str, theirs: str, pool: KvPool, seconds: float) -> KvLink:
    """A link from the peer rank at `theirs` into `pool`, which is served at `ours`. Returns at once; its first pull forms
    it. IncompatiblePeer where none joins the two."""
    return _link(choose(ours, theirs).scheme, theirs, pool, seconds)


def _link(scheme: str, theirs: str, pool: KvPool, seconds: float) -> KvLink:
    if scheme == NVLINK:
        from workers.kv.links import nvlink

        return nvlink.link(theirs, pool, seconds)
    if scheme == NIXL:
        found: KvLink = _nixl().link(theirs, pool, seconds)
        return found
    if scheme == NCCL:
        from workers.kv.links import nccl

        return nccl.link(theirs, pool, seconds)
    return gloo.link(theirs, pool, seconds)
