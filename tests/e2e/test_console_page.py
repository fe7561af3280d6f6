"""The console's page in a real browser: what it shows, and what it does with names that are meant to harm."""

import json
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import pytest_asyncio

from cluster.canary.evidence import encode_sides
from cluster.canary.judge import judge
from cluster.canary.store import CanaryState
from cluster.canary.values import Event, Phase
from cluster.console.recording import read_recording
from cluster.console.start import replayed, served
from cluster.scaling_state import ScalingState
from cluster.state import WorkerRecord
from headrace.config import ClusterConfig, ConsoleConfig, PoolConfig, RouterConfig
from headrace.config_tenants import ServiceClassConfig
from headrace.reports import ClassCounts, RouterReport
from headrace.values import BlockCounts, Load, Role
from router.text.vocabulary import Text
from tests.browser import browser
from tests.redis_proxy import RedisProxy, a_redis_proxy
from tests.unit.cluster.canary.world import ITS, LIVE, counted
from tests.unit.cluster.console.looks import recent, routed
from tests.unit.cluster.console.records import PLAN, turn
from tests.unit.cluster.console.world import HOST, Described, World, described, listed, world
from tests.unit.router.checkpoints import byte_level, write

pytestmark = [pytest.mark.redis, pytest.mark.asyncio(loop_scope="module")]

HARM = '<img src=x onerror="window.harmed=1"><script>window.harmed=1</script>\'"`${1}'
RECORDING = Path(__file__).with_name("console-1000.json.gz")
READY = WorkerRecord("decode-1", "decode", 1, "decode", "tp1·pp1", "ready", 1.0, "127.0.0.1:1")


class Watched:
    """A world, and a page that shows it. Owns what the page complained of, and whom it asked."""

    def __init__(self, there: World, page: Any, proxy: RedisProxy, report: RouterReport) -> None:
        self.there, self.page, self.proxy, self.report = there, page, proxy, report

    async def text(self, selector: str) -> str:
        return str(await self.page.locator(selector).inner_text())

    async def until(self, selector: str, text: str) -> None:
        await self.page.locator(selector).filter(has_text=text).first.wait_for(timeout=20_000)


