"""What routers tell each other of a placement, and the load in it, until the worker itself reports that. Pure.

Reports lag: of what another router placed a moment ago nothing shows before the worker's next one. Until then it counts
here as a ledger's entry does, which is what it is elsewhere; on a worker that prefills and one that decodes each by itself,
for they report at different times.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from headrace.values import Capacity, Load
from router.decisions.ledger import Ledger

ON_ITS_WAY_SECONDS = 5e-3  # a report heard sooner after a placement may have been made before that came to the worker
MAX_OF_A_WORKER = 1024
FEW_ENDS = 1024  # among which those of what is closed already may be the most


@dataclass(frozen=True, slots=True)
class Brought:
    """The load of a placement: `prefill_tokens` for whoever prefills, and `num_prompt_tokens` of `n` samples for `decode`;
    no samples where that owned the request before."""

    decode: str
    num_prompt_tokens: int
    prefill_tokens: int
    n: int

    def at_most(self, prefill: Capacity, decode: Capacity) -> "Brought":
        """Of what others say no more than each of the two workers can have of one request."""
        return Brought(
            self.decode,
            min(max(self.num_prompt_tokens, 0), decode.max_context_tokens),
            min(max(self.prefill_tokens, 0), prefill.max_context_tokens),
            min(max(self.n, 0), decode.max_num_seqs),
        )


@dataclass(frozen=True, slots=True)
class Told:
    """What one router tells the others of a placement: for how long the worker that prefills is to be expected to hold
    these blocks, by their keys, if it does not say so itself; the same of the load. `load` None: by a router that tells
    of none."""

    name: str
    worker_id: str
    keys: Sequence[int]
    seconds: float
    load: Brought | None = None


class ToldLoads:
    """Owns what is believed of others' placements, of one router."""

    def __init__(self) -> None:
        self._ledger = Ledger()
        self._heard: dict[str, dict[str, float]] = {}  # by worker: when, by the entry's name; the oldest first
        self._ends: list[tuple[float, str, str]] = []

    def hear(self, told: Told, load: Brought, now: float) -> None:
        until = now + told.seconds
        if load.decode == told.worker_id:
            self._open(told.name, told.worker_id, load.num_prompt_tokens, load.prefill_tokens, load.n, now, until)
            return
        self._open(told.name, told.worker_id, 0, load.prefill_tokens, 1, now, until)
        if load.n:
            self._open(told.name, load.decode, load.num_prompt_tokens, 0, load.n, now, until)

    def reported(self, worker: str, now: float) -> None:
        """The worker's report came: what it was given before is in there."""
        heard = self._heard.get(worker)
        if heard:
            for name in list(takewhile(lambda name: heard[name] <= now - ON_ITS_WAY_SECONDS, heard)):
                self._close(worker, name)

    def forget(self, worker: str) -> None:
        """The worker is gone."""
        for name in list(self._heard.get(worker, ())):
            self._close(worker, name)

    def expire(self, now: float) -> None:
        while self._ends and self._ends[0][0] <= now:
            _, worker, name = heapq.heappop(self._ends)
            if name in self._heard.get(worker, ()):
                self._close(worker, name)

    def of(self, worker: str) -> Load:
        return self._ledger.own(worker)

    def drain_changed(self) -> set[str]:
        """As Ledger's."""
        return self._ledger.drain_changed()

    def _open(
        self, name: str, worker: str, num_prompt_tokens: int, prefill_tokens: int, n: int, now: float, until: float
    ) -> None:
        if len(self._heard.get(worker, ())) >= MAX_OF_A_WORKER:
            self._close(worker, next(iter(self._heard[worker])))
        self._heard.setdefault(worker, {})[name] = now
        if len(self._ends) > 2 * len(self._ledger) + FEW_ENDS:
            self._ends = [end for end in self._ends if end[2] in self._heard.get(end[1], ())]
            heapq.heapify(self._ends)
        heapq.heappush(self._ends, (until, worker, name))
        self._ledger.open(
            _entry(worker, name),
            decode=worker,
            prefill=None,
            num_prompt_tokens=num_prompt_tokens,
            prefill_tokens=prefill_tokens,
            n=n,
        )

    def _close(self, worker: str, name: str) -> None:
        heard = self._heard[worker]
        del heard[name]
        if not heard:
            del self._heard[worker]
        self._ledger.close(_entry(worker, name))


def _entry(worker: str, name: str) -> str:
    return f"{worker} {name}"
