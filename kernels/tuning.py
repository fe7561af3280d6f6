"""Tile sizes per card, kept as data in tuned/<card>.json: measured by `make bench-kernels`, never guessed at run time."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch

TUNED = Path(__file__).parent / "tuned"


@dataclass(frozen=True, slots=True)
class DecodeTile:
    tokens: int
    programs_per_multiprocessor: int
    least_tiles: int  # fewest tiles worth a program of their own
    merged: int  # partial results that a merge reads at a time
    num_warps: int
    num_stages: int  # one more than tiles on their way
    early: bool = False  # begins under the end of the kernel before it


@dataclass(frozen=True, slots=True)
class LongDecode:
    """What a few rows take instead where one of them is long: of up to `most_units` units of row and KV head, where a
    context has `least_context` tokens."""

    most_units: int
    least_context: int
    tile: DecodeTile


@dataclass(frozen=True, slots=True)
class PrefillTile:
    rows: int
    tokens: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class LinearTile:
    columns: int
    depth: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class RowTile:
    elements: int
    num_warps: int


@dataclass(frozen=True, slots=True)
class RopeTile:
    heads: int
    num_warps: int


@dataclass(frozen=True, slots=True)
class PullTile:
    num_programs: int
    words: int
    num_warps: int


@dataclass(frozen=True, slots=True)
class ReduceTile:
    num_programs: int
    elements: int
    num_warps: int


@dataclass(frozen=True, slots=True)
class Tuning:
    decode: DecodeTile
    decode_few: DecodeTile  # where most units are shared among many multiprocessors
    decode_long: LongDecode | None  # None: the same as where all are short
    decode_many: DecodeTile  # where there are rows enough for every multiprocessor
    prefill: PrefillTile
    norm: RowTile
    rope: RopeTile
    silu: RowTile
    sample: RowTile
    sample_floor: RowTile
    pull: PullTile
    reduce: ReduceTile
    fixed_linear: LinearTile
    fixed_attention: PrefillTile

    @classmethod
    def read(cls, path: Path) -> "Tuning":
        tiles = json.loads(path.read_text())
        long = tiles["decode_long"]
        return cls(
            DecodeTile(**tiles["decode"]),
            DecodeTile(**tiles["decode_few"]),
            None if long is None else LongDecode(**long | {"tile": DecodeTile(**long["tile"])}),
            DecodeTile(**tiles["decode_many"]),
            PrefillTile(**tiles["prefill"]),
            RowTile(**tiles["norm"]),
            RopeTile(**tiles["rope"]),
            RowTile(**tiles["silu"]),
            RowTile(**tiles["sample"]),
            RowTile(**tiles["sample_floor"]),
            PullTile(**tiles["pull"]),
            ReduceTile(**tiles["reduce"]),
            LinearTile(**tiles["fixed_linear"]),
            PrefillTile(**tiles["fixed_attention"]),
        )


def card(device: torch.device) -> str:
    """The short name of a device's model, as files are named by it: "h100", "h200", "cpu"."""
    if device.type != "cuda":
        return device.type
    words = torch.cuda.get_device_name(device).lower().replace("-", " ").split()
    return next((word for word in words if any(c.isdigit() for c in word)), words[-1])


def tuning_of(device: torch.device) -> Tuning:
    """The card's own, or those of the card nearest in kind that was measured."""
    path = TUNED / f"{card(device)}.json"
    return Tuning.read(path if path.exists() else TUNED / "h100.json")
