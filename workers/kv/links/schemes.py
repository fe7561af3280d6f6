"""Which KvLink reads from an endpoint, and which server a pool gets; the only place that knows them all. What is not used
is not imported: a host without a GPU has neither CUDA nor Triton."""

from workers.kv.links import gloo
from workers.kv.links.base import KvLink, KvServer
from workers.kv.links.choice import NVLINK, choose
from workers.kv.pool import KvPool


def serve(pool: KvPool, host: str, seconds: float) -> KvServer:
    """Opens `pool` to peers. `seconds` bounds the wait for each of a peer's messages."""
    if pool.exportable is None:
        return gloo.serve(pool, host, seconds)
    from workers.kv.links import nvlink

    nvlink.warm_up(pool)
    return nvlink.serve(pool, host, seconds)


def connect(ours: str, theirs: str, pool: KvPool, seconds: float) -> KvLink:
    """A link from the peer rank at `theirs` into `pool`, which is served at `ours`. Returns at once; its first pull forms
    it. IncompatiblePeer where none joins the two."""
    if choose(ours, theirs).scheme == NVLINK:
        from workers.kv.links import nvlink

        return nvlink.link(theirs, pool, seconds)
    return gloo.link(theirs, pool, seconds)
