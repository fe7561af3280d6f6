"""Redis keys, the codec of index events, and the digest both sides keep (design 5.4).

A worker's keys share its hash tag, so that they change in one transaction also on a cluster. A batch of events is one
stream entry; `blocks` holds the set itself with the sequence number at which it stands.
"""

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import reduce
from operator import xor

from headrace.blocks import ID_BYTES, BlockId

STREAM_MAX_ENTRIES = 4096
STREAM_MIN_BLOCKS = 8192


class Tier(IntEnum):
    """Where a cached block lives; a lower one is nearer."""

    DEVICE = 0
    HOST = 1
    DISK = 2


@dataclass(frozen=True, slots=True)
class Keys:
    """The key names of one cluster."""

    cluster: str

    def lease(self, worker: str) -> str:
        return f"hr:{self.cluster}:{{{worker}}}:lease"

    def events(self, worker: str) -> str:
        return f"hr:{self.cluster}:{{{worker}}}:events"

    def blocks(self, worker: str) -> str:
        return f"hr:{self.cluster}:{{{worker}}}:blocks"

    @property
    def lease_pattern(self) -> str:
        return f"hr:{self.cluster}:{{*}}:lease"

    def worker_of_lease(self, key: str) -> str:
        return key.removeprefix(f"hr:{self.cluster}:{{").removesuffix("}:lease")

    def self_check(self, worker: str) -> str:
        """What came of the worker's last self-check (router.decisions.self_check)."""
        return f"hr:{self.cluster}:{{{worker}}}:self-check"

    def self_check_claim(self, worker: str) -> str:
        """The router that checks it just now."""
        return f"hr:{self.cluster}:{{{worker}}}:self-check-claim"

    def tenant(self, tenant: str) -> str:
        return f"hr:{self.cluster}:tenant:{tenant}"

    @property
    def placements(self) -> str:
        """The stream in which routers tell each other what they place."""
        return f"hr:{self.cluster}:placements"

    def router(self, router: str) -> str:
        """A router's report (headrace.reports)."""
        return f"hr:{self.cluster}:router:{router}"

    @property
    def router_pattern(self) -> str:
        return f"hr:{self.cluster}:router:*"

    @property
    def ended_routers(self) -> str:
        """The set of routers that ended in order: whoever had requests in flight then is not missed."""
        return f"hr:{self.cluster}:ended_routers"

    @property
    def leader(self) -> str:
        return f"hr:{self.cluster}:leader"

    @property
    def desired(self) -> str:
        return f"hr:{self.cluster}:desired"

    @property
    def configured(self) -> str:
        return f"hr:{self.cluster}:configured"

    @property
    def observed(self) -> str:
        return f"hr:{self.cluster}:observed"

    @property
    def revisions(self) -> str:
        """What routers are told of revisions (headrace.revisions)."""
        return f"hr:{self.cluster}:revisions"

    @property
    def canary(self) -> str:
        """These three are the canary's (cluster.canary)."""
        return f"hr:{self.cluster}:canary"

    @property
    def canary_evidence(self) -> str:
        return f"hr:{self.cluster}:canary:evidence"

    @property
    def canary_events(self) -> str:
        return f"hr:{self.cluster}:canary:events"

    @property
    def scaling_now(self) -> str:
        """These three are the autoscaler's (cluster.scaling_state)."""
        return f"hr:{self.cluster}:scaling:now"

    @property
    def scaling_decisions(self) -> str:
        return f"hr:{self.cluster}:scaling:decisions"

    @property
    def scaling_arrivals(self) -> str:
        return f"hr:{self.cluster}:scaling:arrivals"


class Digest:
    """Count and XOR of H(id, tier) over a set of (id, tier): equal sets have equal digests, whatever the order.

    Mutable, owned by whoever keeps the set. The owner adds only what was absent and removes only what was present.
    Ids are keyed hashes already, so H need not mix: it is the id's low half, turned by the tier.
    """

    __slots__ = ("count", "xor")

    def __init__(self, count: int = 0, xor: int = 0) -> None:
        self.count = count
        self.xor = xor

    def add(self, halves: Sequence[int], tier: Tier) -> None:
        """`halves` are low_halves() of the ids."""
        self.count += len(halves)
        self.xor ^= _turned(reduce(xor, halves, 0), tier)

    def remove(self, halves: Sequence[int], tier: Tier) -> None:
        self.count -= len(halves)
        self.xor ^= _turned(reduce(xor, halves, 0), tier)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Digest) and (self.count, self.xor) == (other.count, other.xor)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Digest(count={self.count}, xor={self.xor:016x})"


def low_halves(ids: bytes) -> tuple[int, ...]:
    """The last 8 bytes of each of the joined ids: what digests and mirrors work with."""
    return struct.unpack(f"<{len(ids) // 8}Q", ids)[1::2]


def _turned(half: int, tier: Tier) -> int:
    turn = 21 * tier
    return (half << turn | half >> (64 - turn)) & (2**64 - 1)


class EventKind(IntEnum):
    STORED = 1
    REMOVED = 2
    CLEARED = 3


