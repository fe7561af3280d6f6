"""The autoscaler's turns over a real Valkey: what it reads, what it writes, and what the next one makes of that."""

import asyncio
import pathlib
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from click.testing import CliRunner
from redis.exceptions import ResponseError

from cluster.autoscaler import DRY_RUN, Autoscaler, Seen, at_work, member
from cluster.commands import autoscale
from cluster.lifecycle import Desired, DesiredPool, ObservedWorker, Phase
from cluster.scaling_state import ScalingState
from cluster.session import Session
from cluster.state import ControlState
from cluster.worker_client import WorkerClient, WorkerReport
from headrace.clock import ManualClock
from headrace.config import ClusterConfig
from headrace.config_file import parse
from headrace.costmodel import CostModel
from headrace.errors import ConfigError, InternalError
from headrace.keys import Keys
from headrace.leases import lease_fields
from headrace.reports import ClassCounts, RouterReport, encode_report
from headrace.store import Store, connect
from headrace.values import BlockCounts, Load, ParallelLayout, Role
from tests.null_worker import worker_info
from tests.unit.cluster.console.world import Described, described

pytestmark = pytest.mark.redis

COST = CostModel(1e-3, 2e-5, 5e-10, 5e-3, 1e-5, 3e-8)
YAML = """
model: m
service_classes: {chat: {ttft_seconds: 2.0, tpot_seconds: 0.05}}
autoscaling: {mode: controller, service_class: chat, interval_seconds: 10, budget_gpus: 12}
pools:
  prefill: {role: prefill, replicas: 1, max_replicas: 8}
  decode: {role: decode, replicas: 1, max_replicas: 8}
"""


@dataclass
class Stage:
    """A cluster that is there in Redis alone. `rate`: what its one router says to come, a second."""

    config: ClusterConfig
    store: Store
    clock: ManualClock
    url: str
    arrivals: int = 0
    at: float = 1e9
    workers: dict[str, int] = field(default_factory=lambda: {"prefill": 1, "decode": 1})

    def __post_init__(self) -> None:
        self.keys = Keys(self.config.name)
        self.state = ScalingState(self.store, self.config.name)
        self.store.time = self._time  # type: ignore[method-assign]
        self.desired = Desired({name: DesiredPool(Role(name), 1) for name in self.workers})

    async def _time(self) -> float:
        return self.at

    def autoscaler(self, **changes: Any) -> Autoscaler:
        scaling = self.config.autoscaling.model_copy(update=changes)
        return Autoscaler(self.config.model_copy(update={"autoscaling": scaling}), self.store, self.clock)

    async def report(self, rate: float, seconds: float = 10.0, **fields: Any) -> None:
        self.arrivals += round(rate * seconds)
        number = self.arrivals
        report = RouterReport(
            "r", "", self.at, number, number * 2000, number * 500, number * 2000, 0, number * 250, number, 5
        )
        report = replace(report, classes={"chat": ClassCounts(met=number)}, **fields)
        await self.store.call(lambda redis: redis.set(self.keys.router("r"), encode_report(report)))

    async def leases(self) -> None:
        for pool, number in self.workers.items():
            for index in range(number):
                info = worker_info(f"{pool}-{index}", Role(pool), cost=COST)
                key = self.keys.lease(info.worker_id)
                await self.store.call(lambda redis, key=key, info=info: redis.hset(key, mapping=lease_fields(info)))

    def seen(self) -> list[Seen]:
        return [
            Seen(ObservedWorker(pool, index, 1, Role(pool), ParallelLayout(), Phase.READY, self.clock.now() - 100))
            for pool, number in self.workers.items()
            for index in range(number)
        ]

    async def turn(self, autoscaler: Autoscaler, rate: float | None, **fields: Any) -> Desired:
        self.clock.advance(10.0)
        self.at += 10.0
        if rate is not None:
            await self.report(rate, **fields)
        await self.leases()
        self.desired = await autoscaler.turn(self.desired, self.seen())
        return self.desired

    def sizes(self) -> dict[str, int]:
        return {name: pool.replicas for name, pool in self.desired.pools.items()}

    def carry_out(self) -> None:
        self.workers = self.sizes()


@pytest.fixture
async def stage(redis_url: str, clock: ManualClock) -> AsyncIterator[Stage]:
    store = connect(redis_url, 2.0)
    yield Stage(parse(YAML).model_copy(update={"name": f"scale-{uuid.uuid4().hex[:8]}"}), store, clock, redis_url)
    await store.close()


async def grown(stage: Stage, autoscaler: Autoscaler) -> None:
    await stage.turn(autoscaler, 100.0)
    await stage.turn(autoscaler, 100.0)
    assert stage.sizes()["prefill"] > 1


