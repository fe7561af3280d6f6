"""Writes the files of measured cards from docs/benchmarks:  python -m cluster.simulation.cards.measure"""

import json
import pathlib
from collections.abc import Mapping

from cluster.simulation import cards
from cluster.simulation.cards import Card

BENCHMARKS = pathlib.Path(__file__).resolve().parents[3] / "docs" / "benchmarks"
BLOCK_BYTES = 4 * 2**20
NUM_BLOCKS = {"h100": 13_000, "h200": 26_000}  # what 80 GB and 141 GB leave beside 16 GB of weights, with a margin
MULTIPROCESSORS = {"h100": 132, "h200": 132}


def measured(name: str, folder: pathlib.Path = BENCHMARKS) -> Card:
    """One GPU of this name with the Llama-3.1-8B shape in bfloat16, blocks of 32 tokens. The link and what a result takes
    to the host were measured on H200: an H100 has the same NVLink."""
    engine, kernels = _rows(folder / f"engine-{name}.json"), _rows(folder / f"kernels-{name}.json")
    pull, pair = _rows(folder / "kernels-h200-pull.json"), _rows(folder / "handoff-pair-h200.json")
    figures = {
        **{row: engine[row] for row in ("prefill_1024", "ttft_1024")},
        **{f"decode_b{batch}": engine[f"decode_b{batch}"] for batch in cards.DECODE_BATCHES},
        **{row: kernels[row] for row in ("copy_gbps", *cards.PAGED, *cards.WHOLE)},
        "attention_bytes_per_second": kernels["decode_b128_1k_fraction"] * kernels["copy_gbps"] * 1e9,
        **{row: pull[row] for row in ("pull_16mib_gbps", "pull_512mib_gbps")},
        "handover_landed_ms": pair["handover_landed_ms"],
        "multiprocessors": MULTIPROCESSORS[name],
    }
    source = (
        f"fitted from docs/benchmarks: engine-{name}.json (decode_b*, prefill_1024, ttft_1024), kernels-{name}.json "
        "(attention of prompts, bandwidth of decode attention), kernels-h200-pull.json (link), handoff-pair-h200.json "
        "(a result's way to the host); num_blocks: what its memory leaves beside 16 GB of weights"
    )
    record = _record(folder / f"plan-measured-{name}.json")
    return Card(name, source, cards.fit(figures), NUM_BLOCKS[name], BLOCK_BYTES, figures, record)


def _record(path: pathlib.Path) -> Mapping[str, float]:
    if not path.exists():
        return {}
    found = json.loads(path.read_text(encoding="utf-8"))
    return {"runs": found["runs"], **{name: abs(each["largest"]) for name, each in found["errors"].items()}}


def _rows(path: pathlib.Path) -> Mapping[str, float]:
    return {row["name"]: row["value"] for row in json.loads(path.read_text(encoding="utf-8"))["rows"]}


if __name__ == "__main__":
    for card in map(measured, NUM_BLOCKS):
        (cards.FOLDER / f"{card.name}.json").write_text(json.dumps(card.as_json(), indent=1) + "\n", encoding="utf-8")