@dataclass(frozen=True, slots=True)
class Event:
    """One change of a worker's set. `ids` are joined block ids; CLEARED carries none and empties all tiers."""

    kind: EventKind
    ids: bytes = b""
    tier: Tier = Tier.DEVICE

    @classmethod
    def of(cls, kind: EventKind, blocks: Iterable[BlockId], tier: Tier = Tier.DEVICE) -> "Event":
        return cls(kind, b"".join(blocks), tier)

    @property
    def blocks(self) -> tuple[BlockId, ...]:
        return tuple(split_ids(self.ids))

    @property
    def num_blocks(self) -> int:
        return len(self.ids) // ID_BYTES


@dataclass(frozen=True, slots=True)
class EventBatch:
    """What one stream entry holds: events number `sequence` of `generation`, and the digest of the set after them."""

    generation: int
    sequence: int
    count: int
    xor: int
    events: tuple[Event, ...]

    @property
    def digest(self) -> Digest:
        return Digest(self.count, self.xor)

    @property
    def num_blocks(self) -> int:
        """How many changes it holds."""
        return sum(event.num_blocks for event in self.events)


_HEAD = struct.Struct("<QQQQH")
_EVENT = struct.Struct("<BBI")


def encode_batch(batch: EventBatch) -> bytes:
    parts = [_HEAD.pack(batch.generation, batch.sequence, batch.count, batch.xor, len(batch.events))]
    for event in batch.events:
        parts.append(_EVENT.pack(event.kind, event.tier, event.num_blocks))
        parts.append(event.ids)
    return b"".join(parts)


def decode_batch(raw: bytes) -> EventBatch:
    """The inverse of encode_batch. ValueError on anything that encode_batch did not make."""
    try:
        generation, sequence, count, xor, num_events = _HEAD.unpack_from(raw)
        at = _HEAD.size
        events = []
        for _ in range(num_events):
            kind, tier, num_blocks = _EVENT.unpack_from(raw, at)
            at += _EVENT.size
            end = at + num_blocks * ID_BYTES
            if end > len(raw):
                raise ValueError(f"event batch is cut: {len(raw)} bytes, {end} expected")
            events.append(Event(EventKind(kind), raw[at:end], Tier(tier)))
            at = end
    except struct.error as error:
        raise ValueError(f"event batch is cut: {error}") from error
    if at != len(raw):
        raise ValueError(f"event batch has {len(raw) - at} bytes too many")
    return EventBatch(generation, sequence, count, xor, tuple(events))


def split_ids(raw: bytes) -> Iterator[BlockId]:
    """Block ids that were joined without separators."""
    return (BlockId(raw[at : at + ID_BYTES]) for at in range(0, len(raw), ID_BYTES))


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The set itself as it stood after event batch `sequence` of `generation`: at most one STORED event a tier."""

    generation: int
    sequence: int
    stored: tuple[Event, ...]

    @property
    def num_blocks(self) -> int:
        return sum(event.num_blocks for event in self.stored)


SNAPSHOT_META_FIELD = b"meta"


def encode_meta(generation: int, sequence: int) -> bytes:
    """The value of the `meta` field of the `blocks` hash; the others are block ids with a byte for each of their tiers."""
    return struct.pack("<QQ", generation, sequence)


def decode_meta(raw: bytes) -> tuple[int, int]:
    """(generation, sequence) of a `blocks` hash."""
    if len(raw) != 16:
        raise ValueError(f"snapshot meta has {len(raw)} bytes, 16 expected")
    generation, sequence = struct.unpack("<QQ", raw)
    return generation, sequence


def snapshot_fields(generation: int, sequence: int, blocks: Iterable[tuple[BlockId, Tier]]) -> dict[bytes, bytes]:
    """The `blocks` hash as its fields."""
    fields: dict[bytes, bytes] = {}
    for block, tier in blocks:
        fields[block] = fields.get(block, b"") + bytes((tier,))
    fields[SNAPSHOT_META_FIELD] = encode_meta(generation, sequence)
    return fields


def parse_snapshot(fields: dict[bytes, bytes]) -> Snapshot | None:
    """The inverse of snapshot_fields; None when there is no snapshot. ValueError on what snapshot_fields did not make."""
    meta = fields.get(SNAPSHOT_META_FIELD)
    if meta is None:
        return None
    generation, sequence = decode_meta(meta)
    return Snapshot(generation, sequence, parse_stored(fields))


def parse_stored(fields: dict[bytes, bytes]) -> tuple[Event, ...]:
    """The blocks of a part of a `blocks` hash: at most one STORED event a tier. ValueError as parse_snapshot."""
    ids: dict[bytes, list[bytes]] = {}
    for key, tiers in fields.items():
        if len(key) == ID_BYTES and tiers:
            ids.setdefault(tiers, []).append(key)
        elif key != SNAPSHOT_META_FIELD:
            raise ValueError(
                f"snapshot has a block of {len(key)} bytes in {len(tiers)} tiers, {ID_BYTES} bytes expected"
            )
    by_tier: dict[Tier, list[bytes]] = {}
    for tiers, blocks in ids.items():
        for tier in tiers:
            by_tier.setdefault(Tier(tier), []).extend(blocks)
    return tuple(Event(EventKind.STORED, b"".join(blocks), tier) for tier, blocks in by_tier.items())
