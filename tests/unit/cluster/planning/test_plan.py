"""Whole plans on small traffic, the command's forms, and what it refuses, with figures."""

import json
import pathlib
import re
from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from rich.console import Console

from cluster.cli import cli
from cluster.planning import asked, check, page, plan_json, shapes, show
from cluster.planning.caveats import recorded
from cluster.planning.gpus import find
from cluster.planning.load import Pools, Target, Worker
from cluster.planning.outlook import break_even
from cluster.planning.plan import Plan
from cluster.planning.prediction import Overload
from cluster.planning.settle import settle
from cluster.planning.stages import predict
from cluster.planning.traffic import burstiness, gap_scv, of
from headrace import traces
from headrace.config import EngineConfig, PoolConfig
from headrace.costmodel import CostModel
from headrace.traces import TraceRow
from headrace.values import ParallelLayout
from tests.unit.cluster.planning.small import SMALL, made, with_traffic

SAMPLE_TRACE = pathlib.Path(__file__).parents[4] / "examples" / "azure_sample.csv"
EXAMPLE = pathlib.Path(__file__).parents[4] / "examples" / "plan.yaml"


@pytest.fixture(scope="module")
def small() -> Plan:
    return made()


@pytest.fixture(scope="module")
def found(small: Plan) -> dict[str, Any]:
    return json.loads(json.dumps(plan_json.as_json(small)))


def test_a_plan_holds_in_simulation_without_its_spare_workers(small: Plan) -> None:
    chosen = small.chosen
    assert chosen.holds
    last = chosen.rounds[-1]
    assert last.pools == chosen.option.needed
    assert last.simulated.attainment >= 0.95
    assert chosen.full is not None
    spare = chosen.option.pools.num_workers - chosen.option.needed.num_workers
    assert spare == (1 if chosen.option.kind == "aggregated" else 2)


def test_both_kinds_were_simulated_and_the_cheaper_one_is_taken(small: Plan) -> None:
    assert small.other is not None
    assert {small.option.kind, small.other.option.kind} == {"aggregated", "disaggregated"}
    assert small.option.per_hour <= small.other.option.per_hour
    assert all(one.rounds for one in (small.chosen, small.other))


def test_money_is_gpus_times_hours_times_price(small: Plan) -> None:
    money, option = small.money, small.option
    assert money.per_month == pytest.approx(option.num_gpus * 3.0 * 730)
    seconds = 730 * 3600
    assert money.per_million * money.tokens_per_month / 1e6 == pytest.approx(money.per_month)
    assert money.tokens_per_month == pytest.approx(6.0 * seconds * 1540, rel=0.01)
    assert 0 < money.following_gpu_hours <= money.fixed_gpu_hours


def test_a_day_has_the_mean_and_the_peak_that_were_asked_for(small: Plan) -> None:
    rates = [row["requests_per_second"] for row in small.by_hour]
    assert sum(rates) / 24 == pytest.approx(6.0)
    assert max(rates) == pytest.approx(9.0)
    assert small.load.requests_per_second == pytest.approx(9.0)


def test_break_even_is_where_own_gpus_cost_what_the_api_asks(small: Plan) -> None:
    even = small.break_even
    assert even is not None
    assert even.api_per_month == pytest.approx(6.0 * 730 * 3600 * (1500 * 0.5 + 40 * 1.5) / 1e6, rel=0.01)
    assert even.factor is not None
    assert even.factor < 1  # here the API is dearer
    dear = break_even(small.option, small.load, Target(0.5, 0.02), 6.0, 1, 1e-6, 1e-6)
    assert dear.factor is None


def test_what_if_says_more_gpus_for_more_traffic_and_longer_prompts(small: Plan) -> None:
    by_name = {one.what: one for one in small.what_ifs}
    numbers = [by_name[f"traffic × {factor:g}"].num_gpus or 0 for factor in (0.5, 1, 2, 4)]
    assert numbers == sorted(numbers)
    assert numbers[-1] > numbers[0]
    assert by_name["traffic × 1"].attainment >= by_name["traffic × 4"].attainment
    assert (by_name["prompts × 2"].num_gpus or 0) >= (by_name["traffic × 1"].num_gpus or 0)


