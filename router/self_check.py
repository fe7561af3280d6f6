"""The self-check of workers as they start: two equal prompts beside traffic, and what they prove
(router.decisions.self_check).

Routers share the work: who holds a short claim in Redis checks, the others take over what came of it. What is asked is no
client's request: it passes by admission, placement, the ledger and all that is counted of requests, and the worker computes
it after everything else. Without Redis no cache is known, and none is to be proven.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any, Protocol, TypeVar

from prometheus_client import Counter, Gauge
from redis.exceptions import RedisError

from headrace import metrics
from headrace.clock import Clock
from headrace.errors import ConfigError, HeadraceError, Unavailable, WorkerLost
from headrace.keys import Keys
from headrace.values import Request, RequestKey, SamplingParams, SequenceOutput, WorkerInfo
from router.decisions.caches import Caches
from router.decisions.chain import Chain
from router.decisions.index import Index
from router.decisions.self_check import (
    Checks,
    Evidence,
    Outcome,
    Reason,
    Result,
    Verdict,
    decode_result,
    encode_result,
    judge,
)
from router.decisions.view import View, class_of
from router.follow import Store
from router.mailbox import GivenUp, Mailbox, Pacer
from router.sessions import Session, Sessions

log = logging.getLogger(__name__)
T = TypeVar("T")

NUM_BLOCKS = 3
LOWEST_PRIORITY = -1000  # below what any tenant may ask for
LOOK_SECONDS = 0.02  # from one look at who can be checked to the next: a thousand workers report much more often
ASK_SECONDS = 10.0
SHOWN_SECONDS = 10.0
SHOWN_SCANS = 3  # after so many whoever does not hold a block by its key will not
CLAIM_SECONDS = 75  # twice two answers and the mirror in between
KEEP_SECONDS = 24 * 3600

_CHECKS = Counter(metrics.SELF_CHECKS, "Self-checks that this router made, by how they ended.", ["outcome"])
_PASSED = Gauge(metrics.SELF_CHECK_PASSED, "1 while the worker's last self-check holds, 0 where it failed.", ["worker"])


class Followed(Protocol):
    """Who keeps the mirror (router.follow)."""

    num_scans: int

    def listen(self, listener: Callable[[], None]) -> None: ...


@dataclass(frozen=True, slots=True)
class _Answer:
    cached_tokens: int


class SelfCheck:
    """Owns when and how this router checks; tells `caches` what came of it. `forget` when a worker is gone."""

    def __init__(
        self,
        *,
        router_id: str,
        checks: Checks,
        sessions: Sessions,
        index: Index,
        caches: Caches,
        followed: Followed,
        view: Callable[[], View],
        store: Store,
        keys: Keys,
        pacer: Pacer,
        clock: Clock,
        randomness: Random,
    ) -> None:
        self._router_id = router_id
        self._checks = checks
        self._sessions = sessions
        self._index = index
        self._caches = caches
        self._followed = followed
        self._view = view
        self._store = store
        self._keys = keys
        self._pacer = pacer
        self._clock = clock
        self._random = randomness
        self._wake = asyncio.Event()
        self._followed_on: set[asyncio.Event] = set()  # of checks that wait for the mirror
        self._number = 0
        sessions.listen(self._heard_of)
        followed.listen(self._mirror_changed)

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                now = self._clock.now()
                self._wake.clear()
                for worker, generation, attempt in self._checks.begin(now, self._is_ready):
                    group.create_task(self._check(worker, generation, attempt), name=f"self-check of {worker}")
                due = self._checks.next_due(now)
                try:
                    async with asyncio.timeout(due - now if due is not None else None):
                        await self._wake.wait()
                except TimeoutError:
                    pass
                await asyncio.sleep(LOOK_SECONDS)

    def forget(self, worker_id: str) -> None:
        self._checks.forget(worker_id)
        _PASSED.remove(worker_id)

    def _heard_of(self, worker_id: str) -> None:
        session = self._sessions.find(worker_id)
        if session is not None and self._checks.met(worker_id, session.info.generation, self._clock.now()):
            self._wake.set()

    def _mirror_changed(self) -> None:
        for changed in self._followed_on:
            changed.set()

    def _is_ready(self, worker_id: str, patient: bool) -> bool:
        """A worker that drains, or is not followed yet, is left; a busy one for a while."""
        session = self._sessions.find(worker_id)
        if session is None or session.report is None or session.report.draining:
            return False
        position, total = self._index.position(worker_id), session.report.total
        if position is None or position[0] != session.info.generation:
            return False
        return not patient or not (total.num_waiting or total.waiting_prefill_tokens)

    # -- one check

    async def _check(self, worker: str, generation: int, attempt: int) -> None:
        result: Result | None = None
        try:
            found, claimed = await self._store.call(partial(self._claim, worker=worker))
            if found is not None and self._checks.news(worker, found):
                result = found
            elif claimed:
                verdict = await self._proven(worker, generation)
                _CHECKS.labels(verdict.outcome).inc()
                result = Result(generation, attempt, verdict, self._router_id)
                await self._store.call(partial(self._tell, worker=worker, result=result))
        except (Unavailable, RedisError, ConfigError) as error:
            log.info("the self-check of %s is not shared: %s", worker, error)
            result = result or Result(generation, attempt, Verdict(Outcome.UNDECIDED, Reason.UNFOLLOWED))
        finally:
            self._end(worker, generation, result)

    def _end(self, worker: str, generation: int, result: Result | None) -> None:
        now = self._clock.now()
        if result is None:
            self._checks.taken(worker, generation, now)
        elif self._checks.ended(worker, result, now):
            verdict = result.verdict
            if verdict.outcome is not Outcome.UNDECIDED:  # which leaves what was known before
                self._caches.checked(worker, passed=verdict.over)
                _PASSED.labels(worker).set(verdict.over)
            level = logging.ERROR if verdict.outcome is Outcome.FAILED else logging.INFO
            log.log(level, "self-check %d of %s (generation %d): %s", result.attempt, worker, generation, verdict)
        self._wake.set()

    async def _proven(self, worker: str, generation: int) -> Verdict:
        """One that cannot be made, whatever a worker says of itself, costs nothing but itself."""
        try:
            verdict = await self._prove(worker, generation)
            return await self._prove(worker, generation) if verdict.may_be_chance else verdict
        except (RedisError, ConfigError, Unavailable):
            raise
        except Exception:
            log.exception("the self-check of %s failed unforeseen", worker)
            return Verdict(Outcome.UNDECIDED, Reason.REFUSED)

    async def _prove(self, worker: str, generation: int) -> Verdict:
        session, position = self._sessions.find(worker), self._index.position(worker)
        if session is None or session.info.generation != generation or position is None:
            return Verdict(Outcome.UNDECIDED, Reason.LOST)
        info = session.info
        num_blocks = min(NUM_BLOCKS, info.capacity.num_blocks - 1, _num_blocks_of(info))
        if num_blocks < 1:
            return Verdict(Outcome.UNDECIDED, Reason.SMALL)
        size = info.compatibility.block_size
        # Nobody's prompt: of a salt that no client can name, and drawn anew for each check.
        salt = f"\0self-check\0{self._router_id}\0{self._random.getrandbits(64):x}"
        prompt = tuple(self._random.randrange(info.capacity.vocab_size) for _ in range(num_blocks * size + 1))
        hash_class = class_of(info.compatibility)
        chain = Chain(hash_class.hasher(salt).chain(prompt))
        first = await self._ask(session, prompt, salt)
        if isinstance(first, Reason):
            return Verdict(Outcome.UNDECIDED, first)
        shown = await self._shown(worker, chain.after(0))
        if shown is None:
            return Verdict(Outcome.UNDECIDED, Reason.UNFOLLOWED)
        prediction = self._caches.predict_from({hash_class: chain}, self._view(), self._clock.now())
        second = await self._ask(session, prompt, salt)
        if isinstance(second, Reason):
            return Verdict(Outcome.UNDECIDED, second)
        return judge(
            Evidence(
                num_blocks * size,
                first.cached_tokens,
                shown,
                self._index.position(worker) != position,
                prediction.promised.get(worker, 0) * size,
                second.cached_tokens,
                self._index.holds(worker, chain.keys),
            )
        )

    async def _ask(self, session: Session, prompt: tuple[int, ...], salt: str) -> _Answer | Reason:
        """What of the prompt the worker had; a reason where it did not say."""
        self._number += 1
        key = RequestKey(f"{self._router_id}:check:{self._number:x}")
        mailbox: Mailbox[list[SequenceOutput]] = Mailbox(key, self._pacer, lambda outputs: outputs)
        sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        session.submit(
            Request(key, prompt, sampling, cache_salt=salt, priority=LOWEST_PRIORITY, seconds_left=ASK_SECONDS),
            mailbox,
        )
        cached_tokens = 0
        try:
            async with asyncio.timeout(ASK_SECONDS):
                while True:
                    match await mailbox.take():
                        case [*outputs]:
                            for output in outputs:
                                cached_tokens = output.usage.cached_tokens if output.usage else cached_tokens
                                if output.finish is not None:
                                    session.forget(key.request_id)
                                    return _Answer(cached_tokens)
                        case GivenUp(error=error):
                            return _why(error)
                        case _:
                            return Reason.REFUSED
        except TimeoutError:
            return Reason.LATE
        finally:
            session.cancel(key)

    async def _shown(self, worker: str, keys: Sequence[int]) -> bool | None:
        """Whether the mirror comes to hold all of these; None: it is not kept just now."""
        changed, last = asyncio.Event(), self._followed.num_scans + SHOWN_SCANS
        self._followed_on.add(changed)
        try:
            async with asyncio.timeout(SHOWN_SECONDS):
                while not self._index.holds(worker, keys):
                    if self._followed.num_scans >= last:
                        return False if self._index.position(worker) is not None else None
                    changed.clear()
                    await changed.wait()
                return True
        except TimeoutError:
            return None
        finally:
            self._followed_on.discard(changed)

    # -- what routers tell each other of checks

    async def _claim(self, redis: Any, worker: str) -> tuple[Result | None, bool]:
        """What is known of the worker, and whether it is this router's to check."""
        claim = self._keys.self_check_claim(worker)
        async with redis.pipeline(transaction=True) as pipe:
            pipe.get(self._keys.self_check(worker))
            pipe.expire(self._keys.self_check(worker), KEEP_SECONDS)
            pipe.set(claim, self._router_id, nx=True, ex=CLAIM_SECONDS)
            raw, _, taken = await pipe.execute()
        found = decode_result(raw)
        if taken and found is not None and self._checks.news(worker, found):
            await redis.delete(claim)
        return found, bool(taken)

    async def _tell(self, redis: Any, worker: str, result: Result) -> None:
        async with redis.pipeline(transaction=True) as pipe:
            pipe.set(self._keys.self_check(worker), encode_result(result), ex=KEEP_SECONDS)
            pipe.delete(self._keys.self_check_claim(worker))
            await pipe.execute()


def _num_blocks_of(info: WorkerInfo) -> int:
    """How many full blocks a prompt may have, with a token that is computed and one that comes of it."""
    return (info.capacity.max_context_tokens - 2) // info.compatibility.block_size


def _why(error: HeadraceError) -> Reason:
    return Reason.LOST if isinstance(error, WorkerLost) else Reason.REFUSED