def planned(folder: Path) -> str:
    path = folder / "plan.json"
    path.write_text(json.dumps(PLAN), encoding="utf-8")
    return str(path)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def chromium() -> AsyncIterator[Any]:
    async with browser() as its:
        yield its


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def watched(chromium: Any, redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Watched]:
    """One prefill and one decode worker that answer, one that does not, a router with requests, and harmful names."""
    config = ClusterConfig(
        name=f"c{uuid.uuid4().hex[:8]}",
        model="m",
        served_model_name=HARM,
        pools={"decode": PoolConfig(role="decode")},
        service_classes={"chat": ServiceClassConfig(ttft_seconds=0.5)},
        console=ConsoleConfig(plan=planned(tmp_path_factory.mktemp("plan"))),
    )
    text = Text.load(write(tmp_path_factory.mktemp("tiny"), byte_level()))
    known = {name: replace(recent(name).outline, request_id=name, tenant=HARM) for name in ("mine", HARM)}
    known["lost"] = replace(known["mine"], request_id="lost", outcome=HARM)
    prefill = Described("prefill-0", Role.PREFILL)
    decode = Described("decode-0", blocks=BlockCounts(free=5, active=95), its_load=Load(num_running=7, num_waiting=2))
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(described(worker)) for worker in (prefill, decode)]
        workers += [READY, replace(READY, worker_id=HARM, pool=HARM, phase="dead", address="", reason=HARM)]
        address = await stack.enter_async_context(listed(text, known))
        there = await stack.enter_async_context(world(config, redis_url))
        proxy = await stack.enter_async_context(a_redis_proxy(urlsplit(redis_url).port or 0))
        await there.control(workers, {"prefill": 1, "decode": 2, HARM: 1}, history={f"{HARM}-1": (1, 2, HARM)})
        decided = turn(3, 60.0, 2)
        decided = replace(decided, decision=replace(decided.decision, reason=HARM, notes=(HARM,)), outcome=HARM)
        await ScalingState(there.store, config.name).commit(decided, [turn(2, 0.0, 2), decided])
        report = replace(routed("r1"), http_address=address)
        await there.report(report)
        url = await stack.enter_async_context(served(config, proxy.url, HOST, 0))
        page = await chromium.new_page(viewport={"width": 1400, "height": 900}, color_scheme="light")
        shown, complaints, asked = Watched(there, page, proxy, report), list[str](), list[str]()
        page.on("console", lambda message: complaints.append(message.text) if message.type != "log" else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        await page.goto(url)
        await shown.until("#verdict-title", "workers ready")
        await there.report(
            replace(
                report,
                arrivals=20,
                ended=20,
                queued=3,
                pairs={("prefill-0", "decode-0"): 9, (HARM, "decode-0"): 2, ("", "decode-0"): 4},
                classes={"chat": ClassCounts(met=15, missed_ttft=5)},
            )
        )
        await shown.until("#verdict-title", "chat: 75.0 % of 20")
        yield shown
        assert complaints == []
        assert {place.split("/console/")[0] for place in asked if not place.startswith("data:")} == {
            url.split("/console/")[0]
        }


async def test_one_look_says_whether_targets_hold_and_which_pool_is_short(watched: Watched) -> None:
    assert await watched.page.locator("#verdict").get_attribute("data-level") == "bad"
    lines = await watched.text("#verdict-lines")
    assert "decode is short: 95.0 % of KV is held (95 of 100 blocks)" in lines
    assert "decode has 2 of 2" not in lines
    pool = watched.page.locator(".pool", has=watched.page.get_by_role("heading", name="decode", exact=True))
    assert await pool.get_attribute("data-level") == "warn"
    assert "7 running" in await pool.inner_text()
    assert await watched.page.title() == f"✕ {watched.there.config.name} · Headrace"


async def test_a_worker_that_does_not_answer_is_marked_with_the_reason(watched: Watched) -> None:
    await watched.until("#worker-table", "did not answer")
    row = watched.page.locator("#worker-table .rows .tr", has_text="decode-1.1")
    assert await row.get_attribute("data-phase") == "trouble"
    assert await watched.page.locator(".cell[data-phase=trouble]").count() == 1


async def test_hand_offs_are_ribbons_and_a_table(watched: Watched) -> None:
    assert await watched.page.locator("#flow-chart .ribbon").count() == 2
    assert "4 prompts were computed where they were decoded" in await watched.text("#flow-alone")
    assert "11 of 15 prompts" in await watched.text("#flow-note")
    await watched.page.get_by_role("button", name="pools").click()
    assert "prefill" in await watched.page.locator("#flow-chart").text_content()
    await watched.page.get_by_role("button", name="workers", exact=True).click()


async def test_decisions_and_the_plan_stand_beside_what_is(watched: Watched) -> None:
    page = watched.page
    assert "100 % prefill and decode apart" in " ".join((await watched.text("#reasons")).split())
    decisions = page.locator(".decision")
    assert [(await one.locator(".when").inner_text()) for one in await decisions.all()] == ["now", "60 s ago"]
    await decisions.first.locator("summary").click()
    assert HARM in await decisions.first.locator("div p").first.inner_text()
    rows = page.locator(".planned tbody tr")
    assert await rows.filter(has_text="decode workers").get_attribute("data-level") == "ok"
    assert await rows.filter(has_text="targets met").get_attribute("data-level") == "warn"
    assert "off the plan" in await watched.text("#plan-note")


async def test_a_canary_is_compared_on_the_page_and_its_end_is_said_first(watched: Watched) -> None:
    page, redis = watched.page, CanaryState(watched.there.store, watched.there.config.name)
    assert not await page.locator("#canary").is_visible()
    sides = {"stable": counted(2000), "v2": counted(300, failed=90)}
    over = replace(LIVE, phase=Phase.ROLLED_BACK, reason=HARM, since=await redis.time())
    event = Event(over.since, "live", over, judge(ITS, sides["stable"], sides["v2"], 0), encode_sides(sides))
    assert await redis.ask(await redis.read(), over, event)
    await watched.until("#canary-note", "v2 beside stable: rolled back")
    rows = page.locator("#canary-body table").first.locator("tbody tr")
    assert [(await row.locator("td").first.inner_text()) for row in await rows.all()] == ["stable", "v2"]
    assert "30.0 %" in await rows.nth(1).inner_text()
    failed = page.locator("#canary-body tr", has_text="missed targets")
    assert "✕ worse" in await failed.inner_text()
    assert HARM in await watched.text("#canary-body")
    assert f"canary v2 was rolled back: {HARM}" in await watched.text("#verdict-lines")
    assert await page.locator("#canary-link").is_visible()
    assert await page.locator("main img, main script").count() == 0


async def test_no_name_or_reason_is_taken_for_html(watched: Watched) -> None:
    page = watched.page
    assert HARM in await watched.text("#model")
    assert HARM in await watched.text("#source-list")
    assert HARM in await watched.text("#pool-list")
    assert HARM in await watched.text("#worker-table")
    assert any(HARM in title for title in await page.locator("#flow-chart title").all_text_contents())
    assert any(
        HARM in title for title in [await one.get_attribute("title") for one in await page.locator(".cell").all()]
    )
    assert await page.locator("main img, main script").count() == 0
    assert await page.evaluate("window.harmed") is None


async def test_requests_are_bars_that_open_why_by_keyboard_alone(watched: Watched) -> None:
    page = watched.page
    row = page.locator(".request", has_text="mine")
    assert await row.locator(".part").count() == 6
    await row.focus()
    await page.keyboard.press("Enter")
    await watched.until("#why-body", "It was never placed")
    assert await page.evaluate("document.activeElement.closest('dialog')?.id") == "why"
    await page.keyboard.press("Escape")
    assert not await page.locator("#why").is_visible()
    assert await page.evaluate("document.activeElement.className") == "request"
    await page.keyboard.press("/")
    await page.keyboard.type("prefill-0")
    assert await page.locator("#worker-table .rows .tr").count() == 1
    await page.locator("#filter").fill("")


async def test_everything_can_be_reached_by_tab_and_says_what_it_is(watched: Watched) -> None:
    page = watched.page
    await page.evaluate("document.activeElement.blur()")
    names = set()
    for _ in range(48):
        await page.keyboard.press("Tab")
        names.add(
            await page.evaluate(
                "(({ ariaLabel, textContent, id }) => ariaLabel || textContent || id)(document.activeElement)"
            )
        )
    assert {"To what matters", "Pause", "Light or dark", "15 min", "24 h", "As a table", "filter"} <= names
    unnamed = await page.evaluate(
        "[...document.querySelectorAll('button, a, input, [role=img], [role=meter]')]"
        ".filter((e) => e.offsetParent && !(e.textContent.trim() || e.ariaLabel || e.labels?.length)).length"
    )
    assert unnamed == 0


async def test_light_and_dark_follow_the_machine_until_somebody_chooses(watched: Watched) -> None:
    page = watched.page

    async def ground() -> str:
        return str(await page.evaluate("getComputedStyle(document.body).backgroundColor"))

    light = await ground()
    await page.emulate_media(color_scheme="dark")
    dark = await ground()
    assert light != dark
    await page.keyboard.press("t")
    assert await ground() == light
    await page.keyboard.press("t")
    await page.emulate_media(color_scheme="light")
    assert await ground() == dark
    await page.keyboard.press("t")


async def test_case_numbers_at_their_borders_are_written_as_people_write_them(watched: Watched) -> None:
    """99.6 ms was "1.0e+2 ms", and a price of 14,600 beside one of 9,125 was "14.6k $"."""
    said = await watched.page.evaluate(
        """async () => { const its = await import("./format.js");
        const times = [0.0996, 0.9996, 0.00996, 0.00099996, 0.143, 9.996];
        return [times.map(its.seconds), [14600, 9125.4, null].map(its.money)]; }"""
    )
    assert said == [
        ["100 ms", "1.00 s", "10 ms", "1.0 ms", "143 ms", "10.0 s"],
        ["14,600", "9,125", "–"],
    ]


async def test_case_what_a_tile_says_below_its_figure_is_whole(watched: Watched) -> None:
    """ "prompts 5,802, computed 1,7…" on a page as wide as most."""
    cut = await watched.page.evaluate(
        """async () => { const { showTraffic } = await import("./traffic.js");
        showTraffic({ traffic: { arrivals: 9, generated: 419, prompt_tokens: 58020, computed_tokens: 17350 } });
        return [...document.querySelectorAll(".tile > *")].filter((its) => its.scrollWidth > its.clientWidth).length; }"""
    )
    assert cut == 0


async def test_case_the_word_beside_a_thin_flow_is_not_cut(watched: Watched) -> None:
    """Of a worker that handed little over, at the top, half the name was beyond the picture."""
    above = await watched.page.evaluate(
        """async () => { const { showFlows } = await import("./flows.js");
        const pairs = [["a-0", "d-0", 1], ["b-0", "d-0", 400], ["b-0", "e-0", 1]];
        showFlows({ pools: [["p", "d", 402]], pairs, left_out: 0, seconds: 60 }, "workers");
        return [...document.querySelectorAll("#flow-chart text")].map((text) => text.getBBox())
          .filter((box) => box.y < 0 || box.y + box.height > 130).length; }"""
    )
    assert above == 0


async def test_case_of_the_ways_that_were_priced_the_one_taken_is_marked(watched: Watched) -> None:
    """It stood in the heading alone; and a column of what others miss was empty where nobody had targets."""
    page = watched.page
    ways = [{"prefill": "p-0", "decode": f"d-{at}", "price_seconds": 1.0 + at, "num_missed": 0} for at in range(2)]
    why = {"chosen": ways[1], "pairs": ways, "candidates": [], "reason": "pair"}
    found = {"outcome": "finished", "usage": {"prompt_tokens": 1}, "failures": [], "whys": [why]}

    async def answer(route: Any) -> None:
        await route.fulfill(json=found)

    await page.route("**/why/**", answer)
    await page.evaluate("async () => (await import('./why.js')).showWhy({ id: 'one', router: 'r1' })")
    rows = page.locator("#why-body table").last.locator("tbody tr td:first-child")
    assert await rows.all_inner_texts() == ["p-0 → d-0", "✓ p-0 → d-1"]
    assert "others miss" not in await watched.text("#why-body")
    await page.keyboard.press("Escape")
    await page.unroute("**/why/**")


async def test_case_where_too_few_are_compared_no_empty_table_says_so(watched: Watched) -> None:
    hidden = await watched.page.evaluate(
        """async () => { const { showCanary } = await import("./canary.js");
        const side = { requests: 1, ttft: {}, tpot: {}, prompt_tokens: 0 };
        showCanary({ canary: { revision: "v3", base: "stable", phase: "live", reason: "", percent: 5, looks: 0,
          confidence: 0.95, failures: 0, max_failures: 3, min_requests: 60, sides: [{ ...side, name: "stable" }],
          tests: [], events: [] } });
        return [...document.querySelectorAll("#canary-body table")].map((table) => table.hidden); }"""
    )
    assert hidden == [False, True]


async def test_while_it_is_paused_nothing_moves_and_it_says_so(watched: Watched) -> None:
    page = watched.page
    await page.locator("#pause").click()
    await watched.until("#freshness", "paused")
    before = await watched.text("#tiles")
    await watched.there.report(replace(watched.report, arrivals=5000))
    await page.evaluate("async () => { while ((await (await fetch('scene')).json()).routers[0].arrivals !== 5000); }")
    assert await watched.text("#tiles") == before
    await page.locator("#pause").click()
    await watched.until("#freshness", "live")


async def test_without_redis_the_page_says_how_old_it_is_and_comes_back_by_itself(watched: Watched) -> None:
    port, watched.proxy.port = watched.proxy.port, 1
    watched.proxy.cut()
    await watched.until("#verdict", "Redis does not answer: what stands here is")
    assert "decode" in await watched.text("#pool-list")
    watched.proxy.port = port
    await watched.until("#source-list", "Redis answers.")


async def test_a_thousand_workers_are_a_cell_each_and_as_many_rows_as_are_in_sight(chromium: Any) -> None:
    async with replayed(read_recording(RECORDING), HOST, 0) as url:
        page = await chromium.new_page(viewport={"width": 1400, "height": 900})
        await page.goto(url)
        await page.locator(".recorded", has_text="Simulated: 1,000 virtual workers").wait_for()
        assert await page.locator(".cell").count() == 1000
        assert await page.locator("#worker-table").get_attribute("aria-rowcount") == "1001"
        rows = page.locator("#worker-table .rows .tr")
        assert await rows.count() < 40
        assert "decode-0.1" in await page.locator("#worker-table").inner_text()
        await page.locator(".viewport").evaluate("(e) => e.scrollTo(0, e.scrollHeight)")
        await rows.filter(has_text="prefill-299.1").wait_for()
        assert await rows.count() < 40
        await page.get_by_role("button", name="KV held").click()
        full = [float(text.split()[0]) for text in await rows.locator("[role=cell]:nth-child(5)").all_inner_texts()]
        assert len(full) >= 12
        await page.locator("#filter").fill("decode-69")
        assert await rows.count() == 11
        assert await page.locator("#flow-chart rect").count() <= 28
        await page.set_viewport_size({"width": 390, "height": 844})
        assert await page.evaluate("document.documentElement.scrollWidth") == 390
        # Whoever asks, this page makes no HTML of text.
        refused = await page.evaluate(
            "(text) => { try { document.body.innerHTML = text } catch (error) { return error.name } }", HARM
        )
        assert refused == "TypeError"
        await page.close()


async def test_where_keys_are_configured_the_page_asks_for_one_and_goes_on_with_it(
    chromium: Any, redis_url: str
) -> None:
    config = ClusterConfig(
        name="keyed",
        model="m",
        pools={"decode": PoolConfig(role="decode")},
        router=RouterConfig(api_keys=("operator",)),
    )
    async with served(config, redis_url, HOST, 0) as url:
        page = await chromium.new_page()
        await page.goto(url)
        for key, why in (("wrong", "an API key is needed"), ("operator", "the API key is not known here")):
            await page.locator("#key-why", has_text=why).wait_for()
            await page.locator("#key-input").fill(key)
            await page.keyboard.press("Enter")
        await page.locator("#cluster", has_text="keyed").wait_for()
        assert await page.evaluate("document.cookie + JSON.stringify(localStorage)") == "{}"
        await page.close()