def test_the_json_says_what_the_console_needs_and_where_figures_are_from(found: dict[str, Any]) -> None:
    assert found["format"] == plan_json.FORMAT
    assert len(found["by_hour"]) == 24
    assert {"ttft_seconds", "tpot_seconds", "attainment", "prefill_busy"} <= set(found["by_hour"][0])
    assert all(figure["origin"] == "measured" and figure["source"] for figure in found["chosen"]["gpu"].values())
    assert found["chosen"]["rounds"][0]["predicted"]["queue_seconds"]["mean"] > 0
    assert {one["phase"]: one["bound"] for one in found["rooflines"]} == {"prefill": "compute", "decode": "memory"}
    assert found["memory"]["h200"][0]["max_sequences_at_mean_context"] > 0
    cluster = found["chosen"]["cluster"]
    pools = {name: PoolConfig(**pool) for name, pool in cluster["pools"].items()}
    assert sum(pool.replicas * pool.tp * pool.pp for pool in pools.values()) == found["chosen"]["num_gpus"]
    assert EngineConfig(**cluster["engine"]).kv_bytes > 100e9
    assert found["assumptions"]
    assert "of 6 runs of two GPUs" in found["record"]
    assert found["unknowns"]


def test_the_record_of_a_gpu_is_said_with_what_of_the_plan_it_does_not_cover(small: Plan) -> None:
    option, held = replace(small.option, pools=Pools(1, 1)), small.asked.held
    said = recorded(option, small.model, held)
    assert said.endswith(
        "TTFT was simulated within 10 %, TPOT within 4 % (p50 and p90) and goodput within 3 % (docs/planning.md)"
    )
    assert recorded(option, replace(small.model, name="mine", max_context_tokens=4096), held) == said
    four = replace(option.decode_budget, layout=ParallelLayout(tp=4))
    other = replace(option, pools=Pools(2, 1), decode_budget=four)
    assert recorded(other, shapes.KNOWN["meta-llama/Llama-3.1-70B"], shapes.Precision("fp8")).removeprefix(said) == (
        ". No run was kept of meta-llama/Llama-3.1-70B, tp 4, pp 1, fp8 with KV in bfloat16, 6 GPUs: how near this plan is "
        "remains open"
    )
    unknown = recorded(replace(option, gpu=find("h100", 1.0)), small.model, held)
    assert "no run of whole traffic was kept" in unknown


@pytest.mark.parametrize(
    ("ends", "ticks"),
    [
        ((0.0, 23.0), [0, 5, 10, 15, 20]),  # they were 0, 5.75, 11.5, 17.2 and 23
        ((50.0, 99.0), [50, 60, 70, 80, 90]),
        ((0.0, 8.64), [0, 2, 4, 6, 8]),
        ((11.8, 15.2), [12, 13, 14, 15]),
        ((3.0, 3.0), [3]),
    ],
)
def test_case_axes_have_round_numbers(ends: tuple[float, float], ticks: list[float]) -> None:
    assert page._ticks(*ends) == pytest.approx(ticks)


def test_the_page_says_how_far_what_was_simulated_is_off_by_chance(found: dict[str, Any]) -> None:
    simulated = found["chosen"]["rounds"][-1]["simulated"]
    assert f"{simulated['attainment']:.1%} ± {simulated['deviation']:.1%}" in page.page(found)


def test_the_page_needs_nothing_else(found: dict[str, Any]) -> None:
    shown = page.page({**found, "warnings": ["<script>alert(1)</script>"]})
    assert "<script" not in shown
    assert not re.search(r"""(src|href)\s*=|url\(|@import""", shown)
    assert shown.count("<svg") == 5
    assert "predicted" in shown
    assert "simulated" in shown
    for said in ("a million of output", found["doubt"].replace("'", "&#x27;"), "&quot;replicas&quot;", "of the roof"):
        assert said in shown, "as on a terminal"


def test_pools_that_are_too_small_grow_until_the_simulation_holds(small: Plan) -> None:
    """One worker of each, for three times what a prefill worker can do: prefill grows, decode has no need to."""
    option = next(one for one in small.ways if one.kind == "disaggregated").with_needed(Pools(1, 1), 0)
    load = small.load.at(60 / small.load.requests_per_second)
    settled = settle(small.asked, option, small.traffic, load, Target(0.5, 0.02), 8192, say=lambda line: None)
    assert settled.holds
    assert settled.rounds[0].simulated.attainment < 0.95 <= settled.rounds[-1].simulated.attainment
    assert settled.option.needed.prefill >= 2
    assert settled.option.needed.decode == 1


def test_a_trace_is_planned_for_its_busiest_minute(tmp_path: pathlib.Path) -> None:
    trace = tmp_path / "trace.csv"
    quiet = [f"2023-11-16 18:{minute:02}:{second:02},1000,20" for minute in range(20) for second in range(0, 60, 10)]
    busy = [f"2023-11-16 18:10:{second:02}.{part},1000,20" for second in range(1, 60) for part in range(0, 9, 3)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *sorted(quiet + busy)]) + "\n")
    found = made(traffic={"trace": trace}, simulate={"requests": 0})
    assert found.load.requests_per_second == pytest.approx(183 / 60, rel=0.03)
    assert found.traffic.mean_per_second == pytest.approx(297 / 1190, rel=0.01)


