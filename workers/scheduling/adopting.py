"""The prefill side takes blocks that a decode worker offers into its cache, before it computes the rest of the prompt.

begin   blocks to pull into, behind what the cache has of the prompt
finish  they hold their content: cached like any others, for this prompt to find; or the pull failed, and they are free

What comes in is cached and nothing more: a ticket whose offer failed, or was evicted while it waited, is computed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

from headrace.blocks import BlockHasher, BlockId
from headrace.values import Request
from workers.scheduling.blocks import Holding
from workers.scheduling.running import Running


@dataclass(frozen=True, slots=True)
class Adoption:
    """Offered blocks from number `first` on go into `targets`, as (block, epoch)."""

    holding: Holding
    chain: tuple[BlockId, ...]
    first: int
    targets: tuple[tuple[int, int], ...]


class Adopting:
    """A part of one Scheduler; owns nothing. What begins is finished once, whatever becomes of the ticket."""

    def __init__(self, running: Running, hasher: Callable[[str, str], BlockHasher]) -> None:
        self._running = running
        self._ledger = running.ledger
        self._hasher = hasher

    def begin(self, request: Request, num_offered: int) -> Adoption | None:
        """None when the cache has all of it already, or the pool no room that is not promised to others."""
        ledger = self._ledger
        num_full = min(num_offered, (request.num_prompt_tokens - 1) // ledger.block_size)
        hasher = self._hasher(request.adapter, request.cache_salt)
        chain = tuple(islice(hasher.chain(request.prompt_token_ids), num_full))
        hits = ledger.match(chain)
        lacking = num_full - len(hits)
        promised = self._running.reserved_blocks + self._running.claimed_blocks
        if not 0 < lacking <= ledger.available - ledger.num_idle(hits) - promised:
            return None
        holding = ledger.open(("adopted for", request.key))
        ledger.share(holding, hits)
        targets = tuple((block, ledger.epoch(block)) for block in ledger.allocate(holding, lacking))
        return Adoption(holding, chain, len(hits), targets)

    def finish(self, adoption: Adoption, *, landed: bool) -> None:
        if landed:
            for index in range(adoption.first, len(adoption.chain)):
                self._ledger.publish(adoption.holding, index, adoption.chain[index])
        self._ledger.close(adoption.holding)
