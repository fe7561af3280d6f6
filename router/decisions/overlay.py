"""What this router's own placements will bring into workers' caches, until the workers say so themselves. Pure.

Between a placement and the event of its blocks lie a queue, a prefill and a batch of events: an equal prompt that comes
meanwhile should find the first one's worker. An entry ends block by block as events confirm it, as a whole when its
request ends before its first token, and at the latest at its time. Bounded by each worker's capacity and in total; what
came first gives way.
"""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MAX_BLOCKS = 500_000


@dataclass(slots=True, eq=False)
class _Entry:
    request_id: str
    worker: str
    keys: Sequence[int]
    expires: float


class Overlay:
    """Owns the entries of one router. Blocks are known by their keys, as in the mirror."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._num_blocks = 0
        self._by_worker: dict[str, dict[_Entry, None]] = {}
        self._num_blocks_of: dict[str, int] = {}  # by worker
        self._by_request: dict[str, list[_Entry]] = {}
        self._expected: dict[str, dict[int, int]] = {}
        self._roots: dict[int, dict[str, int]] = {}
        self._ends: list[tuple[float, int, _Entry]] = []
        self._number = 0

    @property
    def num_blocks(self) -> int:
        """Blocks over all entries, confirmed ones with them until their entry ends."""
        return self._num_blocks

    @property
    def expecting(self) -> dict[str, dict[int, int]]:
        """By worker: block → how many of its entries expect it. To be read, not kept."""
        return self._expected

    def rooted(self, key: int) -> Iterable[str]:
        """The workers with an entry that begins with this block. Whoever else expects it holds what comes before it."""
        return self._roots.get(key, ())

    def expect(self, request_id: str, worker: str, keys: Sequence[int], capacity: int, expires: float) -> None:
        """The request was placed on a worker of `capacity` blocks, which will then hold these."""
        keys = keys[: min(capacity, self._max_blocks)]
        if not keys:
            return
        while self._num_blocks_of.get(worker, 0) + len(keys) > capacity:
            self._end(next(iter(self._by_worker[worker])))
        while self._num_blocks + len(keys) > self._max_blocks:
            self._end(next(iter(self._by_request.values()))[0])
        entry = _Entry(request_id, worker, keys, expires)
        self._by_worker.setdefault(worker, {})[entry] = None
        self._by_request.setdefault(request_id, []).append(entry)
        roots = self._roots.setdefault(keys[0], {})
        roots[worker] = roots.get(worker, 0) + 1
        counts = self._expected.setdefault(worker, {})
        for key in keys:
            counts[key] = counts.get(key, 0) + 1
        self._num_blocks += len(keys)
        self._num_blocks_of[worker] = self._num_blocks_of.get(worker, 0) + len(keys)
        self._schedule(entry)

    def settle(self, request_id: str, expires: float) -> None:
        """The prompt is computed: its events are on their way, and due by then."""
        for entry in self._by_request.get(request_id, ()):
            entry.expires = expires
            self._schedule(entry)

    def confirm(self, worker: str, keys: Sequence[int]) -> None:
        """The worker itself says that it holds these."""
        counts = self._expected.get(worker)
        if counts:
            for key in keys:
                counts.pop(key, None)

    def withdraw(self, request_id: str) -> None:
        """Nothing will come of the request."""
        for entry in list(self._by_request.get(request_id, ())):
            self._end(entry)

    def forget(self, worker: str) -> None:
        """The worker lost its cache, or is gone."""
        for entry in list(self._by_worker.get(worker, ())):
            self._end(entry)

    def expire(self, now: float) -> None:
        """Ends what is over its time."""
        while self._ends and self._ends[0][0] <= now:
            expires, _, entry = heapq.heappop(self._ends)
            if expires == entry.expires and entry in self._by_worker.get(entry.worker, ()):
                self._end(entry)

    def _schedule(self, entry: _Entry) -> None:
        self._number += 1
        heapq.heappush(self._ends, (entry.expires, self._number, entry))

    def _end(self, entry: _Entry) -> None:
        counts = self._expected[entry.worker]
        for key in entry.keys:
            count = counts.get(key, 0)
            if count > 1:
                counts[key] = count - 1
            elif count:
                del counts[key]
        roots = self._roots[entry.keys[0]]
        roots[entry.worker] -= 1
        if not roots[entry.worker]:
            del roots[entry.worker]
            if not roots:
                del self._roots[entry.keys[0]]
        self._num_blocks -= len(entry.keys)
        self._num_blocks_of[entry.worker] -= len(entry.keys)
        entry.keys = ()  # its place in the heap outlives it
        entries, of_request = self._by_worker[entry.worker], self._by_request[entry.request_id]
        del entries[entry]
        of_request.remove(entry)
        if not entries:
            del self._by_worker[entry.worker], self._expected[entry.worker], self._num_blocks_of[entry.worker]
        if not of_request:
            del self._by_request[entry.request_id]
