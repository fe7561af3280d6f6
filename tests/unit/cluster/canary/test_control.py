"""The canary in its controller's hands: a real Valkey, and pools that a test plays."""

import asyncio
import contextlib
import json
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import pytest

from cluster.canary.control import SETTLED_SECONDS, Canary, begin
from cluster.canary.store import CanaryState, Found, encode_state
from cluster.canary.values import Phase, State, written
from cluster.controller import Controller
from cluster.lifecycle import Desired, DesiredPool, Observed, ObservedWorker, Start
from cluster.pools import Addresses, Progress
from cluster.reconcile import reconcile
from cluster.state import ControlState, configured
from headrace.clock import SystemClock
from headrace.config import AutoscalingConfig, CanaryConfig, ClusterConfig, EngineConfig, PoolConfig
from headrace.errors import ConfigError, WorkerLost
from headrace.keys import Keys
from headrace.leases import lease_fields
from headrace.reports import RevisionCounts, RouterReport, encode_report
from headrace.revisions import Split, decode_split
from headrace.store import Store, connect
from headrace.values import STABLE, Role
from tests.null_worker import worker_info
from tests.unit.cluster.canary.world import CANARY, ITS, OWN, counted, worker
from tests.unit.cluster.played_pools import Pools
from workers.spec import WorkerSpec

pytestmark = pytest.mark.redis

CONFIG = ClusterConfig(
    model="m", pools={"decode": PoolConfig(role="decode", replicas=2)}, canary=ITS.model_copy(update={"percent": 50.0})
)
DESIRED = configured(CONFIG, trusted=True)
TOKEN = "me"


@dataclass
class World:
    config: ClusterConfig
    store: Store
    redis: CanaryState
    canary: Canary

    async def turn(self, *workers: ObservedWorker, token: str = TOKEN, desired: Desired = DESIRED) -> State:
        await self.canary.turn(token, desired, workers or (*OWN, CANARY), 0.0)
        return await self.state()

    async def state(self) -> State:
        state = (await self.redis.read()).state
        assert state is not None
        return state

    async def split(self) -> Split:
        key = Keys(self.config.name).revisions
        split = decode_split(await self.store.call(lambda redis: redis.get(key)))
        assert split is not None
        return split

    async def say(self, report: RouterReport) -> None:
        key = Keys(self.config.name).router(report.router_id)
        await self.store.call(lambda redis: redis.set(key, encode_report(report)))

    def another(self) -> Canary:
        """Of a controller that starts now."""
        return Canary(self.config, self.store)


@contextlib.asynccontextmanager
async def a_world(redis_url: str, config: ClusterConfig = CONFIG) -> AsyncIterator[World]:
    config = config.model_copy(update={"name": f"c{uuid.uuid4().hex[:8]}"})
    store = connect(redis_url, 2.0)
    try:
        assert await ControlState(store, config.name).lead(TOKEN)
        yield World(config, store, CanaryState(store, config.name), Canary(config, store))
    finally:
        await store.close()


async def test_what_is_declared_begins_once_and_what_was_counted_ends_it(redis_url: str) -> None:
    async with a_world(redis_url) as its:
        assert (await its.turn()).phase is Phase.LIVE
        told = await its.split()
        assert (told.base, told.canary, told.percent) == ("stable", "v2", 50.0)
        assert set(its.canary.applied(DESIRED).pools) == {"decode", "canary"}
        its.canary = its.another()
        await its.say(RouterReport("r", "", 0.0, canary=1, revisions={"stable": counted(100), "v2": counted(50)}))
        assert (await its.turn()).phase is Phase.LIVE, "too few, and a controller that came in between lost nothing"
        slow = counted(400, ttft=1.0, seed=1)
        await its.say(RouterReport("r", "", 9.0, canary=1, revisions={"stable": counted(500), "v2": slow}))
        state = await its.turn()
        assert state.phase is Phase.ROLLED_BACK
        told = await its.split()
        assert (told.canary, told.percent) == ("v2", 0.0)
        assert set(its.canary.applied(DESIRED).pools) == {"decode"}
        events = await its.redis.events()
        assert [event.state.phase for event in events] == [Phase.LIVE, Phase.ROLLED_BACK]
        assert events[-1].state == state
        its.canary = its.another()
        assert await its.turn(*OWN) == state, "the same declaration begins nothing again"
        assert (await its.split()).canary == "", "its last worker is gone"


