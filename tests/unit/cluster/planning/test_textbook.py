"""Arithmetic that textbooks and measurements have: shapes, memory, rates. Exact where they are."""

import json
import pathlib
from dataclasses import replace

import pytest

from cluster.planning import gpus
from cluster.planning.gpus import find
from cluster.planning.memory import Budget, budget, does_not_fit, feasible
from cluster.planning.shapes import KNOWN, ModelSpec, Precision, known, read
from cluster.planning.speed import cost_model, decode_roofline, prefill_roofline
from cluster.simulation.cards import LANDING_SECONDS, MESSAGE_SECONDS, PREFILL_STEP_TOKENS
from headrace.errors import CheckpointError, ConfigError
from headrace.values import ParallelLayout

BENCHMARKS = pathlib.Path(__file__).parents[4] / "docs" / "benchmarks"
HALF = Precision("float16", "float16")
LLAMA_2_7B = KNOWN["meta-llama/Llama-2-7b-hf"]
LLAMA_2_70B = KNOWN["meta-llama/Llama-2-70b-hf"]
LLAMA_8B = KNOWN["meta-llama/Llama-3.1-8B"]
LLAMA_70B = KNOWN["meta-llama/Llama-3.1-70B"]


def figure(file: str, name: str) -> float:
    rows = json.loads((BENCHMARKS / f"{file}.json").read_text(encoding="utf-8"))["rows"]
    return float(next(row["value"] for row in rows if row["name"] == name))


def samples(file: str, name: str) -> list[float]:
    rows = json.loads((BENCHMARKS / f"{file}.json").read_text(encoding="utf-8"))["rows"]
    return next(row["samples"] for row in rows if row["name"] == name)


def kv_gb(model: ModelSpec, tokens: int, precision: Precision = HALF) -> float:
    return tokens * model.kv_bytes_per_token(precision) / 1e9


@pytest.mark.parametrize(
    ("name", "num_params"),
    [
        ("meta-llama/Llama-2-7b-hf", 6_738_415_616),
        ("meta-llama/Llama-2-13b-hf", 13_015_864_320),
        ("meta-llama/Llama-2-70b-hf", 68_976_648_192),
        ("meta-llama/Llama-3.1-8B", 8_030_261_248),
        ("meta-llama/Llama-3.1-70B", 70_553_706_496),
        ("meta-llama/Llama-3.1-405B", 405_853_388_800),
        ("mistralai/Mistral-7B-v0.3", 7_248_023_552),
        ("Qwen/Qwen2.5-7B", 7_615_616_512),
        ("Qwen/Qwen2.5-32B", 32_763_876_352),
        ("Qwen/Qwen2.5-72B", 72_706_203_648),
        ("Qwen/Qwen3-8B", 8_190_735_360),
        ("Qwen/Qwen3-32B", 32_762_123_264),
    ],
)
def test_published_shapes_have_the_published_number_of_parameters(name: str, num_params: int) -> None:
    assert KNOWN[name].num_params == num_params


def test_kv_of_llama_2_at_4k() -> None:
    """7B (MHA) 2.15 GB; 70B (GQA) 1.34 GB, and 10.7 GB had it as many KV heads as heads; one KV head 0.17 GB."""
    assert kv_gb(LLAMA_2_7B, 4096) == pytest.approx(2.147483648)
    assert kv_gb(LLAMA_2_70B, 4096) == pytest.approx(1.34217728)
    assert kv_gb(replace(LLAMA_2_70B, num_kv_heads=64), 4096) == pytest.approx(10.73741824)
    assert kv_gb(replace(LLAMA_2_70B, num_kv_heads=1), 4096) == pytest.approx(0.16777216)
    shared = [replace(LLAMA_2_70B, num_kv_heads=heads).attention for heads in (64, 8, 1)]
    assert shared == ["MHA", "GQA 64:8", "MQA"]


