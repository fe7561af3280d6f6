"""How ranks of one machine come to sum small tensors by a kernel of ours (kernels.all_reduce): each gives the others its
buffer as an open file, and maps theirs.

No process group and no library takes part, and no process need see another's GPU: so it is under Ray.
"""

import json
import logging
import os
import secrets
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from headrace.errors import ConfigError
from kernels.all_reduce import KINDS, Meeting, all_reduce, buffer_bytes, make_empty, two_shots_fit
from kernels.all_reduce_norm import MAX_WIDTH, all_reduce_add_norm
from kernels.tuning import ReduceTile, tuning_of
from workers.kv.channel import UNIX, Channel, ChannelClosed, Listener, connect
from workers.kv.links.endpoint import Place, this_machine

log = logging.getLogger(__name__)

# Above, what a library saves in bytes is worth its start: 10 to 30 µs.
ROOM_BYTES = 4 * 2**20
TWO_SHOTS_FROM_BYTES = 2**17


class Memory(Protocol):
    """A buffer of ours that peers can map, and theirs as they are mapped here, for as long as this lives."""

    def allocate(self, num_bytes: int) -> Tensor: ...

    def export(self) -> int:
        """A descriptor of the buffer, which the caller closes."""
        ...

    def map(self, descriptor: int, num_bytes: int) -> int:
        """The address of a peer's buffer; closes the descriptor. RuntimeError where it cannot be reached."""
        ...


class DeviceMemory:
    """Memory of this process's GPU."""

    def __init__(self, device: torch.device) -> None:
        from workers.kv.device_memory import MappedMemory

        self._device, self._kind = device, MappedMemory
        self._own: Any = None
        self._peers: list[Any] = []

    def allocate(self, num_bytes: int) -> Tensor:
        self._own = self._kind.allocate(num_bytes, self._device.index)
        return torch.as_tensor(self._own, device=self._device)[:num_bytes]

    def export(self) -> int:
        return int(self._own.export())

    def map(self, descriptor: int, num_bytes: int) -> int:
        step = self._own.num_bytes  # as much as the peer's: both round up alike
        self._peers.append(self._kind.of_descriptor(descriptor, step, self._device.index))
        return int(self._peers[-1].address)


