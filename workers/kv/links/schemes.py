"""Which KvLink reads from an endpoint, by its scheme, and which server a pool gets; the only place that knows them all."""

from urllib.parse import urlsplit

from headrace.errors import IncompatiblePeer
from workers.kv.links.base import KvLink, KvServer
from workers.kv.links.gloo import SCHEME as GLOO
from workers.kv.links.gloo import GlooLink, GlooServer
from workers.kv.pool import KvPool


def serve(pool: KvPool, host: str, seconds: float) -> KvServer:
    """Opens `pool` to peers. `seconds` bounds the wait for each of a peer's messages."""
    return GlooServer(pool, host, seconds)


def connect(endpoint: str, pool: KvPool, seconds: float) -> KvLink:
    """A link that reads into `pool`. Returns at once; its first pull forms it."""
    scheme = urlsplit(endpoint).scheme
    if scheme != GLOO:
        raise IncompatiblePeer(f"an endpoint must begin with {GLOO}://, got {scheme or 'none'}", field="endpoint")
    return GlooLink(endpoint, pool, seconds)
