"""The parts between the edges and the workers, put together: index, follow, sessions, requests."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from headrace.clock import Clock, SystemClock
from headrace.config import ClusterConfig, SelfCheckConfig
from headrace.keys import Keys
from headrace.values import WorkerInfo
from router import measures
from router.catching_up import CatchingUp
from router.decision_log import Note
from router.decisions.admission import Admission, Rules
from router.decisions.caches import Caches
from router.decisions.index import Index
from router.decisions.quotas import QuotaRules, Quotas
from router.decisions.revisions import Revisions
from router.decisions.self_check import Checks
from router.decisions.tenants import Tenancy
from router.decisions.told import Told
from router.flight import Flight, TextStream
from router.follow import Follow, Store
from router.jobs import Job
from router.mailbox import Pacer
from router.placements import Placements
from router.quota_leases import QuotaLeases, watch
from router.reports import Reports
from router.requests import Requests
from router.self_check import SelfCheck
from router.sessions import Sessions
from router.shared_answers import SharedAnswers
from router.told_revisions import ToldRevisions


@dataclass(frozen=True, slots=True)
class Core:
    """`answers` is what edges ask: the requests, and what needs no request of its own. `catching_up` says why requests had
    better go to another router just now."""

    requests: Requests
    answers: SharedAnswers
    tenancy: Tenancy
    sessions: Sessions
    index: Index
    revisions: Revisions
    catching_up: Callable[[], str | None] = lambda: None


@asynccontextmanager
async def running_core(
    config: ClusterConfig,
    *,
    router_id: str,
    http_address: str = "",
    open_text: Callable[[Job], TextStream],
    store: Store | None = None,
    workers: Iterable[str] = (),
    refuse: Callable[[WorkerInfo], str | None] = lambda info: None,
    clock: Clock | None = None,
    randomness: random.Random | None = None,
    note_decision: Note = lambda key, decision: None,
    record: Callable[[Flight, float], None] = lambda flight, now: None,
    self_check: SelfCheckConfig | None = None,
) -> AsyncIterator[Core]:
    """A running core; its tasks end with the block. `workers` are addresses that are sought beside those with a lease;
    without a store they are the only ones, and nothing is known of any cache. `http_address`: where others
    reach the edge. `self_check` None: workers are not checked."""
    clock = clock or SystemClock()
    index = Index()
    sessions = Sessions(
        router_id,
        clock,
        heartbeat_seconds=config.router.heartbeat_seconds,
        silent_seconds=config.router.silent_seconds,
        refuse=refuse,
    )
    tenancy = Tenancy.of(config)
    quotas = _quotas(config, tenancy, shared=store is not None, now=clock.now())
    watch(quotas, clock)
    admission = Admission(_rules(config), tenancy, quotas)
    others: Placements | None = None
    if store is not None:

        def hear(told: Told) -> None:
            session = sessions.find(told.worker_id)
            if session is not None:
                caches.told(told, session.info, clock.now())
                requests.hear(told)

        others = Placements(store, Keys(config.name), router_id, hear)
    revisions = Revisions()
    measures.watch_canary(lambda: revisions.percent(clock.now()))
    caches = Caches(index, others.tell) if others is not None else Caches(index)
    pacer = Pacer(config.router.coalesce_seconds, asyncio.get_running_loop())
    randomness = randomness or random.Random()
    starting: CatchingUp | None = None
    requests = Requests(
        router_id=router_id,
        sessions=sessions,
        caches=caches,
        open_text=open_text,
        pacer=pacer,
        clock=clock,
        randomness=randomness,
        admission=admission,
        request_seconds=config.limits.request_seconds,
        local_prefill_max_tokens=config.handoff.local_prefill_max_tokens,
        note_decision=note_decision,
        record=record,
        revisions=revisions,
    )
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(sessions.run(), name="sessions")]
        if store is None or others is None:
            sessions.seek(workers)
        else:
            gone = [requests.forget]
            follow = Follow(
                store, Keys(config.name), index, sessions, clock, fixed=workers, gone=lambda w: [f(w) for f in gone]
            )
            if self_check is not None and self_check.enabled:
                checks = SelfCheck(
                    router_id=router_id,
                    checks=Checks(self_check.retry_seconds, self_check.max_retry_seconds),
                    sessions=sessions,
                    index=index,
                    caches=caches,
                    followed=follow,
                    view=requests.view,
                    store=store,
                    keys=Keys(config.name),
                    pacer=pacer,
                    clock=clock,
                    randomness=random.Random(randomness.random()),
                )
                gone.append(checks.forget)
                tasks.append(group.create_task(checks.run(), name="self-checks"))
            tasks.append(group.create_task(follow.run(), name="follow"))
            starting = CatchingUp(store, Keys(config.name), router_id, follow, clock)
            tasks.append(group.create_task(starting.run(), name="catching up"))
            tasks.append(group.create_task(others.run(), name="placements"))
            told = ToldRevisions(store, Keys(config.name), revisions, clock)
            await told.read()
            tasks.append(group.create_task(told.run(), name="revisions"))
            reports = Reports(store, Keys(config.name), requests.report, http_address)
            tasks.append(group.create_task(reports.run(), name="reports"))
            if quotas.tenants:
                leases = QuotaLeases(
                    store,
                    Keys(config.name),
                    router_id,
                    quotas,
                    clock,
                    lease_seconds=config.admission.quota_lease_seconds,
                    sync_seconds=config.admission.quota_sync_seconds,
                )
                await leases.sync()
                tasks.append(group.create_task(leases.run(), name="quotas"))
        answers = SharedAnswers(
            requests,
            tenancy,
            clock,
            group,
            cache_bytes=config.admission.result_cache_bytes,
            cache_seconds=config.admission.result_cache_seconds,
        )
        try:
            core = Core(requests, answers, tenancy, sessions, index, revisions)
            yield replace(core, catching_up=starting.why) if starting is not None else core
        finally:
            answers.close()
            for task in tasks:
                task.cancel()


def _rules(config: ClusterConfig) -> Rules:
    its = config.admission
    local = config.handoff.local_prefill_max_tokens
    return Rules(
        config.limits.max_queue,
        its.prefill_backlog_seconds,
        its.max_bypass_seconds,
        local,
        waits_for_workers=config.starts_from_zero,
    )


def _quotas(config: ClusterConfig, tenancy: Tenancy, *, shared: bool, now: float) -> Quotas:
    """Without a store this router is taken to be the only one."""
    its = config.admission
    rules = QuotaRules(shared, its.quota_lease_seconds, its.quota_burst_seconds, its.unleased_fraction)
    return Quotas(tenancy.tenants.values(), rules, now)
