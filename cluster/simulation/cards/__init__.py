"""What one GPU does, as data: a file a card, with where its figures come from.

`python -m cluster.simulation.cards.measure` writes the files of measured cards anew, from docs/benchmarks. `fit` tells
apart there what benchmarks of an engine and of its kernels say together:

    decode steps at 1,024 to 1,152 tokens of context, 1 to 256 of them   base and slope a sequence, by least squares of
                                                                         relative errors
    the slope's part by context                                          KV bytes a token ÷ the attention kernel's bandwidth
    paged attention of prompts of 1k and 8k, and of 2k behind 14k        a token × context on a full device, and what all
                                                                         launches of a step take besides
    dense attention of whole prompts of 1k, 4k and 8k                    the same of a prompt that is alone and whole
    full steps of prompts of 1,024, without that attention               the rest of a token: products, norms
    a lone prompt of 1,024, without its dense attention                  base

Nothing is fitted to what whole workers do under traffic: that judges the fit (`cluster.planning.measured`).
"""

import json
import pathlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from headrace.costmodel import CostModel
from headrace.devicecost import AttentionGrid, DeviceCost, WholeAttention
from headrace.errors import ConfigError

FOLDER = pathlib.Path(__file__).parent
DECODE_BATCHES = (1, 32, 128, 256)
DECODE_CONTEXT_TOKENS = 1024 + 64
PREFILL_STEP_TOKENS = 16_384
KV_BYTES_PER_TOKEN = 2 * 32 * 8 * 128 * 2  # Llama-3.1-8B in bfloat16
ATTENTION_FLOPS = 4 * 32 * 32 * 128  # the same, of a token and one of its context
NUM_KV_HEADS, TILE_TOKENS = 8, 32  # the same: 128 rows of a tile, four query heads of a KV head
# (tokens, mean context) of what the kernels' rows time: whole prompts, and 2,048 tokens that end at 16,384.
PAGED = {
    "prefill_1k_paged_tflops": (1024, 512.5),
    "prefill_8k_paged_tflops": (8192, 4096.5),
    "prefill_2k_at_14k_tflops": (2048, 16_384 - 1023.5),
}
WHOLE = {"prefill_1k_tflops": (1024, 512.5), "prefill_4k_tflops": (4096, 2048.5), "prefill_8k_tflops": (8192, 4096.5)}
WHOLE_FROM_TOKENS = 512  # kernels.cuda

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
    return Card(**{**found, "cost": DeviceCost.from_json(found["cost"])})


def fit(figures: Mapping[str, float]) -> DeviceCost:
    """`figures` as the benchmarks name them: tok/s, TFLOP/s, GB/s, milliseconds; `attention_bytes_per_second` in bytes."""
    grid = AttentionGrid(int(figures["multiprocessors"]), NUM_KV_HEADS, TILE_TOKENS)
    steps = [(float(batch), batch / figures[f"decode_b{batch}"]) for batch in DECODE_BATCHES]
    base, slope = _line(steps)
    context = KV_BYTES_PER_TOKEN / figures["attention_bytes_per_second"]
    launches, token_context = _line([_paged(grid, *PAGED[name], figures[name]) for name in PAGED])
    whole = _line([(tokens * at, _seconds(tokens, at, figures[name])) for name, (tokens, at) in WHOLE.items()])
    tokens, short = PAGED["prefill_1k_paged_tflops"]
    attention = launches + token_context * PREFILL_STEP_TOKENS * short
    full = PREFILL_STEP_TOKENS / figures["prefill_1024"] - attention
    lone = (figures["ttft_1024"] - figures["handover_landed_ms"]) / 1e3
    lone -= _seconds(tokens, short, figures["prefill_1k_tflops"])
    # full = base + PREFILL_STEP_TOKENS · rest; lone = base + tokens · rest
    part = tokens / PREFILL_STEP_TOKENS
    prefill_base = max((lone - part * full) / (1 - part), 0.0)
    bandwidth = figures["pull_512mib_gbps"] * 1e9
    return DeviceCost(
        prefill_base_seconds=prefill_base + launches,
        prefill_token_seconds=(full - prefill_base) / PREFILL_STEP_TOKENS,
        prefill_token_context_seconds=token_context,
        decode_base_seconds=base,
        decode_sequence_seconds=max(slope - context * DECODE_CONTEXT_TOKENS, 0.0),
        decode_context_token_seconds=context,
        transfer_base_seconds=2**24 / (figures["pull_16mib_gbps"] * 1e9) - 2**24 / bandwidth,
        transfer_bytes_per_second=bandwidth,
        grid=grid,
        attention_launch_seconds=launches,
        whole=WholeAttention(WHOLE_FROM_TOKENS, *whole),
    )


def _paged(grid: AttentionGrid, num_tokens: int, mean_context: float, tflops: float) -> tuple[float, float]:
    """(tokens × context that a full device had done meanwhile, seconds). Of a whole prompt the programs are of all lengths,
    the longest first, and fill the last wave; of a chunk deep in one they are alike."""
    whole = mean_context * 2 < num_tokens + 2
    tokens = num_tokens if whole else grid.attended(num_tokens, num_tokens)
    return tokens * mean_context, _seconds(num_tokens, mean_context, tflops)


def _seconds(num_tokens: int, mean_context: float, tflops: float) -> float:
    return num_tokens * mean_context * ATTENTION_FLOPS / (tflops * 1e12)


def _line(points: list[tuple[float, float]]) -> tuple[float, float]:
    """(a, b) of y = a + b·x that minimise Σ ((a + b·x) / y − 1)²."""
    s0 = sum(1 / y**2 for _, y in points)
    s1 = sum(x / y**2 for x, y in points)
    s2 = sum((x / y) ** 2 for x, y in points)
    t0, t1 = sum(1 / y for _, y in points), sum(x / y for x, y in points)
    determinant = s0 * s2 - s1 * s1
    return (t0 * s2 - t1 * s1) / determinant, (s0 * t1 - s1 * t0) / determinant