@pytest.mark.parametrize(("kv", "gb"), [("float32", 2.68435456), ("bfloat16", 1.34217728), ("fp8", 0.67108864)])
def test_kv_by_precision(kv: str, gb: float) -> None:
    assert kv_gb(LLAMA_2_70B, 4096, Precision("float16", kv)) == pytest.approx(gb)


def test_weights_by_precision() -> None:
    """Quantised: the linear layers; embeddings, head and norms stay 16 bits."""
    assert LLAMA_2_7B.weight_bytes(HALF) == 2 * 6_738_415_616
    assert LLAMA_2_7B.weight_bytes(Precision("float32", "float32")) == 4 * 6_738_415_616
    linear = 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008)
    assert LLAMA_2_7B.weight_bytes(Precision("fp8", "bfloat16")) == linear + 2 * (6_738_415_616 - linear)
    assert LLAMA_2_7B.weight_bytes(Precision("int4", "bfloat16")) / 1e9 == pytest.approx(3.87, abs=0.01)


def test_70b_at_two_terabytes_a_second_makes_at_most_14_3_tokens() -> None:
    """70e9 parameters of 2 bytes, read once a step; the model that is called so has 68.98e9, and of these a step reads all
    but the input embeddings."""
    gpu = find("h100", 1.0)
    ideal = {"read_bytes_per_second": 2e12, "layer_seconds": 0.0, "sequence_seconds": 0.0}
    gpu = replace(gpu, **{name: replace(getattr(gpu, name), value=value) for name, value in ideal.items()})
    per_second = 1 / cost_model(LLAMA_2_70B, gpu, ParallelLayout(), HALF).decode_step_seconds(1, 0)
    assert per_second == pytest.approx(14.55, abs=0.01)
    assert per_second * LLAMA_2_70B.read_bytes(HALF) / (70e9 * 2) == pytest.approx(14.3, abs=0.02)


def test_a_config_json_is_read_as_the_model_itself(tmp_path: pathlib.Path) -> None:
    values = {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values))
    for given in (path, tmp_path):
        found = read(given)
        assert (found.num_params, found.attention) == (6_738_415_616, "MHA")
    path.write_text(json.dumps({**values, "model_type": "mixtral"}))
    with pytest.raises(CheckpointError, match="model_type"):
        read(path)


def test_tuned_variants_have_the_shape_of_what_they_were_tuned_from() -> None:
    assert known("meta-llama/Llama-3.1-8B-Instruct") is LLAMA_8B
    assert known("meta-llama/Llama-2-7b-chat-hf") is LLAMA_2_7B
    assert known("acme/secret") is None


@pytest.mark.parametrize("card", ["h100", "h200"])
@pytest.mark.parametrize("batch", [1, 32, 128, 256])
def test_decode_is_within_4_percent_of_the_engines_benchmark(card: str, batch: int) -> None:
    cost = cost_model(LLAMA_8B, find(card, 1.0), ParallelLayout(), Precision())
    assert batch / figure(f"engine-{card}", f"decode_b{batch}") == pytest.approx(
        cost.decode_step_seconds(batch, batch * (1024 + 64)), rel=0.04
    )


@pytest.mark.parametrize("card", ["h100", "h200"])
def test_prefill_is_within_5_percent_of_the_engines_benchmark(card: str) -> None:
    """Prompts of 4,096 were not fitted to: whole ones go through a dense kernel, and are computed a little faster."""
    cost = cost_model(LLAMA_8B, find(card, 1.0), ParallelLayout(), Precision())
    for length in (1024, 4096):
        seconds = cost.step_seconds(PREFILL_STEP_TOKENS, length / 2)
        assert PREFILL_STEP_TOKENS / seconds == pytest.approx(figure(f"engine-{card}", f"prefill_{length}"), rel=0.05)
    assert cost.step_seconds(1024, 512.0) * 1e3 == pytest.approx(figure(f"engine-{card}", "ttft_1024"), rel=0.02)


