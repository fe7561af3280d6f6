"""What one GPU does, as data: a file a card, with where its figures come from.

`python -m cluster.simulation.cards.measure` writes the files of measured cards anew, from docs/benchmarks. `fit` tells
apart there what benchmarks of an engine and of its kernels say together:

    decode steps at 1,024 to 1,152 tokens of context, 1 to 256 of them   base and slope a sequence, by least squares of
                                                                         relative errors
    the slope's part by context                                          KV bytes a token ÷ the attention kernel's bandwidth
    paged attention of prompts of 1k and 8k, and of 2k behind 14k        a token × context, and the part of a token that
                                                                         short prompts pay because they do not fill it
    full steps of prompts of 1,024, without that attention               the rest of a token: products, norms
    a lone prompt of 1,024, without its dense attention                  base

Nothing is fitted to what whole workers do under traffic: that judges the fit (`cluster.planning.measured`).
"""

import json
import pathlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from headrace.costmodel import CostModel
from headrace.errors import ConfigError

FOLDER = pathlib.Path(__file__).parent
DECODE_BATCHES = (1, 32, 128, 256)
DECODE_CONTEXT_TOKENS = 1024 + 64
PREFILL_STEP_TOKENS = 16_384
KV_BYTES_PER_TOKEN = 2 * 32 * 8 * 128 * 2  # Llama-3.1-8B in bfloat16
ATTENTION_FLOPS = 4 * 32 * 32 * 128  # the same, of a token and one of its context
# Mean context of what the kernels' rows time: whole prompts, and 2,048 tokens that end at 16,384.
PAGED_CONTEXTS = {
    "prefill_1k_paged_tflops": 512.5,
    "prefill_8k_paged_tflops": 4096.5,
    "prefill_2k_at_14k_tflops": 16_384 - 1023.5,
}

# Of two whole workers, docs/benchmarks/handoff-pair-h200.json, medians beside a batch of 128: a message until it is heard
# and acted on (handover_heard_ms + handover_told_ms); a step's end on the device until what came of it is on the host and
# sent (handover_landed_ms + handover_announced_ms).
MESSAGE_SECONDS = 9.5e-4
LANDING_SECONDS = 6.5e-4


@dataclass(frozen=True, slots=True)
class Card:
    """One worker of one GPU. `source` says where the cost comes from, and what of it is a guess; `figures` are those that
    were measured, as they were then. `record`: how far off at most what was simulated of so many `runs` on such GPUs is, as
    a part of TTFT, TPOT (p50 and p90) and goodput; empty where no run was kept."""

    name: str
    source: str
    cost: CostModel
    num_blocks: int
    block_bytes: int
    figures: Mapping[str, float] = field(default_factory=dict)
    record: Mapping[str, float] = field(default_factory=dict)

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def load(name: str) -> Card:
    """The card of that name; ConfigError names those there are."""
    path = FOLDER / f"{name}.json"
    if name not in names():
        raise ConfigError(f"no card {name!r}: there are {', '.join(names())}")
    found = json.loads(path.read_text(encoding="utf-8"))
    return Card(**{**found, "cost": CostModel(**found["cost"])})


def fit(figures: Mapping[str, float]) -> CostModel:
    """`figures` as the benchmarks name them: tok/s, TFLOP/s, GB/s, milliseconds; `attention_bytes_per_second` in bytes."""
    steps = [(float(batch), batch / figures[f"decode_b{batch}"]) for batch in DECODE_BATCHES]
    base, slope = _line(steps)
    context = KV_BYTES_PER_TOKEN / figures["attention_bytes_per_second"]
    paged = {at: at * ATTENTION_FLOPS / (figures[name] * 1e12) for name, at in PAGED_CONTEXTS.items()}
    unfilled, token_context = _line(list(paged.items()))
    short = PAGED_CONTEXTS["prefill_1k_paged_tflops"]
    full = PREFILL_STEP_TOKENS * (1 / figures["prefill_1024"] - paged[short])
    dense = 1024 * short * ATTENTION_FLOPS / (figures["prefill_1k_tflops"] * 1e12)
    lone = (figures["ttft_1024"] - figures["handover_landed_ms"]) / 1e3 - dense
    # full = base + PREFILL_STEP_TOKENS · rest; lone = base + 1024 · rest
    part = 1024 / PREFILL_STEP_TOKENS
    prefill_base = max((lone - part * full) / (1 - part), 0.0)
    bandwidth = figures["pull_512mib_gbps"] * 1e9
    return CostModel(
        prefill_base_seconds=prefill_base,
        prefill_token_seconds=(full - prefill_base) / PREFILL_STEP_TOKENS + unfilled,
        prefill_token_context_seconds=token_context,
        decode_base_seconds=base,
        decode_sequence_seconds=max(slope - context * DECODE_CONTEXT_TOKENS, 0.0),
        decode_context_token_seconds=context,
        transfer_base_seconds=2**24 / (figures["pull_16mib_gbps"] * 1e9) - 2**24 / bandwidth,
        transfer_bytes_per_second=bandwidth,
    )


def _line(points: list[tuple[float, float]]) -> tuple[float, float]:
    """(a, b) of y = a + b·x that minimise Σ ((a + b·x) / y − 1)²."""
    s0 = sum(1 / y**2 for _, y in points)
    s1 = sum(x / y**2 for x, y in points)
    s2 = sum((x / y) ** 2 for x, y in points)
    t0, t1 = sum(1 / y for _, y in points), sum(x / y for x, y in points)
    determinant = s0 * s2 - s1 * s1
    return (t0 * s2 - t1 * s1) / determinant, (s0 * t1 - s1 * t0) / determinant
