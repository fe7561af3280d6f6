"""Block identity: which KV block holds which tokens, the same in every process (design 5.2).

A block is `block_size` consecutive tokens of a sequence. Its id is a keyed hash over its parent's id and its token
ids, so it names the whole prefix up to its end. Only full blocks have one. The key is derived from everything that
makes KV differ for equal tokens, each part length-prefixed, so that no two domains can share an id.
"""

import struct
from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import pairwise
from sys import byteorder
from typing import NewType

BlockId = NewType("BlockId", bytes)

ID_BYTES = 16
HASH_VERSION = 1
ROOT = BlockId(bytes(ID_BYTES))


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Token ids as int32, little endian: the form that is hashed and sent."""
    packed = array("I", token_ids)  # three times as fast as signed ones
    if byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(packed: bytes) -> list[int]:
    """The inverse of pack_tokens. ValueError when the length is no multiple of 4."""
    tokens = array("i")
    tokens.frombytes(packed)
    if byteorder == "big":
        tokens.byteswap()
    return tokens.tolist()


class BlockHasher:
    """Block ids within one domain: one model revision, KV format, adapter and cache salt."""

    def __init__(
        self, *, revision: str, kv_format: str, block_size: int, adapter: str = "", cache_salt: str = ""
    ) -> None:
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        self.block_size = block_size
        parts = (str(HASH_VERSION), revision, kv_format, str(block_size), adapter, cache_salt)
        domain = b"".join(struct.pack("<I", len(raw)) + raw for raw in (part.encode() for part in parts))
        self._start = blake2b(digest_size=ID_BYTES, key=blake2b(domain, digest_size=32).digest())

    def child(self, parent: BlockId, packed_tokens: bytes) -> BlockId:
        """The id of the block that follows `parent` and holds `packed_tokens` (block_size × 4 bytes)."""
        state = self._start.copy()
        state.update(parent + packed_tokens)
        return BlockId(state.digest())

    def chain(self, token_ids: Sequence[int], parent: BlockId = ROOT) -> Iterator[BlockId]:
        """The ids of all full blocks of `token_ids`, in order; a last, partly filled block has none."""
        packed = pack_tokens(token_ids)
        step = self.block_size * 4
        for start, end in pairwise(range(0, len(packed) + 1, step)):
            parent = self.child(parent, packed[start:end])
            yield parent


def probe(hasher: BlockHasher) -> BlockId:
    """The id that ends a known prompt of two blocks. A worker says its own; where a router's is another, what the index
    says of the worker means nothing to that router."""
    *_, last = hasher.chain(range(2 * hasher.block_size))
    return last
