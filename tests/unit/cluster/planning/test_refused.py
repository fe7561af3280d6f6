"""What cannot be planned: a clear message with figures, a status that is not 0, and nothing written."""

import json
import pathlib
from dataclasses import replace
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from cluster.cli import cli
from cluster.planning import asked, caveats, plan_json
from cluster.planning.plan import Plan
from cluster.planning.settle import described
from headrace.errors import ConfigError, HeadraceError
from tests.unit.cluster.planning.small import SMALL, made, with_traffic

MINE: dict[str, Any] = {
    "type": "mine",
    "price_per_hour": 2.0,
    "memory_gb": 96,
    "tflops": 600,
    "memory_tb_per_second": 4.0,
    "link_gb_per_second": 300,
}
QUICK: dict[str, Any] = {"simulate": {"requests": 0}, "api": None}


def jsonl(step: float) -> str:
    rows = ({"timestamp": n * step, "input_length": 9, "output_length": 9, "hash_ids": []} for n in range(3))
    return "\n".join(map(json.dumps, rows))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "meta-llama/Llama-3.1-405B"}, r"811\.7 GB of weights.*need .* GB more.*What would: GPUs with"),
        (
            {"slo": {"ttft_seconds": 0.01, "tpot_seconds": 0.02}},
            r"no number of GPUs meets the SLO: on h200, .*tp8.*would need 0\.\d+ s",
        ),
        ({"slo": {"ttft_seconds": 0.5, "tpot_seconds": 0.001}}, r"no number of GPUs meets the SLO"),
        (
            {"budget": {"gpus": 1}},
            r"a budget of 1 GPUs is below the \d+ that are needed; the least that keeps the SLO is",
        ),
        ({"budget": {"per_month": 10.0}}, r"a budget of 10 a month is below the [\d,]+"),
        ({"gpus": [{"type": "h200", "price_per_hour": 3, "available": 1}]}, r"1 h200 are there, and \d+ are needed"),
        ({"gpus": [{"type": "tpu9", "price_per_hour": 1}]}, r"no figures for GPU 'tpu9'.*memory_gb"),
        ({"gpus": [{"type": "mine", "price_per_hour": 1, "tflops": 100}]}, r"of mine give all of memory_gb"),
        ({"gpus": []}, r"gpus: "),
        ({"gpus": [{"type": "h200", "price_per_hour": price} for price in (1, 3)]}, r"h200 is named twice"),
        (
            {"gpus": [{"type": "h200", "price_per_hour": float("inf")}]},
            r"price_per_hour: must be a finite number at least 0",
        ),
        (
            {"slo": {"ttft_seconds": float("inf"), "tpot_seconds": 0.02}},
            r"slo\.ttft_seconds: must be a finite number above 0",
        ),
        (with_traffic(requests_per_second=1e12), r"1\.5e\+12 requests/s need more than 65,536 workers"),
        (
            {"slo": {"ttft_seconds": 1000, "tpot_seconds": 20}},
            r"slo\.ttft_seconds: must be a number above 0 and at most 600, got 1000",
        ),
        ({"gpus": [{**MINE, "memory_gb": 80e9}]}, r"gpus\.0\.memory_gb: .* at most 10000"),
        ({"gpus": [{**MINE, "tflops": 1e300}]}, r"gpus\.0\.tflops: .* at most 1000000"),
        ({"gpus": [{"type": "h200", "price_per_hour": 1e300}]}, r"price_per_hour: .* at most 1000000"),
        ({"gpus": [{**MINE, "type": "[/b]"}]}, r"gpus\.0\.type: must be a text that matches"),
        ({"gpus": [{"type": name, "price_per_hour": 3} for name in ("H200", "h200")]}, r"h200 is named twice"),
        (with_traffic(requests_per_second=True), r"traffic\.requests_per_second: .*a number is needed"),
        (with_traffic(day=[1e308] * 24, peak_to_mean=None), r"traffic\.day\.0: .* less than or equal to"),
        ({"simulate": {"requests": 1}}, r"simulate\.requests: .*at least 40"),
        ({"precision": "fp3"}, r"precision: must be one of float32"),
        ({"engine": {"max_context_tokens": 200_000}}, r"max_context_tokens: must be at most the model's 131072"),
        (with_traffic(requests_per_second=0), r"traffic\.requests_per_second: must be greater than 0, got 0"),
        (with_traffic(input_tokens=None), r"give a trace, or requests_per_second"),
        (with_traffic(rate=3), r"traffic\.rate: unknown key; known here: burstiness, day, "),
        (with_traffic(day=[0.0] * 24, peak_to_mean=None), r"a day needs an hour with traffic"),
        (with_traffic(input_tokens={"mean": 500_000}), r"most requests of .* are longer"),
    ],
)
def test_what_cannot_be_planned_is_refused_with_figures(changes: dict[str, object], message: str) -> None:
    if changes.get("model"):
        changes = {**changes, "gpus": [{"type": "h100", "price_per_hour": 2}]}
    with pytest.raises(HeadraceError, match=message):
        made(**changes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "holds no requests"),
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,many,4\n",
            "line 2: ContextTokens must be a whole number, got 'many'",
        ),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,10,4\n", "at least 2 that fit"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,0,4\n", "at least 1, got 0"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "2023-11-16 18:15:46,10,4\n" * 3, "come at one time"),
    ],
)
def test_an_empty_or_malformed_trace_is_refused_with_its_line(tmp_path: pathlib.Path, text: str, message: str) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(text)
    with pytest.raises(ConfigError, match=message):
        made(traffic={"trace": trace})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (jsonl(1e-305), r"3 requests of trace\.jsonl come within 2e-308 s: are its timestamps in the unit"),
        (jsonl(1e305), r"come within 2e\+302 s"),
        ("[" * 100_000, r"line 1: maximum recursion depth exceeded"),
    ],
    ids=["tiny", "huge", "deep"],
)
def test_case_a_trace_of_no_unit_or_without_end_is_no_traceback(
    tmp_path: pathlib.Path, text: str, message: str
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(text)
    with pytest.raises(ConfigError, match=message):
        made(traffic={"trace": trace}, **QUICK)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("../nowhere", "is no file here"),
        ("llama", "known shapes are meta-llama/"),
        (".", "holds no config.json"),
        ("", "no file"),
    ],
)
def test_a_refused_plan_writes_nothing(tmp_path: pathlib.Path, model: str, message: str) -> None:
    path, html = tmp_path / "plan.yaml", tmp_path / "plan.html"
    path.write_text(yaml.safe_dump({**SMALL, "model": model}))
    ran = CliRunner().invoke(cli, ["plan", str(path), "--html", str(html)])
    assert ran.exit_code != 0
    assert message in str(ran.exception)
    assert not html.exists()