async def test_who_does_not_lead_writes_nothing_and_an_operators_word_goes_first(redis_url: str) -> None:
    async with a_world(redis_url) as its:
        await its.turn()
        before, told = await its.redis.read(), await its.split()
        its.canary.died(replace(CANARY, reason="gone"))
        assert before.state is not None
        assert await its.turn(token="another") == before.state
        assert await its.split() == told
        aborted = replace(before.state, phase=Phase.ABORTED)
        event = (await its.redis.events())[-1]
        assert await its.redis.ask(before, aborted, event)
        assert not await its.redis.ask(before, before.state, event), "it was read before that"
        assert await its.turn() == aborted
        assert (await its.split()).percent == 0.0


async def test_a_flushed_redis_is_written_anew_and_foreign_values_count_as_none(redis_url: str) -> None:
    async with a_world(redis_url) as its:
        state = await its.turn()
        keys = Keys(its.config.name)
        for key in (keys.canary, keys.canary_evidence, keys.canary_events, keys.revisions):
            await its.store.call(lambda redis, key=key: redis.delete(key))
            await its.store.call(lambda redis, key=key: redis.hset(key, "a", "b"))
        assert await its.redis.events() == []
        assert await its.turn() == state
        assert (await its.split()).percent == 50.0
        await its.store.call(lambda redis: redis.set(keys.canary, '{"number": 1}'))
        assert await its.turn() == state


async def test_case_a_controller_whose_first_turn_comes_to_nothing_keeps_the_workers_of_the_canary(
    redis_url: str,
) -> None:
    """One that began in mid-promotion took the canary's pools away, and its promoted workers back, for as long as its turn
    failed or an operator was quicker."""
    async with a_world(redis_url) as its:
        state = await its.turn()
        found = await its.redis.read()
        event = (await its.redis.events())[-1]
        assert await its.redis.ask(found, replace(state, phase=Phase.PROMOTING), event)
        later = its.another()
        await later.turn("it does not lead", DESIRED, (*OWN, CANARY), 0.0)
        pools = later.applied(DESIRED).pools
        assert set(pools) == {"decode", "canary"}
        assert pools["decode"].revision == "v2"
        assert later.num_gpus((*OWN, CANARY)) == 1


async def test_case_a_controller_that_leads_again_goes_on_from_what_another_counted(redis_url: str) -> None:
    async with a_world(redis_url) as its:
        await its.turn()
        first, its.canary = its.canary, its.another()
        for look, number in ((1, 200), (2, 400)):
            both = {"stable": counted(number), "v2": counted(number)}
            await its.say(RouterReport("r", "", 0.0, canary=1, revisions=both))
            await its.turn()
            counted_by_another = await its.redis.evidence()
            assert counted_by_another.look == look
        its.canary = first
        await its.turn()
        assert await its.redis.evidence() == counted_by_another, "its looks, which the confidence is over, too"


async def test_case_what_was_counted_of_a_canary_before_redis_was_flushed_is_not_of_the_one_after(
    redis_url: str,
) -> None:
    """Both have the number 1, where its controller was lost with it: the new one was ended by what the old one had done."""
    async with a_world(redis_url) as its:
        old = {"stable": counted(500), "v2": counted(400, ttft=1.0, seed=1)}
        await its.say(RouterReport("r", "", 0.0, canary=1, revisions=old))
        assert (await its.turn()).phase is Phase.LIVE
        assert (await its.turn()).phase is Phase.LIVE
        assert (await its.redis.evidence()).sides.get("v2", RevisionCounts()).ended == 0
        more = {name: counts.plus(counted(10)) for name, counts in old.items()}
        await its.say(RouterReport("r", "", 1.0, canary=1, revisions=more))
        await its.turn()
        assert (await its.redis.evidence()).of("v2").ended == 10


