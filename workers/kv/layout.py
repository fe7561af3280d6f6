"""Where heads and layers live: slab layout, the shard of a rank, and the reshard plan between two layouts. No torch."""

from dataclasses import dataclass

from headrace.config import EngineConfig
from headrace.errors import ConfigError, IncompatiblePeer
from headrace.values import ParallelLayout

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The part of a model's shape that its KV cache depends on."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    num_heads: int


@dataclass(frozen=True, slots=True)
class Shard:
    """What one rank holds: half-open ranges of global layers and global KV heads.

    Where tp exceeds the KV heads, a head is held by tp / num_kv_heads ranks alike.
    """

    rank: int
    tp_rank: int
    pp_stage: int
    layers: tuple[int, int]
    kv_heads: tuple[int, int]

    @property
    def num_layers(self) -> int:
        return self.layers[1] - self.layers[0]

    @property
    def num_kv_heads(self) -> int:
        return self.kv_heads[1] - self.kv_heads[0]


@dataclass(frozen=True, slots=True)
class SlabLayout:
    """One rank's pool: [num_blocks, kv_heads, layers, 2, block_size, head_dim], row-major; index 0 of the third-last
    axis is K, 1 is V. A block is one contiguous slab; a head range of it is a slab too; a layer range is one piece a
    head. Strides and sizes in elements unless they say bytes."""

    num_kv_heads: int
    num_layers: int
    block_size: int
    head_dim: int
    element_bytes: int

    @property
    def kv_stride(self) -> int:
        return self.block_size * self.head_dim

    @property
    def layer_stride(self) -> int:
        return 2 * self.kv_stride

    @property
    def head_stride(self) -> int:
        return self.num_layers * self.layer_stride

    @property
    def block_stride(self) -> int:
        return self.num_kv_heads * self.head_stride

    @property
    def block_bytes(self) -> int:
        return self.block_stride * self.element_bytes


def shard(shape: ModelShape, layout: ParallelLayout, rank: int) -> Shard:
    """The layers and KV heads of `rank`. IncompatiblePeer when the heads cannot be spread over tp, or layers over pp.

    Layers: as even as can be, earlier stages take the remainder. KV heads: tp must divide them or be a multiple.
    """
    heads, tp, pp = shape.num_kv_heads, layout.tp, layout.pp
    if (heads % tp and tp % heads) or shape.num_heads % tp:
        raise IncompatiblePeer(
            f"tp must divide {shape.num_heads} attention heads, and divide or be a multiple of {heads} KV heads, got {tp}",
            field="tp",
            value=tp,
        )
    if pp > shape.num_layers:
        raise IncompatiblePeer(f"pp must be at most the {shape.num_layers} layers, got {pp}", field="pp", value=pp)
    if not 0 <= rank < layout.world_size:
        raise ValueError(f"rank must be from 0 to {layout.world_size - 1}, got {rank}")
    stage, tp_rank = divmod(rank, tp)
    each, extra = divmod(shape.num_layers, pp)
    first_layer = stage * each + min(stage, extra)
    layers = (first_layer, first_layer + each + (stage < extra))
    if tp <= heads:
        width = heads // tp
        kv_heads = (tp_rank * width, (tp_rank + 1) * width)
    else:
        head = tp_rank * heads // tp
        kv_heads = (head, head + 1)
    return Shard(rank, tp_rank, stage, layers, kv_heads)


def slab_of(shape: ModelShape, layout: ParallelLayout, rank: int, engine: EngineConfig) -> SlabLayout:
    """What a block is on this rank."""
    mine = shard(shape, layout, rank)
    return SlabLayout(
        mine.num_kv_heads, mine.num_layers, engine.block_size, shape.head_dim, ELEMENT_BYTES[engine.dtype]
    )


def block_bytes(shape: ModelShape, layout: ParallelLayout, engine: EngineConfig) -> int:
    """One block on all ranks; replicated heads count as often as they are held."""
    return sum(slab_of(shape, layout, rank, engine).block_bytes for rank in range(layout.world_size))


def num_blocks(shape: ModelShape, layout: ParallelLayout, engine: EngineConfig, key: str = "engine") -> int:
    """As configured, or as many as kv_bytes holds over all ranks; the same on every rank. ConfigError, by the `key` of the
    section, where that is less than two."""
    if engine.num_blocks is not None:
        return engine.num_blocks
    each = block_bytes(shape, layout, engine)
    if engine.kv_bytes < 2 * each:
        raise ConfigError.out_of_range(
            f"{key}.kv_bytes", engine.kv_bytes, f"at least {2 * each}: two blocks of {each} bytes"
        )
    return engine.kv_bytes // each


@dataclass(frozen=True, slots=True)
class Piece:
    """One copy of every moved block: `num_heads` × `num_layers` from a source rank's slab to a target rank's.

    Offsets are local to each side's shard.
    """

    source_rank: int
    target_rank: int
    source_head: int
    target_head: int
    num_heads: int
    source_layer: int
    target_layer: int
    num_layers: int

    def num_bytes(self, slab: SlabLayout) -> int:
        """Bytes of this piece per block."""
        return self.num_heads * self.num_layers * slab.layer_stride * slab.element_bytes


def reshard_plan(shape: ModelShape, source: ParallelLayout, target: ParallelLayout) -> tuple[Piece, ...]:
    """Every (head, layer) of every target rank, read from exactly one source rank; both sides derive the same plan.

    Where the source holds a head more than once, its replicas share the targets evenly. Every replica target is filled.
    """
    sources = [shard(shape, source, rank) for rank in range(source.world_size)]
    pieces: list[Piece] = []
    for rank in range(target.world_size):
        mine = shard(shape, target, rank)
        heads_left = list(range(*mine.kv_heads))
        while heads_left:
            first = heads_left[0]
            holders = sorted({s.tp_rank for s in sources if s.kv_heads[0] <= first < s.kv_heads[1]})
            holder = holders[mine.tp_rank % len(holders)]
            span = next(s.kv_heads for s in sources if s.tp_rank == holder)
            num_heads = min(span[1], mine.kv_heads[1]) - first
            for s in (s for s in sources if s.tp_rank == holder):
                low, high = max(s.layers[0], mine.layers[0]), min(s.layers[1], mine.layers[1])
                if low < high:
                    pieces.append(
                        Piece(
                            source_rank=s.rank,
                            target_rank=rank,
                            source_head=first - s.kv_heads[0],
                            target_head=first - mine.kv_heads[0],
                            num_heads=num_heads,
                            source_layer=low - s.layers[0],
                            target_layer=low - mine.layers[0],
                            num_layers=high - low,
                        )
                    )
            heads_left = heads_left[num_heads:]
    return tuple(pieces)
