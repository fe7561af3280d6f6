"""Writes the files of measured cards from docs/benchmarks:  python -m cluster.simulation.cards.measure"""

import json
import pathlib
from collections.abc import Mapping

from cluster.simulation import cards
from cluster.simulation.cards import Card
from headrace.costmodel import CostModel

BENCHMARKS = pathlib.Path(__file__).resolve().parents[3] / "docs" / "benchmarks"
BLOCK_BYTES = 4 * 2**20
NUM_BLOCKS = {"h100": 13_000, "h200": 26_000}  # what 80 GB and 141 GB leave beside 16 GB of weights, with a margin


def measured(name: str, folder: pathlib.Path = BENCHMARKS) -> Card:
    """One GPU of this name with the Llama-3.1-8B shape in bfloat16, blocks of 32 tokens. The link was measured on H200: an
    H100 has the same NVLink."""
    engine, kernels = _rows(folder / f"engine-{name}.json"), _rows(folder / f"kernels-{name}.json")
    pull = _rows(folder / "kernels-h200-pull.json")
    wanted = ("prefill_1024", "prefill_4096", "ttft_1024", *(f"decode_b{batch}" for batch in cards.DECODE_BATCHES))
    figures = {
        **{row: engine[row] for row in wanted},
        "attention_bytes_per_second": kernels["decode_b128_1k_fraction"] * kernels["copy_gbps"] * 1e9,
        "pull_16mib_gbps": pull["pull_16mib_gbps"],
        "pull_512mib_gbps": pull["pull_512mib_gbps"],
    }
    source = (
        f"fitted from docs/benchmarks: engine-{name}.json (decode_b*, prefill_*, ttft_1024), kernels-{name}.json "
        "(bandwidth of decode attention), kernels-h200-pull.json (link); num_blocks: what its memory leaves beside "
        "16 GB of weights"
    )
    return Card(name, source, cost_of(figures), NUM_BLOCKS[name], BLOCK_BYTES, figures)


def cost_of(figures: Mapping[str, float]) -> CostModel:
    bandwidth = figures["pull_512mib_gbps"] * 1e9
    return cards.fit(
        figures,
        attention_bytes_per_second=figures["attention_bytes_per_second"],
        transfer=(2**24 / (figures["pull_16mib_gbps"] * 1e9) - 2**24 / bandwidth, bandwidth),
    )


def _rows(path: pathlib.Path) -> Mapping[str, float]:
    return {row["name"]: row["value"] for row in json.loads(path.read_text(encoding="utf-8"))["rows"]}


if __name__ == "__main__":
    for card in map(measured, NUM_BLOCKS):
        (cards.FOLDER / f"{card.name}.json").write_text(json.dumps(card.as_json(), indent=1) + "\n", encoding="utf-8")