async def test_case_a_state_of_another_version_ends_nothing(redis_url: str) -> None:
    """It counted as none: the older controller of a rolling update ended the canary, replaced what had been promoted by
    what its file said, and wrote a state of its own over it."""
    async with a_world(redis_url) as its:
        state = await its.turn()
        told = await its.split()
        newer = json.loads(encode_state(replace(state, phase=Phase.PROMOTING))) | {"pace": 2}
        await its.store.call(lambda redis: redis.set(Keys(its.config.name).canary, json.dumps(newer)))
        mixed = (OWN[0], worker("decode", 1, "v2"), CANARY)
        for canary in (its.canary, its.another()):
            await canary.turn(TOKEN, DESIRED, mixed, 0.0)
            found = await its.redis.read()
            assert (found.foreign, json.loads(found.raw)) == (True, newer)
            assert await its.split() == told
            assert reconcile(canary.applied(DESIRED), Observed(mixed, {}), 100.0) == []
            assert canary.num_gpus(mixed) == 1
        with pytest.raises(ConfigError, match="another version"):
            await its.redis.known()
        await its.store.call(lambda redis: redis.delete(Keys(its.config.name).canary))
        assert (await its.turn()).phase is Phase.LIVE


async def test_case_a_pool_under_a_state_of_another_version_keeps_its_size(redis_url: str) -> None:
    """Each death of a worker left its pool one smaller, of whichever revision it was: all are followed by their like, but
    those whose settings this controller never read."""
    async with a_world(redis_url) as its:
        state = await its.turn()
        newer = json.loads(encode_state(replace(state, phase=Phase.PROMOTING))) | {"pace": 2}
        await its.store.call(lambda redis: redis.set(Keys(its.config.name).canary, json.dumps(newer)))
        mixed = OWN[0], worker("decode", 1, "v2")
        for canary, its_like in ((its.canary, [("decode-1", "v2")]), (its.another(), [])):
            await canary.turn(TOKEN, DESIRED, mixed, 0.0)
            for left, expected in ((mixed[1:], [("decode-0", STABLE)]), (mixed[:1], its_like), (mixed, [])):
                await canary.turn(TOKEN, DESIRED, left, 0.0)
                actions = reconcile(canary.applied(DESIRED), Observed(left, {}), 100.0)
                assert [(start.worker_id, start.revision) for start in actions if isinstance(start, Start)] == expected
                assert len(actions) == len(expected), "nobody ends for it"
                assert canary.revision_of("decode") == (expected[0][1] if expected else STABLE), "as a rank's resources"


async def test_case_a_canary_that_is_over_is_not_written_at_every_turn(redis_url: str) -> None:
    """Its state, and what was counted, once a second for as long as the cluster lived."""
    async with a_world(redis_url) as its:
        state, found = await its.turn(), await its.redis.read()
        aborted = replace(state, phase=Phase.ABORTED)
        assert await its.redis.ask(found, aborted, (await its.redis.events())[-1])
        await its.turn(*OWN)
        beat = (await its.split()).beat
        for _ in range(3):
            await its.canary.turn(TOKEN, DESIRED, OWN, SETTLED_SECONDS - 1.0)
        assert (await its.split()).beat == beat
        await its.canary.turn(TOKEN, DESIRED, OWN, SETTLED_SECONDS)
        assert (await its.split()).beat > beat, "routers' key may be lost alone"
        await its.store.call(lambda redis: redis.delete(Keys(its.config.name).canary))
        assert await its.turn(*OWN) == aborted, "a flush is noticed at once"


async def test_deaths_are_counted_once_and_survive_a_controller(redis_url: str) -> None:
    async with a_world(redis_url) as its:
        await its.turn()
        for number in range(1, ITS.max_failures):
            its.canary.died(replace(CANARY, reason="gone"))
            its.canary.died(replace(OWN[0], reason="not a canary's"))
            assert (await its.turn(*OWN)).failures == number
            its.canary = its.another()
        its.canary.died(replace(CANARY, reason="gone"))
        assert (await its.turn(*OWN)).reason == "its workers failed 3 times: canary-0: gone"


