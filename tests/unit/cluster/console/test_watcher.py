"""Looks at a cluster whose parts answer, fall silent and go, through a real Redis, gRPC and HTTP."""

import asyncio
import json
import pathlib
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest

from cluster.console.asking import MAX_WORKERS_A_LOOK, due
from cluster.console.plan_file import PlanFile
from cluster.console.watcher import MAX_WATCHERS, Watcher
from cluster.scaling_state import ScalingState
from cluster.state import WorkerRecord
from headrace.clock import ManualClock
from headrace.config import ClusterConfig, PoolConfig
from headrace.config_tenants import ServiceClassConfig
from headrace.reports import ClassCounts
from headrace.store import connect
from headrace.values import Load
from router.text.vocabulary import Text
from tests.unit.cluster.console.looks import recent, routed
from tests.unit.cluster.console.records import turn
from tests.unit.cluster.console.world import Described, World, described, listed, world

DECODE = WorkerRecord("decode-0", "decode", 1, "decode", "tp1·pp1", "ready", 1.0, "127.0.0.1:1")


@pytest.fixture
async def there(redis_url: str) -> AsyncIterator[World]:
    config = ClusterConfig(
        name=f"c{uuid.uuid4().hex[:8]}",
        model="m",
        pools={"decode": PoolConfig(role="decode")},
        service_classes={"chat": ServiceClassConfig(ttft_seconds=0.5)},
    )
    async with world(config, redis_url) as its:
        yield its


async def look(watcher: Watcher) -> Any:
    await watcher.look()
    return json.loads(watcher.scene)


def rows(scene: Any) -> dict[str, dict[str, Any]]:
    columns = scene["workers"]["columns"]
    return {row[0]: dict(zip(columns, row, strict=True)) for row in scene["workers"]["rows"]}


async def test_a_look_shows_workers_routers_requests_and_how_targets_are_met(
    there: World, clock: ManualClock, tiny: Text
) -> None:
    worker = Described("decode-0", its_load=Load(num_running=2, num_waiting=1))
    outline = replace(recent("mine").outline, request_id="mine")
    async with AsyncExitStack() as stack:
        record = await stack.enter_async_context(described(worker))
        address = await stack.enter_async_context(listed(tiny, {"mine": outline}))
        watcher = await stack.enter_async_context(there.watched(clock))
        await there.control([record], {"decode": 2})
        before = replace(routed("r1"), http_address=address)
        await there.report(before)
        await look(watcher)
        clock.advance(10.0)
        await there.report(
            replace(before, arrivals=20, ended=20, queued=3, classes={"chat": ClassCounts(met=15, missed_ttft=5)})
        )
        scene = await look(watcher)
        assert (
            rows(scene)["decode-0"] | {"running": 2, "waiting": 1, "kv": 0.3, "trouble": "", "age": 0.0}
            == rows(scene)["decode-0"]
        )
        assert (scene["traffic"]["arrivals"], scene["traffic"]["queued"]) == (2.0, 3)
        assert scene["targets"][0]["window"]["attainment"] == 0.75
        assert [one["id"] for one in scene["requests"]["rows"]] == ["mine"]
        assert scene["verdict"]["title"].startswith("chat: 75.0 % of 20 requests met their targets")
        assert "decode has 1 of 2 workers ready" in {line["text"] for line in scene["verdict"]["lines"]}
        assert [len(ring["points"]) for ring in watcher.history().values()] == [2, 1]


async def test_without_redis_what_was_seen_stays_with_its_age_and_serving_is_said_to_go_on(
    there: World, clock: ManualClock
) -> None:
    async with described(Described("decode-0")) as record:
        await there.control([record], {"decode": 1})
        await there.report(routed("r1"))
        async with there.watched(clock) as watcher:
            await look(watcher)
            clock.advance(30.0)
            connected, watcher._store = watcher._store, connect("redis://127.0.0.1:1/0", 0.2)
            scene = await look(watcher)
            await connected.close()
            assert (scene["sources"]["redis_seconds"], scene["pools"][0]["ready"]) == (30.0, 1)
            assert "Redis did not serve a call" in scene["sources"]["redis_why"]
            assert "Redis does not answer: what stands here is 30 s old. Serving goes on without it" in {
                line["text"] for line in scene["verdict"]["lines"]
            }
            assert rows(scene)["decode-0"]["age"] == 0.0  # its worker still answers


async def test_a_console_that_never_saw_redis_says_that_it_knows_nothing(there: World, clock: ManualClock) -> None:
    async with there.watched(clock, "redis://127.0.0.1:1/0") as watcher:
        scene = await look(watcher)
        assert (scene["verdict"]["level"], scene["sources"]["redis_seconds"]) == ("unknown", None)


