"""A router's own requests in flight, as load on the workers that carry them (design 5.6). Pure.

Reports lag; what this router placed a moment ago is known here at once. `own(worker)` stands in for the part of a
report that is `yours`, so nothing is counted twice, and an entry lives exactly as long as its request.
"""

from dataclasses import dataclass

from headrace.values import Load

LIFE_TOKENS = 128.0  # of an answer, until those that run are longer


@dataclass(frozen=True, slots=True)
class Beside:
    """What a stream meets on a worker, as far as this router placed it. `tokens`: of prompts that are computed there for
    each step of it and for each stream beside it; `life`: how many steps it lives."""

    tokens: float = 0.0
    life: float = LIFE_TOKENS


NOTHING_BESIDE = Beside()


@dataclass(slots=True)
class _Sum:
    """The running totals of one worker: the fields of a Load that a router can know of its own requests, and of those that
    run what was generated for them, and what was computed of their prompts where they decode."""

    num_waiting: int = 0
    num_running: int = 0
    waiting_prefill_tokens: int = 0
    context_tokens: int = 0
    claimed_tokens: int = 0
    generated_tokens: int = 0
    beside_tokens: int = 0


@dataclass(slots=True)
class _Entry:
    decode: str
    prefill: str
    num_prompt_tokens: int
    prefill_tokens: int
    n: int
    running: bool = False
    num_context_tokens: int = 0


class Ledger:
    """Owns the entries of one router; `router.requests` opens and closes them, and every entry it opens it closes."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._sums: dict[str, _Sum] = {}
        self._changed: set[str] = set()

    def __len__(self) -> int:
        return len(self._entries)

    def open(
        self, request_id: str, *, decode: str, prefill: str | None, num_prompt_tokens: int, prefill_tokens: int, n: int
    ) -> None:
        """The request was placed; a request that is placed again moves. `prefill_tokens`: what someone must compute."""
        self.close(request_id)
        entry = _Entry(decode, prefill or decode, num_prompt_tokens, prefill_tokens, n)
        self._entries[request_id] = entry
        self._count(entry, 1)

    def first_token(self, request_id: str) -> None:
        """The prompt is done: the request no longer waits on anyone and decodes."""
        entry = self._entries.get(request_id)
        if entry is None or entry.running:
            return
        self._count(entry, -1)
        entry.running = True
        entry.num_context_tokens = entry.num_prompt_tokens
        self._count(entry, 1)

    def grew(self, request_id: str, num_tokens: int) -> None:
        """The running request's context grew by so many tokens, over all its samples."""
        entry = self._entries.get(request_id)
        if entry is not None and entry.running:
            entry.num_context_tokens += num_tokens
            total = self._sums[entry.decode]
            total.context_tokens += num_tokens
            total.generated_tokens += num_tokens
            self._changed.add(entry.decode)

    def close(self, request_id: str) -> None:
        """The request ended, whichever way. Closing an unknown one changes nothing."""
        entry = self._entries.pop(request_id, None)
        if entry is not None:
            self._count(entry, -1)

    def drain_changed(self) -> set[str]:
        """The workers whose part changed since the last call. One reader."""
        changed, self._changed = self._changed, set()
        return changed

    def own(self, worker: str) -> Load:
        """This router's part of the worker's load."""
        total = self._sums.get(worker)
        if total is None:
            return NOTHING
        return Load(
            num_waiting=total.num_waiting,
            num_running=total.num_running,
            waiting_prefill_tokens=total.waiting_prefill_tokens,
            context_tokens=total.context_tokens,
            claimed_tokens=total.claimed_tokens,
        )

    def beside(self, worker: str) -> Beside:
        """By Little's law the prompts of those that run are what comes in a mean life; and that is, where lives are spread
        exponentially, the mean age of those that run, which is known in steps of as many tokens as `grew` is told."""
        total = self._sums.get(worker)
        if total is None or not total.beside_tokens:
            return NOTHING_BESIDE
        life = max(LIFE_TOKENS, total.generated_tokens / total.num_running)
        return Beside(total.beside_tokens / life / total.num_running, life)

    def _count(self, entry: _Entry, sign: int) -> None:
        decode = self._sum(entry.decode)
        if entry.running:
            decode.num_running += sign * entry.n
            decode.context_tokens += sign * entry.num_context_tokens
            decode.generated_tokens += sign * (entry.num_context_tokens - entry.num_prompt_tokens)
            if entry.prefill == entry.decode:
                decode.beside_tokens += sign * entry.prefill_tokens
        else:
            decode.num_waiting += sign * entry.n
            decode.claimed_tokens += sign * entry.num_prompt_tokens
            prefill = self._sum(entry.prefill)
            prefill.waiting_prefill_tokens += sign * entry.prefill_tokens
            if entry.prefill != entry.decode:
                prefill.num_waiting += sign
                self._forget_idle(entry.prefill)
        self._forget_idle(entry.decode)

    def _sum(self, worker: str) -> _Sum:
        self._changed.add(worker)
        return self._sums.setdefault(worker, _Sum())

    def _forget_idle(self, worker: str) -> None:
        if self._sums.get(worker) == _Sum():
            del self._sums[worker]


def plus(one: Load, other: Load) -> Load:
    """What both ledgers know of a worker."""
    return Load(
        num_waiting=one.num_waiting + other.num_waiting,
        num_running=one.num_running + other.num_running,
        waiting_prefill_tokens=one.waiting_prefill_tokens + other.waiting_prefill_tokens,
        context_tokens=one.context_tokens + other.context_tokens,
        claimed_tokens=one.claimed_tokens + other.claimed_tokens,
    )


NOTHING = Load()