def test_case_the_least_of_a_budget_in_money_is_the_cheapest() -> None:
    """The way of the fewest GPUs was called the least, at a price that the cheapest one undercut."""
    gpus = [{"type": "h200", "price_per_hour": 3.5}, {"type": "h100", "price_per_hour": 2.0}]
    both = made(gpus=gpus, **with_traffic(requests_per_second=50), **QUICK)
    fewest = min(both.ways, key=lambda way: way.num_gpus)
    assert fewest.gpu.name != both.ways[0].gpu.name
    for budget, least in (({"per_month": 10.0}, both.ways[0]), ({"gpus": 1}, fewest)):
        with pytest.raises(ConfigError) as raised:
            made(gpus=gpus, budget=budget, **with_traffic(requests_per_second=50), **QUICK)
        assert raised.value.message.split("; ")[1] == f"the least that keeps the SLO is {described(least)}"


def test_case_hosts_with_fewer_gpus_are_taken_as_they_are_said() -> None:
    """`per_host` of a type that is known was passed over: layouts over eight GPUs of hosts that have two."""
    found = made(gpus=[{"type": "h100", "price_per_hour": 2.0, "per_host": 2}], **QUICK)
    assert max(one.decode_budget.layout.world_size for one in found.ways) == 2
    with pytest.raises(ConfigError, match=r"does not fit a host of 1 h100"):
        made(model="meta-llama/Llama-3.1-70B", gpus=[{"type": "h100", "price_per_hour": 2.0, "per_host": 1}], **QUICK)


def test_multiprocessors_are_those_of_a_sheet_or_as_they_are_said() -> None:
    def of(**gpu: object) -> int:
        return asked.GpuAsked.model_validate({"price_per_hour": 2.0, **gpu}).resolve().sheet.multiprocessors

    assert (of(type="l40s"), of(type="h200"), of(**MINE)) == (142, 132, 132)
    assert (of(type="h100", multiprocessors=114), of(**MINE, multiprocessors=80)) == (114, 80)
    with pytest.raises(ValueError, match="multiprocessors"):
        of(**MINE, multiprocessors=0)


def test_case_what_nobody_can_keep_is_measured_against_the_nearest_layout() -> None:
    """Where no request keeps it the first layout was named, and its TTFT, eight times that of the best, as the least."""
    with pytest.raises(ConfigError, match=r"tp8·pp1 .* they would need 0\.0\d+ s"):
        made(slo={"ttft_seconds": 0.001, "tpot_seconds": 0.02}, **QUICK)


@pytest.mark.parametrize("precision", [{"precision": "fp8"}, {"kv_precision": "fp8"}])
def test_case_no_clusters_file_is_offered_for_what_the_engine_does_not_serve(precision: dict[str, str]) -> None:
    """One with `dtype: bfloat16` and the KV of half as many bytes a token."""
    found = made(**precision, **QUICK)
    assert plan_json.cluster(found) is None
    assert any("arithmetic alone" in warning for warning in found.warnings)