@pytest.mark.parametrize(
    ("tokens", "row", "within"), [(2048, "ttft_added_2k_ms", 0.13), (8192, "ttft_added_8k_ms", 0.04)]
)
def test_ttft_of_a_lone_hand_over_is_near_that_of_two_real_workers(tokens: int, row: str, within: float) -> None:
    """These figures were not fitted to: another run, of whole processes on two H200, with chunks of 2,048. A GPU that has
    rested clocks higher than one that computes prompts all the time, which is what the card was fitted to."""
    cost = cost_model(LLAMA_8B, find("h200", 1.0), ParallelLayout(), Precision())
    moved = cost.transfer_seconds(int(2048 * LLAMA_8B.kv_bytes_per_token(Precision())))
    chunks = sum(cost.step_seconds(2048, start + 1024.0) for start in range(0, tokens, 2048))
    seconds = chunks + moved + 4 * MESSAGE_SECONDS + LANDING_SECONDS
    found = sorted(samples("handoff-pair-h200", row))
    assert seconds * 1e3 == pytest.approx(found[len(found) // 2], rel=within)
    assert seconds * 1e3 > found[len(found) // 2]


def test_the_longest_step_of_prompts_and_decodes_is_within_5_percent() -> None:
    """64 streams of about 700 tokens beside prompts of 8,192 in chunks: p99 of their gaps is the fourth chunk's step."""
    rows = json.loads((BENCHMARKS / "handoff-pair-h200.json").read_text(encoding="utf-8"))["rows"]
    note = next(row["note"] for row in rows if row["name"] == "itl_p99_aggregated_over_alone")
    p99 = float(note.split()[1])
    cost = cost_model(LLAMA_8B, find("h200", 1.0), ParallelLayout(), Precision())
    chunk = 2048 - 64
    assert cost.step_seconds(chunk, 3.5 * chunk, 64, 64 * 700) * 1e3 == pytest.approx(p99, rel=0.05)


def test_messages_and_results_take_what_two_real_workers_took() -> None:
    told = figure("handoff-pair-h200", "handover_heard_ms") + figure("handoff-pair-h200", "handover_told_ms")
    landed = figure("handoff-pair-h200", "handover_landed_ms") + figure("handoff-pair-h200", "handover_announced_ms")
    assert told / 1e3 == pytest.approx(MESSAGE_SECONDS, rel=0.02)
    assert landed / 1e3 == pytest.approx(LANDING_SECONDS, rel=0.02)


@pytest.mark.parametrize(("tp", "batch"), [(1, 1), (2, 1), (1, 64), (2, 64)])
def test_another_shape_follows_from_its_bytes_within_9_percent(tp: int, batch: int) -> None:
    """20 layers of the 70B shape, on one H200 and on two, as docs/benchmarks/parallel-h200.json has them."""
    measured = figure("parallel-h200", f"tp1_tpot_b{batch}_ms")
    if tp == 2:
        measured /= figure("parallel-h200", f"tp2_speedup_b{batch}")
    cost = cost_model(replace(LLAMA_70B, num_layers=20), find("h200", 1.0), ParallelLayout(tp), Precision())
    assert cost.decode_step_seconds(batch, batch * 1088) * 1e3 == pytest.approx(measured, rel=0.09)


def test_figures_say_whether_they_were_measured() -> None:
    assert {one.origin for one in find("h200", 1.0).figures().values()} == {"measured"}
    guessed = find("a100", 1.0)
    assert {one.origin for one in guessed.figures().values()} == {"data sheet"}
    assert guessed.uncertainty >= 0.3 > find("h100", 1.0).uncertainty
    assert "never measured" in guessed.notes[0]


def test_measured_cards_reach_alike_of_their_sheets() -> None:
    """Two cards agree within 5 % on what of a sheet's rates the engine reaches: what the guess of others rests on."""
    h100, h200 = find("h100", 1.0), find("h200", 1.0)
    for rate, peak in (("matrix_flops", "flops"), ("read_bytes_per_second", "bytes_per_second")):
        reached = [getattr(gpu, rate).value / getattr(gpu.sheet, peak) for gpu in (h100, h200)]
        assert reached[0] == pytest.approx(reached[1], rel=0.05)


def test_a_gpu_without_figures_is_refused_with_what_to_give() -> None:
    with pytest.raises(ConfigError, match=r"no figures for GPU 'tpu9'.*memory_gb, tflops"):
        find("tpu9", 1.0)
    assert set(gpus.MEASURED) < set(gpus.SHEETS)


def test_memory_adds_up_and_holds_what_it_says() -> None:
    found = budget(LLAMA_70B, find("h200", 1.0), ParallelLayout(4), Precision(), context_tokens=8192)
    assert isinstance(found, Budget)
    used = found.rank_weight_bytes + found.rank_activation_bytes + found.rank_overhead_bytes + found.rank_kv_bytes
    assert used <= found.rank_memory_bytes < used + 32 * LLAMA_70B.kv_bytes_per_token(Precision())
    assert found.kv_bytes_per_token == LLAMA_70B.kv_bytes_per_token(Precision())
    assert found.kv_tokens * found.kv_bytes_per_token == pytest.approx(4 * found.rank_kv_bytes)
    assert found.max_sequences(8192) == found.kv_tokens // 8192


def test_kv_heads_that_ranks_share_count_as_often_as_they_are_held() -> None:
    model = replace(LLAMA_8B, num_kv_heads=2)
    doubled = budget(model, find("h200", 1.0), ParallelLayout(4), Precision(), context_tokens=64)
    assert isinstance(doubled, Budget)
    assert doubled.kv_bytes_per_token == 2 * model.kv_bytes_per_token(Precision())


def test_a_model_that_does_not_fit_says_by_how_much_and_what_would() -> None:
    model, gpu = KNOWN["meta-llama/Llama-3.1-405B"], find("h100", 1.0)
    fit, too_large = feasible(model, gpu, Precision(), context_tokens=8192)
    assert fit == []
    error = does_not_fit(model, gpu, Precision(), too_large, context_tokens=8192)
    missing = int(error.numbers["missing_bytes"])
    larger = replace(gpu, sheet=replace(gpu.sheet, memory_bytes=(gpu.sheet.memory_bytes + missing) * 1.03))
    assert feasible(model, larger, Precision(), context_tokens=8192)[0]
    assert "811.7 GB of weights" in error.message
    assert "weights in fp8" in error.message
    assert feasible(model, gpu, Precision("fp8", "bfloat16"), context_tokens=8192)[0]


def test_prefill_is_bound_by_arithmetic_and_decode_by_memory() -> None:
    gpu = find("h200", 1.0)
    cost = cost_model(LLAMA_8B, gpu, ParallelLayout(), Precision())
    prefill = prefill_roofline(LLAMA_8B, gpu, ParallelLayout(), Precision(), cost, 4096)
    decode = decode_roofline(LLAMA_8B, gpu, ParallelLayout(), Precision(), cost, 64, 1000)
    assert (prefill.bound, decode.bound) == ("compute", "memory")
    assert prefill.ridge == pytest.approx(989 / 4.8)
    assert 0.4 < prefill.reached < 0.9
    assert 0.6 < decode.reached < 0.95


def test_stages_add_memory_and_no_speed() -> None:
    gpu = find("h200", 1.0)
    flat, staged = (cost_model(LLAMA_70B, gpu, ParallelLayout(4, pp), Precision()) for pp in (1, 2))
    assert staged.decode_step_seconds(8, 8000) >= flat.decode_step_seconds(8, 8000)
    one, two = (budget(LLAMA_70B, gpu, ParallelLayout(4, pp), Precision(), context_tokens=8192) for pp in (1, 2))
    assert isinstance(one, Budget)
    assert isinstance(two, Budget)
    assert two.kv_tokens > 2 * one.kv_tokens
