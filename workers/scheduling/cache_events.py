"""What the prefix cache holds more and less than when somebody last asked: the index events of one worker."""

from collections.abc import Iterable

from headrace.blocks import BlockId
from headrace.keys import Event, EventKind


class CacheEvents:
    """Owned by a BlockLedger. Runs of one kind together; bounded, so that a publisher may stay away."""

    __slots__ = ("_limit", "_overflowed", "_runs", "_size")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._size = 0
        self._overflowed = False
        self._runs: list[tuple[EventKind, list[BlockId]]] = []

    @property
    def any(self) -> bool:
        return self._overflowed or bool(self._runs)

    def add(self, kind: EventKind, block_id: BlockId) -> None:
        if self._overflowed:
            return
        if self._size == self._limit:
            self._overflowed = True
            self._runs = []
            return
        self._size += 1
        if self._runs and self._runs[-1][0] is kind:
            self._runs[-1][1].append(block_id)
        else:
            self._runs.append((kind, [block_id]))

    def clear(self) -> None:
        self._runs = [(EventKind.CLEARED, [])]
        self._size = 0
        self._overflowed = False

    def drain(self, everything: Iterable[BlockId]) -> list[Event]:
        if self._overflowed:
            events = [Event(EventKind.CLEARED), Event.of(EventKind.STORED, everything)]
        else:
            events = [Event.of(kind, ids) for kind, ids in self._runs]
        self._runs = []
        self._size = 0
        self._overflowed = False
        return events