def test_unlike_layouts_get_the_kv_of_the_smaller_worker() -> None:
    """A cluster's file has one engine.kv_bytes: 70B on one H200 leaves little, and its decode workers have no more."""
    found = made(
        model="meta-llama/Llama-3.1-70B", slo={"ttft_seconds": 2, "tpot_seconds": 0.06}, simulate={"requests": 0}
    )
    for option in found.ways:
        held = {worker.kv_tokens * worker.kv_bytes_per_token for worker in (option.prefill, option.decode)}
        assert max(held) == pytest.approx(min(held), rel=0.01)
    assert any(len({one.prefill_budget.layout, one.decode_budget.layout}) == 2 for one in found.ways)


def test_only_one_kind_may_be_asked_for() -> None:
    found = made(serve="disaggregated", simulate={"requests": 0}, api=None)
    assert {one.kind for one in found.ways} == {"disaggregated"}
    assert found.other is None


def test_an_unmeasured_gpu_is_flagged_and_its_doubt_is_in_what_if() -> None:
    found = made(
        gpus=[{"type": "a100", "price_per_hour": 1.5}], **with_traffic(hit_rate=0.5), simulate={"requests": 0}, api=None
    )
    assert {"hit rate × 0.5", "hit rate 0"} <= {one.what for one in found.what_ifs}
    assert any("never measured" in warning for warning in found.warnings)
    assert any(one.what.startswith("steps × 1.3") for one in found.what_ifs)
    assert any("nothing was simulated" in line for line in found.unknowns)


def test_what_a_card_takes_over_from_an_h200_is_said() -> None:
    mine = {"memory_gb": 96, "tflops": 600, "memory_tb_per_second": 4.0, "link_gb_per_second": 300}
    for figures, number in ((mine, 132), ({**mine, "multiprocessors": 170}, 170)):
        found = made(gpus=[{"type": "mine", "price_per_hour": 1.0, **figures}], simulate={"requests": 0}, api=None)
        (said,) = [line for line in found.assumptions if "multiprocessors" in line]
        assert said.startswith(f"mine: attention of prompts runs in waves over {number} multiprocessors")
        assert said.endswith("was fitted to steps of an H200")


def test_streams_are_held_up_at_least_for_as_long_as_weights_are_read() -> None:
    """A step of 64 tokens was said to hold up streams for 3 ms, beside decode steps of 4.6."""
    found = made(serve="aggregated", simulate={"requests": 0}, api=None, engine={"max_step_tokens": 64})
    (said,) = [re.search(r"for (\d+) ms, which no limit", line) for line in found.unknowns if "gaps" in line]
    assert said is not None
    assert int(said[1]) >= 5


def test_a_gpu_of_ones_own_is_taken_with_its_figures() -> None:
    mine = {"memory_gb": 96, "tflops": 600, "memory_tb_per_second": 4.0, "link_gb_per_second": 300}
    found = asked.parse({**SMALL, "gpus": [{"type": "RTX 4090", "price_per_hour": 2.0, **mine}]}).gpus[0].resolve()
    assert {figure.origin for figure in found.figures().values()} == {"given"}
    assert found.sheet.memory_bytes == 96e9


def run(*words: str) -> Any:
    return CliRunner().invoke(cli, ["plan", *words])


def test_the_command_prints_json_and_writes_the_page(tmp_path: pathlib.Path) -> None:
    path, html = tmp_path / "plan.yaml", tmp_path / "plan.html"
    path.write_text(yaml.safe_dump({**SMALL, "simulate": {"requests": 0}}))
    ran = run(str(path), "--json", "--html", str(html))
    assert ran.exit_code == 0, ran.output
    assert json.loads(ran.stdout)["chosen"]["num_gpus"] > 0
    assert html.read_text().startswith("<!doctype html>")
    assert [one.name for one in tmp_path.iterdir() if one.name.startswith(".")] == []


def test_a_plan_that_does_not_hold_in_simulation_is_shown_and_fails(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.planning.settle.MOST_ROUNDS", 1)
    monkeypatch.setattr("cluster.planning.check.Simulated.holds", lambda self, target: False)
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump({**SMALL, "serve": "aggregated", "simulate": {"requests": 40}}))
    ran = run(str(path), "--json")
    assert ran.exit_code == 1
    assert "the SLO did not hold in simulation after 1 rounds" in str(ran.exception)
    assert json.loads(ran.stdout)["chosen"]["holds_in_simulation"] is False


