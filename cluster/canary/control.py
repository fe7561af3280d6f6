"""The canary at work: a part of the leading controller, which looks, decides (`cluster.canary.decide`), records and tells
routers. Its workers are pools like others, started and drained by the controller's own loop."""

import logging
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf

from cluster.canary.decide import Seen, Turned, split_of, turn, with_canary
from cluster.canary.evidence import fresh, heard
from cluster.canary.store import CanaryState, Found
from cluster.canary.values import Evidence, Phase, State, written
from cluster.leased import leased_workers
from cluster.lifecycle import Desired, ObservedWorker
from cluster.lifecycle import Phase as WorkerPhase
from cluster.router_reports import router_reports
from headrace.config import ClusterConfig, EngineConfig, PoolConfig
from headrace.revisions import Split
from headrace.store import Store
from headrace.values import STABLE, WorkerInfo

log = logging.getLogger(__name__)

SETTLED_SECONDS = 30.0  # between writes of a canary of which nothing changes any more


class Canary:
    """Owns what it last knew of the canary, for when Redis loses it, and the deaths of workers that it has not counted yet.
    Only a controller that leads calls turn(). While what stands in Redis is of another version: `_whole`, of which
    revisions the workers of each pool were when it last lacked none, and `_held`, what follows (see refilled())."""

    def __init__(self, config: ClusterConfig, store: Store) -> None:
        self._config = config
        self._store = store
        self._redis = CanaryState(store, config.name)
        self._state: State | None = None
        self._evidence: Evidence | None = None
        self._room: int | None = None
        self._deaths: deque[tuple[str, str]] = deque()
        self._whole: dict[str, Counter[str]] = {}
        self._held: dict[str, tuple[str, int]] | None = None
        self._told: Split | None = None
        self._told_at = -inf

    async def turn(self, token: str, desired: Desired, workers: Sequence[ObservedWorker], clock: float) -> None:
        """One round. StoreUnavailable when Redis does not answer: then nothing was changed, or all that was decided."""
        found = await self._redis.read()
        if found.foreign:
            self._hold(workers)
            return
        self._held = None
        now = await self._store.time()
        state = self._begun(found, now)
        if state is None:
            self._state = None
            self._deaths.clear()
            return
        # What stands there goes before what is remembered: another controller may have led meanwhile. And its workers are
        # to stay, whatever becomes of this turn.
        self._state = found.state or self._state
        self._room = self._room_for(state, desired, workers)
        evidence = await self._evidence_of(state)
        if state.phase.under_way:
            reports = await router_reports(self._store, self._config.name)
            if evidence.number != state.number:
                evidence = fresh(state.number, reports, now, state.percent)
            evidence = heard(evidence, reports, now, state.canary, state.base)
        deaths = list(self._deaths)
        seen = Seen(
            now,
            state,
            evidence,
            workers,
            [why for revision, why in deaths if revision == state.canary.revision],
            self._room,
            self._config.autoscaling.pending_seconds,
            clock,
            sum(pool.replicas for pool in desired.pools.values()),
            await self._unlike(state),
        )
        turned = turn(seen)
        split = split_of(seen, turned.state)
        if self._is_settled(found, turned, split) and clock - self._told_at < SETTLED_SECONDS:
            self._take(turned, len(deaths))
        elif await self._redis.commit(found, token, turned.state, split, turned.evidence, turned.events):
            self._told, self._told_at = split, clock
            self._take(turned, len(deaths))

    def _is_settled(self, found: Found, turned: Turned, split: Split) -> bool:
        """All of it stands there already, and no router needs to know that somebody turns: there is nothing to judge."""
        told = replace(self._told, beat=split.beat) if self._told is not None else None
        over = not turned.state.phase.under_way and not split.percent
        return over and turned.state == found.state and not turned.events and split == told

    def _hold(self, workers: Sequence[ObservedWorker]) -> None:
        if self._held is None:
            self._whole = {}
            log.error(
                "the canary's state in Redis was written by another version: until that one leads, or the key is deleted, "
                "no worker is drained or flipped, and none starts in the place of one whose settings are not known here"
            )
        there = _revisions(workers)
        self._whole |= {
            pool: its for pool, its in there.items() if its.total() >= self._whole.get(pool, Counter()).total()
        }
        known = (STABLE,) if self._state is None else (STABLE, self._state.canary.revision)
        self._held = refilled(self._whole, there, known)

    async def _evidence_of(self, state: State) -> Evidence:
        remembered = self._evidence
        if remembered is not None and not state.phase.under_way:
            return remembered  # nothing is added to it any more
        kept = await self._redis.evidence()
        return kept if kept.number or remembered is None else remembered

    async def _unlike(self, state: State) -> str:
        """Before it gets a share: routers render and tokenise once for all revisions."""
        if state.phase is not Phase.STARTING:
            return ""
        leased = [one.info for one in await leased_workers(self._store, self._config.name)]
        return unlike(leased, state.canary.revision, state.base)

    def _take(self, turned: Turned, num_deaths: int) -> None:
        for _ in range(num_deaths):
            self._deaths.popleft()
        self._state, self._evidence = turned.state, turned.evidence
        for event in turned.events:
            its = event.state
            level = logging.WARNING if its.phase is Phase.ROLLED_BACK else logging.INFO
            log.log(level, "canary %s: %s → %s: %s", its.canary.revision, event.before, its.phase.value, its.reason)

    def _begun(self, found: Found, now: float) -> State | None:
        """The state as it is; as it is remembered, where Redis lost it; or a new one, which the configuration declares and
        has not declared before."""
        state = found.state or self._state
        declared = self._config.canary
        if declared is None:
            return state
        settings = written(declared)
        if state is not None and (state.phase.under_way or state.declared == settings):
            return state
        if state is not None and state.phase is Phase.PROMOTED and not is_configured(self._config, state):
            return state  # what serves is not what the file says: nothing to compare with
        return begin(state, declared.percent, settings, now, declared=settings)

    def _room_for(self, state: State, desired: Desired, workers: Sequence[ObservedWorker]) -> int | None:
        """What the budget leaves it: what the cluster's own pools hold, or are to hold, is theirs."""
        budget = self._config.autoscaling.budget_gpus
        if budget is None:
            return None
        held = sum(worker.layout.world_size for worker in workers if worker.pool not in state.canary.pools)
        return max(budget - max(held, sum(pool.num_gpus for pool in desired.pools.values())), 0)

    # -- what the controller asks

    def applied(self, desired: Desired) -> Desired:
        """All pools that are to be: the canary's among them while it is under way."""
        if self._held is not None:
            return held(desired, self._held)
        return with_canary(desired, self._state, self._room) if self._state is not None else desired

    def num_gpus(self, workers: Sequence[ObservedWorker]) -> int:
        """Those that it holds or may take at once."""
        if self._held is not None:
            return sum(worker.layout.world_size for worker in workers if worker.pool not in self._config.pools)
        if self._state is None:
            return 0
        pools = self._state.canary.pools
        held = sum(worker.layout.world_size for worker in workers if worker.pool in pools)
        wanted = sum(pool.num_gpus for name, pool in self.applied(Desired({})).pools.items() if name in pools)
        return max(held, wanted)

    def died(self, worker: ObservedWorker) -> None:
        """A worker ended that was to serve, or never came to."""
        self._deaths.append((worker.revision, f"{worker.worker_id}: {worker.reason}"))

    def revision_of(self, pool: str) -> str:
        """That a worker of the pool would be started with now."""
        if self._held is not None:
            return self._held.get(pool, (STABLE, 0))[0]
        target = self.applied(Desired({})).pools.get(pool)
        if target is not None:
            return target.revision
        return self._state.serving if self._state is not None else ""

    def settings(self, pool: str, revision: str) -> tuple[str, EngineConfig, PoolConfig | None]:
        """What a worker of that revision is started with: model, engine, and what is configured of its pool."""
        config, state = self._config, self._state
        own = config.pools.get(pool)
        if state is None or revision != state.canary.revision:
            return config.model, config.engine, own
        its = state.canary
        return its.model or config.model, its.engine, own or its.pools.get(pool)


