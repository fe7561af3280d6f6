"""Reads of a peer's blocks into our own, on either side of a hand-off: bounded in time, quarantined until they are over."""

import asyncio
from collections.abc import Callable, Sequence

from headrace.errors import LinkClosed, TransferFailed
from workers.engine import Engine
from workers.faults import Faults
from workers.kv.links.base import BlockPull, PeerRanks, PullReceipt

Block = tuple[int, int]


class Reads:
    """Owns nothing; the engine learns what a read cost. `step_seconds`: how long a step may take at the source before its
    worker counts as stalled. `on_read` hears of (bytes, seconds)."""

    def __init__(
        self,
        engine: Engine,
        transfer_seconds: float,
        step_seconds: float,
        faults: Faults | None = None,
        *,
        on_read: Callable[[int, float], None] | None = None,
    ) -> None:
        self._engine = engine
        self._transfer_seconds = transfer_seconds
        self._step_seconds = step_seconds
        self._faults = faults or Faults()
        self._on_read = on_read

    async def read(
        self, ranks: PeerRanks, sources: Sequence[Block], targets: Sequence[Block], after_step: int = 0
    ) -> PullReceipt:
        """Reads source blocks into target blocks, each (block, epoch), in order, once the source has done `after_step`.

        A caller that goes away does not end the read: its target blocks stay quarantined until it is over, which a read
        that takes too long is by having its link closed under it."""
        executor, incoming = self._engine.executor, self._engine.scheduler.incoming
        pulls = [
            BlockPull(source, epoch, target, target_epoch)
            for (source, epoch), (target, target_epoch) in zip(sources, targets, strict=True)
        ]
        quarantine = incoming.begin_pull(targets)
        seconds = self._transfer_seconds + (self._step_seconds if after_step else 0.0)
        try:
            reading = asyncio.wrap_future(executor.pull(ranks, pulls, after_step))
        except BaseException:  # it has not begun, so nothing says that it is over
            incoming.end_pull(quarantine)
            raise
        late = asyncio.get_running_loop().call_later(seconds, executor.close_links, ranks.key)

        def over(reading: asyncio.Future[PullReceipt]) -> None:
            late.cancel()
            incoming.end_pull(quarantine)
            self._engine.changed()
            if not reading.cancelled():
                reading.exception()

        reading.add_done_callback(over)
        started = self._engine.clock.now()
        try:
            receipt = await asyncio.shield(reading)
        except LinkClosed as error:
            if self._engine.clock.now() - started < seconds:
                raise
            raise TransferFailed(
                f"{len(pulls)} blocks of {ranks.worker_id} did not come within {seconds:g} s",
                seconds=seconds,
            ) from error
        self._engine.add_transfer(receipt.num_bytes, receipt.seconds)
        if self._on_read:
            self._on_read(receipt.num_bytes, receipt.seconds)
        return receipt

    async def meet_faults(self, first_block: int, num_blocks: int) -> None:
        """What fault hooks do to a read of blocks from number `first_block` of a prompt on."""
        whole = await self._faults.reach("pull")
        part = await self._faults.reach("transfer.block", first_block, num_blocks)
        if not (whole and part):
            await asyncio.sleep(self._transfer_seconds)
            raise TransferFailed(f"fault: blocks from {first_block} on never came")