async def test_load_is_scaled_for_and_why_is_on_record_with_its_outcome(stage: Stage) -> None:
    autoscaler = stage.autoscaler()
    await grown(stage, autoscaler)
    assert await ControlState(stage.store, stage.config.name).desired() == stage.desired
    (before, one) = await stage.state.decisions()
    assert before.inputs.traffic.routers == 0
    assert (one.number, one.decision.kind, one.outcome) == (2, "grow", "")
    assert one.inputs.traffic.per_second == 100.0
    stage.carry_out()
    await stage.turn(autoscaler, 100.0)
    decisions = await stage.state.decisions()
    assert decisions[1].outcome == "reached after 10 s"
    assert len(decisions) == 3, "that nothing is to be done any more is said once"
    await stage.turn(autoscaler, 100.0)
    assert len(await stage.state.decisions()) == 3


async def test_it_is_turned_to_only_when_it_is_due(stage: Stage) -> None:
    autoscaler = stage.autoscaler()
    await stage.turn(autoscaler, 1.0)
    before = await stage.state.now()
    stage.at += 1.0
    assert await autoscaler.turn(stage.desired, stage.seen()) is stage.desired
    assert await stage.state.now() == before


async def test_a_dry_run_decides_and_changes_nothing(stage: Stage) -> None:
    autoscaler = stage.autoscaler(mode="dry-run")
    for _ in range(3):
        await stage.turn(autoscaler, 100.0)
    assert stage.sizes() == {"prefill": 1, "decode": 1}
    assert await ControlState(stage.store, stage.config.name).desired() is None
    one = (await stage.state.decisions())[1]
    assert one.outcome == DRY_RUN
    assert one.decision.pools["prefill"].replicas > 1
    assert len(await stage.state.decisions()) == 2


async def test_the_next_controller_goes_on_where_the_last_one_was(stage: Stage) -> None:
    autoscaler = stage.autoscaler()
    await grown(stage, autoscaler)
    last = await stage.state.now()
    assert last is not None
    stage.carry_out()
    successor = stage.autoscaler()
    await stage.turn(successor, 100.0)
    now = await stage.state.now()
    assert now is not None
    assert now.inputs.memory == last.decision.memory
    assert (await stage.state.decisions())[1].outcome == "reached after 10 s"
    assert stage.sizes() == stage.workers, "a router it hears of for the first time is no reason for anything"


async def test_keys_of_another_type_count_as_absent_and_are_written_anew(stage: Stage) -> None:
    """A record that was no hash ended every turn, the first after what it desired was written."""
    autoscaler, keys = stage.autoscaler(), stage.keys
    for key in (keys.scaling_now, keys.scaling_arrivals, keys.scaling_decisions):
        await stage.store.call(lambda redis, key=key: redis.lpush(key, "x"))
    assert (await stage.state.now(), await stage.state.arrivals()) == (None, None)
    assert (await stage.state.decisions(), await stage.state.latest(9, 3)) == ([], [])
    with pytest.raises(ResponseError):
        await stage.turn(autoscaler, 100.0)
    await stage.turn(autoscaler, 100.0)
    assert stage.sizes()["prefill"] > 1
    assert [one.decision.kind for one in await stage.state.decisions()] == ["grow"]


async def test_what_an_operator_writes_while_it_decides_is_kept(stage: Stage) -> None:
    """It was overwritten with sizes that rested on what was desired before, and another layout was lost for good."""
    autoscaler = stage.autoscaler()
    await stage.turn(autoscaler, 100.0)
    theirs = Desired({name: DesiredPool(Role(name), 2, ParallelLayout(2)) for name in stage.workers})
    control = ControlState(stage.store, stage.config.name)
    await control.write_desired(theirs)
    before = await stage.state.now()
    assert await stage.turn(autoscaler, 100.0) == Desired({name: DesiredPool(Role(name), 1) for name in stage.workers})
    assert await control.desired() == theirs
    assert await stage.state.now() == before, "nor is it on record"
    stage.at += 1.0
    stage.desired = theirs
    after = await autoscaler.turn(theirs, stage.seen())
    assert after != theirs, "the next round decides at once, on what is desired now"
    assert {pool.layout for pool in after.pools.values()} == {ParallelLayout(2)}
    assert await control.desired() == after
    assert [one.number for one in await stage.state.decisions()] == [1, 2]


async def test_a_canarys_gpus_are_of_the_budget_and_its_requests_are_sized_for(stage: Stage) -> None:
    autoscaler = stage.autoscaler(budget_gpus=8)
    for _ in range(8):
        await stage.turn(autoscaler, 100.0)
    whole = sum(stage.sizes().values())
    stage.desired = Desired({name: DesiredPool(Role(name), 1) for name in stage.workers})
    await ControlState(stage.store, stage.config.name).write_desired(stage.desired)
    scaling = stage.autoscaler(budget_gpus=8)
    its = ObservedWorker("next", 0, 1, Role.DECODE, ParallelLayout(), Phase.READY, 0.0)
    canary = [Seen(replace(its, index=index)) for index in range(3)]
    for _ in range(8):
        stage.clock.advance(10.0)
        stage.at += 10.0
        await stage.report(100.0)
        await stage.leases()
        stage.desired = await scaling.turn(stage.desired, [*stage.seen(), *canary], len(canary))
    now = await stage.state.now()
    assert now is not None
    assert now.inputs.rules.budget_gpus == 5, "as it is recorded, so that it can be decided again"
    assert sum(stage.sizes().values()) == 5 < whole <= 8, "and what the canary holds counts once"