def _revisions(workers: Sequence[ObservedWorker]) -> dict[str, Counter[str]]:
    """How many workers each pool has of which. Those whose nodes go count as gone: another is started for each."""
    found: dict[str, Counter[str]] = {}
    for its in workers:
        if its.phase in (WorkerPhase.STARTING, WorkerPhase.READY) and its.leaves_at is None:
            found.setdefault(its.pool, Counter())[its.revision] += 1
    return found


def refilled(
    whole: Mapping[str, Counter[str]], there: Mapping[str, Counter[str]], known: Sequence[str]
) -> dict[str, tuple[str, int]]:
    """Of each pool that had workers of another revision than the file's: of which revision workers are started there now,
    and up to how many all of them are. A worker is followed by one of its own revision where that is `known`; of others
    nobody here can read which settings they would need."""
    found = {}
    for pool, had in whole.items():
        if had.keys() - {STABLE}:
            has = there.get(pool, Counter())
            lost = had - has
            revision = next((its for its in known if lost[its]), STABLE)
            found[pool] = revision, has.total() + lost[revision]
    return found


def held(desired: Desired, refill: Mapping[str, tuple[str, int]]) -> Desired:
    """What is there stays, as where nothing is known of what is desired; pools of several revisions are refilled()."""
    pools = dict(desired.pools)
    for name, (revision, most) in refill.items():
        if name in pools:
            pools[name] = replace(pools[name], replicas=min(pools[name].replicas, most), revision=revision)
    return Desired(pools, trusted=False)


def begin(before: State | None, percent: float, settings: str, now: float, *, declared: str | None = None) -> State:
    """Of the canary after the one before, if there was one."""
    its = State(1, Phase.STARTING, settings, percent, now, now, declared=declared or "")
    if before is None:
        return its
    its = replace(its, number=before.number + 1, base=before.serving)
    return its if declared is not None else replace(its, declared=before.declared)


def unlike(workers: Sequence[WorkerInfo], revision: str, base: str) -> str:
    """In what a canary's workers differ that must be equal for all who serve a model."""
    for name in ("tokenizer", "chat_template"):
        values = [
            {getattr(worker.compatibility, name) for worker in workers if worker.revision == one}
            for one in (base, revision)
        ]
        if all(values) and values[0] != values[1]:
            return f"its {name} is {', '.join(sorted(values[1]))}, that of {base} is {', '.join(sorted(values[0]))}"
    return ""


def is_configured(config: ClusterConfig, state: State) -> bool:
    """Whether the file has by now what was promoted."""
    its = state.canary
    return (its.model or config.model, its.engine) == (config.model, config.engine)