class SmallSums:
    """One rank's part in the sums of its group. Owns the buffers' mappings and the meeting's state; sums on one stream,
    one call after the other."""

    def __init__(self, meeting: Meeting, memory: Memory, tile: ReduceTile) -> None:
        self._meeting, self._memory, self._tile = meeting, memory, tile
        self._device = meeting.state.device
        self._gone = torch.ones(1, dtype=torch.int32)
        if self._device.type == "cuda":
            self._gone = self._gone.pin_memory()
            self._aside = torch.cuda.Stream(self._device)

    def take(self, x: Tensor) -> bool:
        """Whether x is summed here: the same on all ranks, whose x are alike."""
        return x.nbytes <= self._meeting.room_bytes and x.dtype in KINDS and x.is_contiguous()

    def take_pieces(self, x: Tensor) -> bool:
        """The same of x in pieces, each of at most most_elements()."""
        return x.dtype in KINDS and x.is_contiguous()

    def most_elements(self, x: Tensor) -> int:
        return self._meeting.room_bytes // x.element_size()

    def add_up(self, x: Tensor) -> None:
        """x becomes the sum of all ranks' x."""
        ranks = self._meeting.num_ranks
        two_shots = ranks > 2 and x.nbytes >= TWO_SHOTS_FROM_BYTES and two_shots_fit(x, ranks)
        if x.numel():
            all_reduce(x, self._meeting, self._tile, two_shots=two_shots)

    def take_rows(self, x_TD: Tensor) -> bool:
        """Whether add_rms_norm does: one shot, and whole rows in a program."""
        few = self._meeting.num_ranks == 2 or x_TD.nbytes < TWO_SHOTS_FROM_BYTES
        return few and x_TD.shape[-1] <= MAX_WIDTH and x_TD.numel() > 0 and self.take(x_TD)

    def add_rms_norm(self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(rms_norm(sum of x + residual), sum of x + residual)."""
        out, total = torch.empty_like(x_TD), torch.empty_like(x_TD)
        programs = self._tile.num_programs
        all_reduce_add_norm(x_TD, residual_TD, weight_D, eps, out, total, self._meeting, programs)
        return out, total

    def abandon(self) -> None:
        """Sums wait for nobody any more, those under way neither, and come to anything. From any thread."""
        if self._device.type != "cuda":
            self._meeting.state[2:].copy_(self._gone)
            return
        with torch.cuda.stream(self._aside):
            self._meeting.state[2:].copy_(self._gone, non_blocking=True)
        self._aside.synchronize()


def place_of(device: torch.device) -> Place:
    """Where a rank computes; its device is "" on a CPU, which ranks may share."""
    if device.type != "cuda":
        return Place(this_machine())
    return Place(this_machine(), f"GPU-{torch.cuda.get_device_properties(device).uuid}")


def meet(
    store: Any, rank: int, size: int, device: torch.device, memory: Memory, room_bytes: int = ROOM_BYTES
) -> SmallSums | None:
    """Joins this rank with the `size` ranks that meet at `store`; blocks until all have. None, on all of them, where one
    is on another machine or cannot map a peer's buffer."""
    buffer = memory.allocate(buffer_bytes(size, room_bytes))
    make_empty(buffer)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    host, token = f"{UNIX}headrace-{secrets.token_hex(8)}", secrets.token_urlsafe(16)
    listener = Listener(host, token, lambda channel: _hand_out(channel, memory))
    try:
        offers = _told(store, "offer", rank, size, [this_machine(), host, token])
        if len({machine for machine, _, _ in offers}) > 1 or not offers[0][0]:
            log.info("ranks are on several machines: all sums go through their process group")
            return None
        addresses, failure = [], ""
        try:
            for peer, (_, host, token) in enumerate(offers):
                own = peer == rank
                addresses.append(buffer.data_ptr() if own else memory.map(_taken(host, token), buffer.nbytes))
        except (ChannelClosed, RuntimeError) as error:
            failure = f"rank {rank} cannot map the buffer of rank {len(addresses)}: {error}"
        failures = [failed for failed in _told(store, "mapped", rank, size, failure) if failed]
    finally:
        listener.close()
    if failures:
        log.warning("%s; all sums go through the process group", failures[0])
        return None
    state = torch.zeros(3, dtype=torch.int32, device=device)
    meeting = Meeting(rank, torch.tensor(addresses, dtype=torch.int64, device=device), state, room_bytes)
    return SmallSums(meeting, memory, tuning_of(device).reduce)


def own_device_each(store: Any, rank: int, size: int, place: Place) -> None:
    """ConfigError, on all ranks, where two of them compute on one GPU: a library would refuse it late, or hang."""
    told = [Place(*place) for place in _told(store, "place", rank, size, [place.machine, place.device])]
    first: dict[Place, int] = {}
    for other, theirs in enumerate(told):
        if theirs.device and first.setdefault(theirs, other) != other:
            raise ConfigError(f"ranks {first[theirs]} and {other} are on one GPU, {theirs.device}: each needs its own")


def _told(store: Any, what: str, rank: int, size: int, value: Any) -> Sequence[Any]:
    """What each rank says, in rank order; blocks until all have."""
    store.set(f"{what}/{rank}", json.dumps(value))
    return [json.loads(store.get(f"{what}/{other}")) for other in range(size)]


def _hand_out(channel: Channel, memory: Memory) -> None:
    descriptor = memory.export()
    try:
        channel.send_descriptors(b"", [descriptor])
    except ChannelClosed as error:
        log.warning("a rank left before it was given a buffer: %s", error)
    finally:
        os.close(descriptor)
        channel.close()


def _taken(host: str, token: str) -> int:
    channel = connect(host, 0, token)
    try:
        _, (descriptor,) = channel.receive_descriptors(1, seconds=10.0)
    finally:
        channel.close()
    return descriptor