async def test_a_flushed_redis_takes_nothing_away_and_is_written_anew(stage: Stage) -> None:
    autoscaler = stage.autoscaler()
    await grown(stage, autoscaler)
    stage.carry_out()
    before = stage.sizes()
    await stage.store.call(
        lambda redis: redis.delete(*(stage.keys.scaling_now, stage.keys.router("r"), stage.keys.desired))
    )
    stage.desired = replace(stage.desired, trusted=False)
    await stage.turn(autoscaler, None)
    assert stage.sizes() == before
    last = await stage.state.now()
    assert last is not None
    assert "no router reports" in last.decision.reason
    await stage.turn(autoscaler, 100.0, seconds=20.0)
    now = await stage.state.now()
    assert now is not None
    assert now.inputs.traffic.per_second == pytest.approx(100.0, rel=0.35), "what came meanwhile is counted"
    assert stage.sizes() == before


async def test_whose_requests_workers_have_is_by_their_own_words() -> None:
    worker = Described("decode-0", requests=("r:1:a", "r:1:b", "s:c", "t:check:1"))
    async with described(worker) as record, WorkerClient(record.address) as client:
        report = await client.describe()
    busy = Seen(ObservedWorker("decode", 0, 1, Role.DECODE, ParallelLayout(), Phase.READY, 0.0), report)
    starts = replace(busy, worker=replace(busy.worker, phase=Phase.STARTING), report=None)
    assert at_work([busy, starts]) == {"r:1", "s", "t"}, "one that checks a worker is at work, by its own name"
    assert at_work([busy, replace(busy, report=None)]) is None, "one that serves says nothing"


async def test_what_decodes_is_by_workers_own_words_also_where_one_prefills_by_now() -> None:
    """Of a worker that was lent: two requests are its own, and four others'. Prompts that are
    computed decode nowhere; but whoever does both needs room for them too."""
    numbers = []
    for role in (Role.DECODE, Role.PREFILL, Role.UNIFIED):
        load = Load(num_running=9, context_tokens=15_000, num_prefilling=3, prefilling_tokens=9000)
        worker = Described("decode-0", role, its_load=load, requests=("r:a", "r:b"))
        async with described(worker) as record, WorkerClient(record.address) as client:
            seen = ObservedWorker("decode", 0, 1, role, ParallelLayout(), Phase.READY, 0.0)
            its = member(Seen(seen, await client.describe()), None, 0.0)
            numbers.append((its.num_sequences, its.context_tokens))
    assert numbers == [(6, 6000), (2, 2000), (9, 15_000)]


def test_a_worker_that_its_host_told_to_drain_leaves_though_nobody_here_asked_for_it(stage: Stage) -> None:
    """A spot notice reaches it as a drain: its GPUs are held until it is gone, and it serves nothing any more."""
    (seen, *_) = stage.seen()
    report = WorkerReport("prefill-0", 1, "prefill", "m", BlockCounts(10), Load(), False, 0, 0, 0, 0)
    assert member(replace(seen, report=report), None, 0.0).phase is Phase.READY
    told = member(replace(seen, report=replace(report, draining=True)), None, 0.0)
    assert told.phase is Phase.DRAINING


async def test_arrivals_are_kept_for_forecasts(stage: Stage) -> None:
    autoscaler = stage.autoscaler()
    for _ in range(32):
        await stage.turn(autoscaler, 10.0)
    arrivals = await stage.state.arrivals()
    assert arrivals is not None
    assert sum(count for count in arrivals.counts if count > 0) >= 250


async def test_explain_lists_shows_and_decides_again(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    await grown(stage, stage.autoscaler())
    session = Session(stage.config.name, 0, "", "m", "", "", stage.url)
    monkeypatch.setattr(autoscale, "session_of", lambda cluster, config: session)

    async def run(*words: str) -> str:
        result = await asyncio.to_thread(CliRunner().invoke, autoscale.command, words, catch_exceptions=False)
        return result.output

    listed = await run("explain", "--check")
    assert "grow" in listed
    assert "2 decided again, the same" in listed
    file = tmp_path / "run.json"
    file.write_text(await run("explain", "--json"), encoding="utf-8")
    assert await run("explain", "2", "--file", str(file)) != ""
    assert "2 decided again, the same" in await run("explain", "--check", "--file", str(file))
    file.write_text("[{}]", encoding="utf-8")
    with pytest.raises(ConfigError, match="holds no decisions of this version"):
        await run("explain", "--file", str(file))
    shown = await run("explain", "2")
    assert "100 requests/s of 2000 + 250 tokens" in shown
    assert "prefill one more" in shown
    assert "desired" in await run("status")
    with pytest.raises(ConfigError, match="no decision 77 is recorded"):
        await run("explain", "77")
    (_, one) = await stage.state.decisions()
    forged = replace(one, decision=replace(one.decision, kind="shrink"))
    await stage.state.commit(one, [forged])
    with pytest.raises(InternalError, match="decided otherwise from the same inputs: 2"):
        await run("explain", "--check", "--json")