def test_the_tables_name_what_was_chosen_and_what_is_not_known(small: Plan) -> None:
    shown = StringIO()
    show.show(small, Console(file=shown, width=200))
    for title in ("Memory of one GPU", "Ways to serve", "Roofline", "What if", "Stands on", "Does not know"):
        assert title in shown.getvalue()
    assert f"{small.option.num_gpus} GPUs" in shown.getvalue()
    assert "h200's figures are measured, ± 10%" in shown.getvalue()


def test_a_name_with_brackets_is_no_markup(small: Plan) -> None:
    """A folder's name ended the command after half a minute of planning."""
    shown = StringIO()
    named = replace(small, model=replace(small.model, name="mine[/v2]"), assumptions=["shape of mine[/v2]"])
    show.show(named, Console(file=shown, width=200))
    assert shown.getvalue().count("mine[/v2]") == 2


def test_the_example_is_what_a_plan_takes() -> None:
    wanted = asked.load(EXAMPLE)
    assert shapes.known(wanted.model) is not None
    assert all(one.resolve().is_measured for one in wanted.gpus)


def test_the_sample_of_a_trace_has_the_means_of_the_trace() -> None:
    """400 rows of which 128 stand for all: a random 128 were 15 % off, and pools too small by as much."""
    found = of(asked.TrafficAsked(trace=SAMPLE_TRACE), max_context_tokens=32_768, num_rows=0, seed=0)
    rows = traces.read(SAMPLE_TRACE)
    assert found.input_tokens == pytest.approx(sum(row.input_tokens for row in rows) / len(rows))
    assert found.output_tokens == pytest.approx(sum(row.output_tokens for row in rows) / len(rows))


def test_made_traffic_that_is_replayed_has_the_means_that_were_asked_for() -> None:
    wanted = asked.TrafficAsked(
        requests_per_second=8.0,
        input_tokens=asked.TokensAsked(mean=1000, cv=1.0),
        output_tokens=asked.TokensAsked(mean=200, cv=1.0),
    )
    found = of(wanted, max_context_tokens=100_000, num_rows=400, seed=3)
    rows = found.replay(5.0, 200)
    assert sum(row.input_tokens for row in rows) / 200 == pytest.approx(1000, rel=0.002)
    assert sum(row.output_tokens for row in rows) / 200 == pytest.approx(200, rel=0.005)


def test_bursts_longer_than_a_gap_count() -> None:
    """Gaps that hardly vary within a busy and a quiet stretch: counts do."""
    rows, now = [], 0.0
    for number in range(512):
        now += 0.02 if number // 32 % 2 else 0.2
        rows.append(TraceRow(number, now, 100, 10))
    assert burstiness(rows) > 2 * gap_scv(rows)


@pytest.mark.parametrize("pools", [Pools(22, 3), Pools(955, 273), Pools(unified=400), Pools(7, 5)])
def test_a_part_of_the_pools_keeps_their_proportions_and_their_load(pools: Pools) -> None:
    small, rate, number = check.part(pools, 100.0, 1000, 2000, stay_seconds=400.0)
    for name in ("prefill", "decode", "unified"):
        if getattr(pools, name):
            per_worker = 100.0 / getattr(pools, name)
            assert 1.0 <= rate / getattr(small, name) / per_worker + 1e-9 <= 1.05
    assert 1000 <= number <= 4000
    assert check.part(pools, 100.0, 1000, 2000, stay_seconds=1.0)[0] == pools


def test_a_run_lasts_until_pools_are_full_or_says_that_it_did_not() -> None:
    """Sequences that stay 9 s: 8 requests a second are 70 at once; 60 requests would not show what that is like."""
    cost = CostModel(1e-3, 1e-6, 0.0, 0.04, 1e-4, 0.0, 1e-5, 1e11)
    worker = Worker(cost, 1e6, kv_bytes_per_token=1000.0)
    wanted = asked.TrafficAsked(
        requests_per_second=8.0,
        input_tokens=asked.TokensAsked(mean=64, cv=0.0),
        output_tokens=asked.TokensAsked(mean=200, cv=0.0),
    )
    traffic = of(wanted, max_context_tokens=1000, num_rows=700, seed=0)
    predicted = predict(Pools(1, 1), worker, worker, traffic.peak, Target(1.0, 0.1))
    assert not isinstance(predicted, Overload)
    for stay, settled in ((predicted.tpot_mean_seconds * 200, True), (1e4, False)):
        found = check.simulate(
            Pools(1, 1),
            worker,
            worker,
            traffic,
            8.0,
            Target(1.0, 0.1),
            num_requests=60,
            max_context_tokens=1000,
            stay_seconds=stay,
        )
        assert found.settled is settled
        if settled:
            assert found.tpot_seconds["p50"] == pytest.approx(predicted.tpot_seconds["p50"], rel=0.05)
