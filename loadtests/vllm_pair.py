"""What vLLM did as a prefill and a decode server over NIXL, and as two aggregated ones, on the same cards: as the peers of
our own pair's rows. Pure: from the JSON lines that its bench printed, one a mode ("pd", "agg")."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from loadtests.report import Row

NAME = "vLLM P/D over NIXL"
LOADED_MUST, LOADED_AIM = 0.8, 0.7


def peers(lines: Iterable[dict[str, Any]]) -> dict[str, float]:
    """By the names of our rows; what a line lacks, or a mode that was not run, gives none."""
    by_mode = {line["mode"]: line for line in lines}
    pd, alone = by_mode.get("pd", {}), by_mode.get("agg", {})
    found: dict[str, float] = {}
    for label, length in (("2k", 2048), ("8k", 8192)):
        name = f"ttft_{length}_ms_p50"
        if name in pd and name in alone:
            found[f"ttft_added_{label}_ms"] = pd[name] - alone[name]
    if "ttft_loaded_8k_p50" in pd:
        found["ttft_8k_loaded_beside_ms"] = pd["ttft_loaded_8k_p50"]
    for row, line in (("beside", pd), ("aggregated", alone)):
        if "itl_beside_8k_p99" in line and "itl_alone_p99" in line:
            found[f"itl_p99_{row}_over_alone"] = line["itl_beside_8k_p99"] / line["itl_alone_p99"]
    return found


def beside(rows: Iterable[Row], peers: dict[str, float]) -> list[Row]:
    """The rows with vLLM's figures, where it has any; of the loaded TTFT the bounds are parts of its."""
    found = []
    for row in rows:
        if (peer := peers.get(row.name)) is not None:
            name = "two aggregated vLLM" if "aggregated" in row.name else NAME
            row = replace(row, peer=peer, peer_name=name, ratio=peer / row.value if row.value > 0 else None)
            if row.name == "ttft_8k_loaded_beside_ms":
                row = replace(row, must=LOADED_MUST * peer, aim=LOADED_AIM * peer)
        found.append(row)
    return found