def test_case_a_plan_that_holds_by_a_hair_or_grew_says_so() -> None:
    """95.1 ± 0.6 % of 1,500 requests counted as 95; rows by prediction alone asked for fewer GPUs than the plan has."""
    found = made(simulate={"requests": 150}, api=None)
    (last,) = found.chosen.rounds[-1:]
    near = replace(last, simulated=replace(last.simulated, attainment=0.951, deviation=0.006))
    more = replace(near, pools=replace(near.pools, prefill=7, decode=9, unified=0))

    def warned(*rounds: Any) -> str:
        chosen = replace(found.chosen, rounds=rounds, full=None)
        return "\n".join(caveats.warnings(found.asked, chosen, found.traffic, found.prediction))

    assert "95.1% ± 0.6% of" in warned(near)
    assert "and 95% are asked for: too near to tell" in warned(near)
    assert "simulation for 7 + 9" in warned(last, more)
    assert "too near" not in warned(last)
    assert "simulation for" not in warned(last)


def test_case_more_workers_with_a_longer_ttft_are_explained() -> None:
    """In the example 7 workers had a longer simulated TTFT p90 than 6, and nothing said that it was by chance."""
    found = made(simulate={"requests": 150}, api=None)
    (last,), full = found.chosen.rounds[-1:], found.chosen.full
    assert full is not None

    def warned(p90: float, off: float) -> str:
        more = replace(full, ttft_seconds={**full.ttft_seconds, "p90": p90}, ttft_p90_deviation=off)
        fewer = replace(last.simulated, ttft_seconds={**full.ttft_seconds, "p90": 0.184}, ttft_p90_deviation=off)
        rounds = (replace(last, simulated=fewer),)
        chosen = replace(found.chosen, rounds=rounds, full=more)
        return "\n".join(caveats.warnings(found.asked, chosen, found.traffic, found.prediction))

    assert (
        "TTFT p90 is 205 ± 12 ms with all workers and 184 ± 12 ms without the spare ones: no more apart than by chance"
        in warned(0.205, 0.012)
    )
    assert "more than chance makes of it" in warned(0.205, 0.002)
    assert "with all workers and" not in warned(0.183, 0.012)


def test_case_a_budget_is_kept_by_the_other_kind_where_one_outgrew_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cheaper one grew beyond the budget in simulation, and the plan was refused though the other one keeps it."""
    grown = made(serve="aggregated", **QUICK).chosen

    def settle(wanted: Any, option: Any, *rest: Any) -> Any:
        if option.kind == "aggregated":
            cheap = replace(option, gpu=replace(option.gpu, price_per_hour=0.1))
            return replace(grown, option=cheap.with_needed(replace(option.needed, unified=9), 0))
        return replace(grown, option=option)

    monkeypatch.setattr("cluster.planning.plan.settle", settle)
    found: Plan = made(budget={"gpus": 8}, **QUICK)
    assert found.option.kind == "disaggregated"
    monkeypatch.setattr("cluster.planning.plan.best", lambda ways, kind: ways[0] if kind == "aggregated" else None)
    with pytest.raises(ConfigError, match="9 that are needed, after simulation"):
        made(budget={"gpus": 8}, **QUICK)


def test_case_requests_that_do_not_fit_are_said_with_what_is_planned_for_in_their_place() -> None:
    """A plan for prompts of 100,000 tokens was one for 57,000: a quarter was dropped, and the plan said 100,000."""
    long = with_traffic(input_tokens={"mean": 100_000}, requests_per_second=1.0)
    found = made(**long, slo={"ttft_seconds": 60.0, "tpot_seconds": 0.05}, simulate={"requests": 0})
    tokens = round(found.traffic.input_tokens)
    assert tokens < 80_000
    assert found.traffic.about.startswith(f"made: {tokens} tokens in")
    (said,) = (warning for warning in found.warnings if "would be refused" in warning)
    assert f"{found.traffic.num_too_long} of {128 + found.traffic.num_too_long} requests (" in said
    assert f"those that fit are of {tokens} + " in said


def test_case_a_run_with_a_handful_of_bursts_is_no_proof() -> None:
    """With scv 1000 all requests of a run came at three times, one of them before it counted: whether it held was luck."""

    def said(burstiness: float, requests: int) -> list[str]:
        found = made(**with_traffic(burstiness=burstiness), simulate={"requests": requests})
        return [warning for warning in found.warnings if warning.startswith("burstiness")]

    assert said(3.0, 150) == []
    (few,) = said(50.0, 150)
    assert few.endswith("too few to tell: raise simulate.requests to 2,000")
    (unseen,) = said(50.0, 0)
    assert "nothing was simulated" in unseen
    assert said(2.0, 0) == []


def test_a_clusters_file_is_named_as_one() -> None:
    with pytest.raises(ConfigError, match=r"cluster's file.*examples/plan\.yaml"):
        asked.parse({"model": "a", "pools": {}})
