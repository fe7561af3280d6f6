"""One prefill and one decode worker under virtual time, and what their pools hold over it: for the KV waste of a trace."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from headrace.errors import HeadraceError
from headrace.keys import EventBatch
from headrace.values import (
    Capacity,
    Compatibility,
    LoadReport,
    ParallelLayout,
    PrefillTarget,
    Request,
    RequestKey,
    Role,
    SequenceOutput,
    WorkerInfo,
)
from workers.virtual.engine import Machine, virtual_hasher
from workers.virtual.time import VirtualTime
from workers.virtual.worker import VirtualWorker


@dataclass
class Usage:
    """Slots × seconds of both pools: held, filled, and what the filled ones need at least (whole blocks)."""

    held: float = 0.0
    filled: float = 0.0
    needed: float = 0.0
    peak_held_fraction: float = 0.0

    @property
    def waste_fraction(self) -> float:
        return (self.held - self.filled) / self.held if self.held else 0.0

    @property
    def floor_fraction(self) -> float:
        return (self.needed - self.filled) / self.needed if self.needed else 0.0


class VirtualPair:
    """Feed it requests in order of time with run(); `usage` then holds what the pools held. A router that places
    everything on the one pair, and retries nothing."""

    def __init__(self, machine: Machine, local_prefill_max_tokens: int = 64) -> None:
        self.usage = Usage()
        self.num_finished = 0
        self.num_tokens = 0
        self._machine = machine
        self._local_prefill_max_tokens = local_prefill_max_tokens
        self._time = VirtualTime(self._pass)
        self._workers: dict[str, VirtualWorker] = {}
        hasher = virtual_hasher(machine.block_size)
        for role in (Role.PREFILL, Role.DECODE):
            info = _info(machine, role)
            self._workers[role] = VirtualWorker(self._time, info, machine, hasher, self._workers, (self,))
        self.prefill, self.decode = self._workers[Role.PREFILL], self._workers[Role.DECODE]

    def run(self, arrivals: Iterable[tuple[float, Request]]) -> None:
        """Until the last of the arrivals is answered."""
        target = PrefillTarget(self.prefill.worker_id, 1, "")
        for seconds, request in arrivals:
            request = replace(request, prefill=target, local_prefill_max_tokens=self._local_prefill_max_tokens)
            self._time.run(seconds)
            self._time.at(seconds, self.decode.submit, request)
        self._time.run()

    def _pass(self, seconds: float) -> None:
        size, usage = self._machine.block_size, self.usage
        for worker in self._workers.values():
            counts = worker.scheduler.counts()
            held = counts.active + counts.pinned + counts.quarantined
            usage.held += held * size * seconds
            usage.peak_held_fraction = max(usage.peak_held_fraction, held / counts.total)
            for filled in worker.scheduler.filled_positions():
                usage.filled += filled * seconds
                usage.needed += -(-filled // size) * size * seconds

    # -- what a router hears

    def outputs(self, worker_id: str, outputs: list[SequenceOutput]) -> None:
        self.num_tokens += sum(len(output.token_ids) for output in outputs)
        self.num_finished += sum(output.finish is not None for output in outputs)

    def rejected(self, worker_id: str, key: RequestKey, error: HeadraceError) -> None:
        raise error

    def peer_lost(self, worker_id: str, key: RequestKey, prefill: str, error: HeadraceError) -> None:
        raise error

    def reported(self, worker_id: str, report: LoadReport) -> None:
        pass

    def changed(self, worker_id: str, batch: EventBatch) -> None:
        pass


def _info(machine: Machine, role: Role) -> WorkerInfo:
    limits = machine.scheduler
    capacity = Capacity(
        machine.num_blocks,
        machine.block_bytes,
        limits.max_num_seqs,
        limits.max_context_tokens,
        limits.max_step_tokens,
        2**31 - 1,
    )
    compatibility = Compatibility("m", "r", "t", "c", "d", "d", block_size=machine.block_size)
    return WorkerInfo(role.value, 1, role, "", compatibility, ParallelLayout(), capacity, "")