async def test_a_worker_that_vanishes_keeps_its_last_figures_with_their_age_until_the_controller_drops_it(
    there: World, clock: ManualClock
) -> None:
    async with there.watched(clock) as watcher:
        async with described(Described("decode-0")) as record:
            await there.control([record], {"decode": 1})
            assert rows(await look(watcher))["decode-0"]["trouble"] == ""
        clock.advance(7.0)
        gone = rows(await look(watcher))["decode-0"]
        assert (gone["kv"], gone["age"]) == (0.3, 7.0)
        assert "did not answer" in gone["trouble"]
        again = replace(record, generation=2, phase="starting", address="")
        await there.control([again], {"decode": 1}, history={"decode-0": (1, 1, "rank 0: its process is gone")})
        scene = await look(watcher)
        assert (rows(scene)["decode-0"]["kv"], rows(scene)["decode-0"]["phase"]) == (None, "starting")
        assert scene["failures"] == [{"worker": "decode-0", "reason": "ended: rank 0: its process is gone"}]
        await there.control([], {"decode": 1})
        assert rows(await look(watcher)) == {}


async def test_a_worker_that_hangs_holds_up_no_look_and_is_not_asked_twice(there: World, clock: ManualClock) -> None:
    over, hung_up = asyncio.Event(), asyncio.Event()

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await over.wait()
        writer.close()
        hung_up.set()

    server = await asyncio.start_server(hang, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, described(Described("decode-1")) as well:
        async with there.watched(clock) as watcher:
            hangs = replace(DECODE, address=f"127.0.0.1:{port}")
            await there.control([hangs, well], {"decode": 2})
            for _ in range(2):
                found = rows(await look(watcher))
                assert (found["decode-0"]["kv"], found["decode-1"]["kv"]) == (None, 0.3)
            assert set(watcher._describes._under_way) == {"decode-0"}
        over.set()
        await hung_up.wait()


def test_of_a_thousand_workers_64_are_asked_in_a_look_those_that_were_asked_longest_ago_first() -> None:
    names = {f"w{number}": "" for number in range(1000)}
    asked: dict[str, float] = {}
    for at in range(20):
        chosen = due(names, asked, {"w0": None}, MAX_WORKERS_A_LOOK)
        assert len(chosen) == MAX_WORKERS_A_LOOK - 1
        asked |= dict.fromkeys(chosen, float(at))
    assert min(asked.values()) >= 4.0
    assert asked.keys() == names.keys() - {"w0"}


async def test_a_router_that_wants_a_key_or_is_gone_is_named_and_shows_nothing_old(
    there: World, clock: ManualClock, tiny: Text
) -> None:
    outline = replace(recent("mine").outline, request_id="mine")
    async with there.watched(clock) as watcher:
        await there.control([], {})
        async with listed(tiny, {"mine": outline}, api_keys=("k",)) as address:
            await there.report(replace(routed("r1"), http_address=address))
            scene = await look(watcher)
            assert "it wants an API key" in scene["routers"][0]["silence"]
            assert scene["requests"]["rows"] == []
    keyed = there.config.model_copy(update={"router": there.config.router.model_copy(update={"api_keys": ("k",)})})
    there.config = keyed
    async with there.watched(clock) as watcher:
        async with listed(tiny, {"mine": outline}, api_keys=("k",)) as address:
            await there.report(replace(routed("r1"), http_address=address))
            assert len((await look(watcher))["requests"]["rows"]) == 1
        scene = await look(watcher)
        assert scene["requests"]["rows"] == []
        assert "it does not answer" in scene["routers"][0]["silence"]


async def test_keys_of_another_type_in_redis_end_no_look(there: World, clock: ManualClock) -> None:
    await there.store.call(lambda redis: redis.lpush(f"hr:{there.config.name}:observed", "x"))
    async with there.watched(clock) as watcher:
        scene = await look(watcher)
        assert "none has said anything yet" in scene["sources"]["controller"]
        await there.store.call(lambda redis: redis.delete(f"hr:{there.config.name}:observed"))
        await there.store.call(lambda redis: redis.lpush(f"hr:{there.config.name}:leader", "x"))
        assert (await look(watcher))["sources"]["controller"]


async def test_who_watches_gets_each_scene_and_its_end_and_no_more_may_than_there_is_room_for(
    there: World, clock: ManualClock
) -> None:
    async with AsyncExitStack() as stack:
        async with there.watched(clock) as watcher:
            await look(watcher)
            scenes = watcher.scenes()
            first = await anext(scenes)
            coming = asyncio.ensure_future(anext(scenes))
            clock.advance(1.0)
            await look(watcher)
            assert json.loads(await coming)["sources"] == json.loads(first)["sources"]
            for _ in range(MAX_WATCHERS):
                assert not watcher.is_full
                stack.enter_context(watcher.watching())
            assert watcher.is_full
            last = asyncio.ensure_future(anext(scenes))
        with pytest.raises(StopAsyncIteration):
            await last


async def test_the_autoscaler_s_record_and_the_plan_are_shown_where_there_are_any(
    there: World, clock: ManualClock, tmp_path: pathlib.Path
) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text("{}", encoding="utf-8")
    state = ScalingState(there.store, there.config.name)
    async with there.watched(clock, plan=PlanFile(plan)) as watcher:
        scene = await look(watcher)
        assert (scene["scaling"], scene["plan"]) == (None, {"error": "this is no plan: KeyError('format')"})
        decided = [turn(number, float(number), 2) for number in (1, 2, 3)]
        await state.commit(decided[-1], decided)
        assert (await look(watcher))["scaling"] is None  # its record is long: it is read every few seconds
        clock.advance(5.0)
        assert [one["number"] for one in (await look(watcher))["scaling"]["decisions"]] == [3, 2, 1]
