"""What one GPU does, as data: a file a card, with where its figures come from.

`python -m cluster.simulation.cards.measure` writes the files of measured cards anew, from docs/benchmarks. `fit` tells
apart there what an engine's benchmark says together:

    decode steps at 1,024 to 1,152 tokens of context, 1 to 256 of them   base and slope a sequence, by least squares of
                                                                         relative errors
    the slope's part by context                                          KV bytes a token ÷ the attention kernel's bandwidth
    prefill of 8,192 tokens a step, prompts of 1,024 and of 4,096        a token and a token × context
    TTFT of one prompt of 1,024                                          base
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
PREFILL_STEP_TOKENS = 8192
KV_BYTES_PER_TOKEN = 2 * 32 * 8 * 128 * 2  # Llama-3.1-8B in bfloat16


@dataclass(frozen=True, slots=True)
class Card:
    """One worker of one GPU. `source` says where the cost comes from, and what of it is a guess; `figures` are those that
    were measured, as they were then."""

    name: str
    source: str
    cost: CostModel
    num_blocks: int
    block_bytes: int
    figures: Mapping[str, float] = field(default_factory=dict)

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


def fit(rows: Mapping[str, float], *, attention_bytes_per_second: float, transfer: tuple[float, float]) -> CostModel:
    """`rows`: the benchmark's figures by name (tok/s; ttft_1024 in ms). `transfer`: (base seconds, bytes per second)."""
    steps = [(batch, batch / rows[f"decode_b{batch}"]) for batch in DECODE_BATCHES]
    base, slope = _line(steps)
    context = KV_BYTES_PER_TOKEN / attention_bytes_per_second
    # Seconds a token of a full step, at a mean context of 512 and of 2,048; and of a lone prompt of 1,024.
    short, long = 1 / rows["prefill_1024"], 1 / rows["prefill_4096"]
    token_context = max((long - short) / (2048 - 512), 0.0)
    lone = rows["ttft_1024"] / 1e3
    # lone = base + 1024 · (token + 512 · token_context); short = base / 8192 + token + 512 · token_context
    prefill_base = max((lone - 1024 * short) / (1 - 1024 / PREFILL_STEP_TOKENS), 0.0)
    return CostModel(
        prefill_base_seconds=prefill_base,
        prefill_token_seconds=short - prefill_base / PREFILL_STEP_TOKENS - 512 * token_context,
        prefill_token_context_seconds=token_context,
        decode_base_seconds=base,
        decode_sequence_seconds=max(slope - context * DECODE_CONTEXT_TOKENS, 0.0),
        decode_context_token_seconds=context,
        transfer_base_seconds=transfer[0],
        transfer_bytes_per_second=transfer[1],
    )


def _line(points: list[tuple[int, float]]) -> tuple[float, float]:
    """(a, b) of y = a + b·x that minimise Σ ((a + b·x) / y − 1)²."""
    s0 = sum(1 / y**2 for _, y in points)
    s1 = sum(x / y**2 for x, y in points)
    s2 = sum((x / y) ** 2 for x, y in points)
    t0, t1 = sum(1 / y for _, y in points), sum(x / y for x, y in points)
    determinant = s0 * s2 - s1 * s1
    return (t0 * s2 - t1 * s1) / determinant, (s0 * t1 - s1 * t0) / determinant