async def test_a_canary_takes_what_the_budget_leaves_and_pools_keep_what_they_hold(redis_url: str) -> None:
    scaling = AutoscalingConfig(budget_gpus=3)
    async with a_world(redis_url, CONFIG.model_copy(update={"autoscaling": scaling})) as its:
        await its.turn(*OWN, worker("decode", 2))
        assert its.canary.applied(DESIRED).pools["canary"].replicas == 0
        assert its.canary.num_gpus(OWN) == 0
        await its.turn(*OWN, desired=Desired({"decode": DesiredPool(Role.DECODE, 3)}))
        assert its.canary.applied(DESIRED).pools["canary"].replicas == 0
        await its.turn(*OWN)
        assert its.canary.applied(DESIRED).pools["canary"].replicas == 1
        assert its.canary.num_gpus((*OWN, CANARY)) == 1


async def test_what_was_promoted_is_what_the_next_one_is_compared_with(redis_url: str) -> None:
    async with a_world(redis_url) as its:
        found, state = await its.redis.read(), await its.turn()
        found = await its.redis.read()
        event = (await its.redis.events())[-1]
        assert await its.redis.ask(found, replace(state, phase=Phase.PROMOTING), event)
        both = (worker("decode", 0, "v2"), worker("decode", 1, "v2"))
        state = await its.turn(*both, CANARY)
        assert state.phase is Phase.PROMOTED
        assert its.canary.settings("decode", "v2")[0] == "m2"
        assert its.canary.settings("decode", "stable")[0] == "m"
        assert its.canary.applied(DESIRED).pools["decode"].revision == "v2"
        third = CanaryConfig(revision="v3", pools=ITS.pools)
        after = begin(state, 1.0, written(third), 5.0)
        assert (after.number, after.base, after.serving, after.declared) == (2, "v2", "v2", state.declared)


async def test_one_with_other_words_gets_no_share_and_the_reason_names_them(redis_url: str) -> None:
    """Routers would take none of its workers, and it would wait for requests for ever."""
    async with a_world(redis_url) as its:
        keys = Keys(its.config.name)
        for info in (worker_info("decode-0"), replace(worker_info("canary-0", tokenizer="t2"), revision="v2")):
            fields = lease_fields(info)
            await its.store.call(lambda redis, f=fields: redis.hset(keys.lease(f["worker_id"]), mapping=f))
        state = await its.turn()
        assert (state.phase, state.reason) == (Phase.ROLLED_BACK, "its tokenizer is t2, that of stable is t1")
        await its.store.call(lambda redis: redis.delete(keys.lease("decode-0"), keys.lease("canary-0")))


class Crashing(Pools):
    """Workers of the canary end as soon as they are started."""

    def __init__(self) -> None:
        super().__init__()
        self.specs: list[WorkerSpec] = []

    async def start(self, spec: WorkerSpec, progress: Progress) -> Addresses:
        self.specs.append(spec)
        if spec.worker_id.startswith("canary"):
            raise WorkerLost(f"{spec.worker_id}: no such model")
        return await super().start(spec, progress)


async def test_the_controller_starts_its_workers_with_its_settings_and_ends_it_when_they_crash(redis_url: str) -> None:
    settings = ITS.model_copy(update={"engine": EngineConfig(max_num_seqs=7), "max_failures": 2})
    async with a_world(redis_url, CONFIG.model_copy(update={"canary": settings})) as its:
        pools = Crashing()
        state = ControlState(its.store, its.config.name)
        await state.resign(TOKEN)
        await state.write_desired(DESIRED)
        canary = its.canary
        controller = Controller(its.config, redis_url, "", pools, state, SystemClock(), None, canary)  # type: ignore[arg-type]
        running = asyncio.create_task(controller.run())
        try:
            await pools.until("decode-0 starts", "decode-1 starts", "canary-0 is removed")
            while (found := await its.redis.read()) and (found.state is None or found.state.phase.under_way):
                pools.changed.clear()
                await asyncio.wait_for(pools.changed.wait(), 10)
            await asyncio.sleep(0)
            assert found.state is not None
            assert found.state.phase is Phase.ROLLED_BACK
            assert "its workers failed 2 times: canary-0: canary-0: no such model" in found.state.reason
        finally:
            running.cancel()
            await asyncio.wait([running])
        specs = {spec.worker_id: spec for spec in pools.specs}
        assert (specs["canary-0"].model_path, specs["canary-0"].revision) == ("m2", "v2")
        assert specs["canary-0"].engine.max_num_seqs == 7
        assert (specs["decode-0"].model_path, specs["decode-0"].revision) == ("m", "stable")
        assert Found("", None).state is None
