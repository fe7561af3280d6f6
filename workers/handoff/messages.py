"""Transfer messages to values and back: what two workers say to each other about KV blocks."""

from dataclasses import dataclass

from headrace import wire
from headrace.errors import HeadraceError, IncompatiblePeer
from headrace.v1 import transfer_pb2
from headrace.values import Compatibility, ParallelLayout, RequestKey
from workers.kv.layout import ModelShape, reshard_plan
from workers.kv.links.base import PeerRanks
from workers.scheduling.scheduler import ChunkDone, FirstToken


@dataclass(frozen=True, slots=True)
class PeerHello:
    """How a worker introduces itself on a Transfer.Link."""

    worker_id: str
    generation: int
    compatibility: Compatibility
    layout: ParallelLayout
    num_kv_heads: int
    num_layers: int
    endpoints: tuple[str, ...]
    node: str = ""

    @property
    def ranks(self) -> PeerRanks:
        return PeerRanks(self.worker_id, self.generation, self.layout, self.endpoints, self.node)

    def check_pair(self, peer: "PeerHello", shape: ModelShape) -> None:
        """IncompatiblePeer, naming the field, when KV of `peer` is not ours to read, or ours not its."""
        field = self.compatibility.first_difference(peer.compatibility)
        ours, theirs = (getattr(side.compatibility, field, "") if field else "" for side in (self, peer))
        for name in () if field else ("num_kv_heads", "num_layers"):
            if getattr(self, name) != getattr(peer, name):
                field, ours, theirs = name, getattr(self, name), getattr(peer, name)
        if field:
            raise IncompatiblePeer(
                f"{field} of {self.worker_id} is {ours!r}, of {peer.worker_id} {theirs!r}: they cannot share KV",
                field=field,
                ours=ours,
                theirs=theirs,
            )
        if len(peer.endpoints) != peer.layout.world_size:
            raise IncompatiblePeer(
                f"{peer.worker_id} names {len(peer.endpoints)} endpoints for {peer.layout.world_size} ranks",
                field="endpoints",
            )
        reshard_plan(shape, peer.layout, self.layout)


def hello_to_pb(hello: PeerHello) -> transfer_pb2.LinkHello:
    return transfer_pb2.LinkHello(
        worker_id=hello.worker_id,
        generation=hello.generation,
        compatibility=wire.compatibility_to_pb(hello.compatibility),
        layout=wire.layout_to_pb(hello.layout),
        num_kv_heads=hello.num_kv_heads,
        num_layers=hello.num_layers,
        endpoints=[
            transfer_pb2.RankEndpoint(kind=endpoint.partition("://")[0], address=endpoint)
            for endpoint in hello.endpoints
        ],
        node=hello.node,
    )


def hello_from_pb(pb: transfer_pb2.LinkHello) -> PeerHello:
    return PeerHello(
        worker_id=pb.worker_id,
        generation=pb.generation,
        compatibility=wire.compatibility_from_pb(pb.compatibility),
        layout=wire.layout_from_pb(pb.layout),
        num_kv_heads=pb.num_kv_heads,
        num_layers=pb.num_layers,
        endpoints=tuple(endpoint.address for endpoint in pb.endpoints),
        node=pb.node,
    )


def chunk_to_pb(chunk: ChunkDone) -> transfer_pb2.Announce:
    return transfer_pb2.Announce(
        key=wire.key_to_pb(chunk.key),
        first_block=chunk.first_block,
        blocks=[block for block, _ in chunk.blocks],
        epochs=[epoch for _, epoch in chunk.blocks],
        last=chunk.last,
        first_tokens=[
            transfer_pb2.FirstToken(
                index=token.index,
                token_id=token.token_id,
                logprobs=wire.logprobs_to_pb(token.logprobs) if token.logprobs else None,
            )
            for token in chunk.first_tokens
        ],
        cached_tokens=chunk.cached_tokens,
        queue_seconds=chunk.queue_seconds,
        prefill_seconds=chunk.prefill_seconds,
        after_step=chunk.after_step,
        digests=chunk.digests,
    )


def chunk_from_pb(pb: transfer_pb2.Announce) -> ChunkDone:
    """ValueError when blocks and epochs do not match."""
    return ChunkDone(
        key=wire.key_from_pb(pb.key),
        first_block=pb.first_block,
        blocks=tuple(zip(pb.blocks, pb.epochs, strict=True)),
        last=pb.last,
        first_tokens=tuple(
            FirstToken(
                index=token.index,
                token_id=token.token_id,
                logprobs=wire.logprobs_from_pb(token.logprobs) if token.HasField("logprobs") else None,
            )
            for token in pb.first_tokens
        ),
        cached_tokens=pb.cached_tokens,
        queue_seconds=pb.queue_seconds,
        prefill_seconds=pb.prefill_seconds,
        after_step=pb.after_step,
        digests=tuple(pb.digests),
    )


def announce(chunk: ChunkDone) -> transfer_pb2.SourceMessage:
    return transfer_pb2.SourceMessage(announce=chunk_to_pb(chunk))


def source_abort(key: RequestKey, error: HeadraceError) -> transfer_pb2.SourceMessage:
    return transfer_pb2.SourceMessage(abort=_abort(key, error))


def puller_abort(key: RequestKey, error: HeadraceError) -> transfer_pb2.PullerMessage:
    return transfer_pb2.PullerMessage(abort=_abort(key, error))


def release(key: RequestKey) -> transfer_pb2.PullerMessage:
    return transfer_pb2.PullerMessage(release=transfer_pb2.Release(key=wire.key_to_pb(key)))


def renew(key: RequestKey, *, heard: bool) -> transfer_pb2.PullerMessage:
    return transfer_pb2.PullerMessage(renew=transfer_pb2.Renew(key=wire.key_to_pb(key), unheard=not heard))


def _abort(key: RequestKey, error: HeadraceError) -> transfer_pb2.Abort:
    return transfer_pb2.Abort(key=wire.key_to_pb(key), reason=wire.error_to_pb(error))
