"""What a GPU does, as rates: measured on one, or guessed from its data sheet. Every figure carries which.

Measured cards are those of cluster.simulation.cards, taken apart by the shape they were measured with (Llama-3.1-8B in
bfloat16), so that another model's times follow from its own bytes and operations:

    read_bytes_per_second   0.97 of the card's copy rate: with it, weights ÷ rate + 31 µs a layer gives the decode steps of
                            the 8B shape (4.62 ms), of 20 layers of the 70B shape (9.38 and, in another run, 9.85 ms) and of
                            two ranks of those (5.45 ms)
    layer_seconds           what is left of a decode step: launches, norms, latency; by layer, whatever its width
    attention_flops         the paged attention kernel's on a full device, by what a token × context takes
    launch_seconds          of attention of prompts in a layer: begin and end of its launch
    whole_*                 the same of a prompt that is alone in its step and whole: the dense kernel's
    matrix_flops            a prompt's linear layers ÷ the seconds a token; norms and the rest are in it
    attention_bytes_per_second  the decode attention kernel's

Data sheets: peak × the lower of what the two measured cards reach of theirs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from cluster.planning.shapes import KNOWN, Precision
from cluster.simulation import cards
from headrace.devicecost import DeviceCost
from headrace.errors import ConfigError

BASIS = KNOWN["meta-llama/Llama-3.1-8B"]
BASIS_PRECISION = Precision()
READ_OF_COPY = 0.972
MEASURED = ("h100", "h200")
# Half of the 70B shape's 20 layers, 41 sums: 5.33 ms − weights ÷ rate − layers (docs/benchmarks/parallel-half-h200.json).
# Alone a sum with its norm takes 5 µs at 16 KiB and 8 at 1 MiB (parallel-h200.json).
SUM_SECONDS = 8e-6

Origin = Literal["measured", "scaled", "data sheet", "given"]


@dataclass(frozen=True, slots=True)
class Figure:
    """A rate, where it is from, and how far off it may be (a fraction)."""

    value: float
    origin: Origin
    source: str
    uncertainty: float

    def as_json(self) -> dict[str, object]:
        return {
            "value": self.value,
            "origin": self.origin,
            "source": self.source,
            "uncertainty": self.uncertainty,
        }


@dataclass(frozen=True, slots=True)
class Sheet:
    """A data sheet: bytes of memory, dense bfloat16 operations, bytes of memory and of the link (one way) a second."""

    memory_bytes: float
    flops: float
    bytes_per_second: float
    link_bytes_per_second: float
    per_host: int = 8
    link: str = "NVLink"
    multiprocessors: int = 132  # the measured cards', where nobody says


SHEETS: dict[str, Sheet] = {
    "h100": Sheet(79 * 2**30, 989e12, 3.35e12, 450e9),
    "h200": Sheet(140 * 2**30, 989e12, 4.8e12, 450e9),
    "a100": Sheet(80e9, 312e12, 2.039e12, 300e9, multiprocessors=108),
    "l40s": Sheet(48e9, 362e12, 0.864e12, 32e9, link="PCIe 4", multiprocessors=142),
    "l4": Sheet(24e9, 121e12, 0.3e12, 32e9, link="PCIe 4", multiprocessors=58),
    "b200": Sheet(180e9, 2250e12, 8.0e12, 900e9, multiprocessors=148),
}


@dataclass(frozen=True, slots=True)
class GpuType:
    """One kind of GPU, priced an hour. `prefill_base_seconds` is of the basis shape, without launches of attention, and
    grows with the weights."""

    name: str
    price_per_hour: float
    sheet: Sheet
    matrix_flops: Figure
    attention_flops: Figure
    read_bytes_per_second: Figure
    attention_bytes_per_second: Figure
    link_bytes_per_second: Figure
    layer_seconds: Figure
    sequence_seconds: Figure
    prefill_base_seconds: Figure
    launch_seconds: Figure
    whole_attention_flops: Figure
    whole_launch_seconds: Figure
    transfer_base_seconds: float
    notes: tuple[str, ...] = field(default=())
    record: Mapping[str, float] = field(default_factory=dict)  # as of cluster.simulation.cards.Card

    @property
    def is_measured(self) -> bool:
        return self.matrix_flops.origin == "measured"

    @property
    def uncertainty(self) -> float:
        """Of times on this GPU, as a fraction: the largest of its figures'."""
        return max(self.matrix_flops.uncertainty, self.read_bytes_per_second.uncertainty)

    def figures(self) -> dict[str, Figure]:
        names = (
            "matrix_flops",
            "attention_flops",
            "read_bytes_per_second",
            "attention_bytes_per_second",
            "link_bytes_per_second",
            "layer_seconds",
            "sequence_seconds",
            "prefill_base_seconds",
            "launch_seconds",
            "whole_attention_flops",
            "whole_launch_seconds",
        )
        return {name: getattr(self, name) for name in names}


def measured(name: str, price_per_hour: float = 0.0) -> GpuType:
    """A card with measurements, taken apart."""
    card, sheet = cards.load(name), SHEETS[name]
    cost, source = card.cost, f"docs/benchmarks/engine-{name}.json"
    assert isinstance(cost, DeviceCost)
    kernels, launches = f"docs/benchmarks/kernels-{name}.json", cost.attention_launch_seconds

    def figure(value: float, source: str = source, uncertainty: float = 0.1) -> Figure:
        return Figure(value, "measured", source, uncertainty)

    read = READ_OF_COPY * card.figures["copy_gbps"] * 1e9
    left = cost.decode_base_seconds - BASIS.read_bytes(BASIS_PRECISION) / read
    return GpuType(
        name=name,
        price_per_hour=price_per_hour,
        sheet=sheet,
        matrix_flops=figure(BASIS.linear_flops_per_token / cost.prefill_token_seconds),
        attention_flops=figure(BASIS.attention_flops_per_token_context / cost.prefill_token_context_seconds, kernels),
        read_bytes_per_second=figure(read, f"{kernels} (copy), parallel-half-h200.json"),
        attention_bytes_per_second=figure(
            BASIS.kv_bytes_per_token(BASIS_PRECISION) / cost.decode_context_token_seconds, kernels
        ),
        link_bytes_per_second=figure(cost.transfer_bytes_per_second, "docs/benchmarks/kernels-h200-pull.json"),
        layer_seconds=figure(left / BASIS.num_layers),
        sequence_seconds=figure(cost.decode_sequence_seconds),
        prefill_base_seconds=figure(cost.prefill_base_seconds - launches),
        launch_seconds=figure(launches / BASIS.num_layers, kernels),
        whole_attention_flops=figure(
            BASIS.attention_flops_per_token_context / cost.whole.token_context_seconds, kernels
        ),
        whole_launch_seconds=figure(cost.whole.launch_seconds / BASIS.num_layers, kernels),
        transfer_base_seconds=cost.transfer_base_seconds,
        record=card.record,
    )


def from_sheet(name: str, sheet: Sheet, price_per_hour: float = 0.0, origin: Origin = "data sheet") -> GpuType:
    """Peaks, times what measured cards reach of theirs at least."""
    known = [measured(other) for other in MEASURED]

    def share(of_measured: str, of_sheet: str) -> float:
        return min(float(getattr(gpu, of_measured).value / getattr(gpu.sheet, of_sheet)) for gpu in known)

    where = "its data sheet" if origin == "data sheet" else "the plan's file"

    def figure(of_measured: str, of_sheet: str, uncertainty: float = 0.3) -> Figure:
        reached = share(of_measured, of_sheet)
        source = f"{where} × {reached:.2f}, the least that a measured card reaches"
        return Figure(getattr(sheet, of_sheet) * reached, origin, source, uncertainty)

    def copied(name: str) -> Figure:
        figures: list[Figure] = [gpu.figures()[name] for gpu in known]
        worst = max(figures, key=lambda figure: figure.value)
        return replace(worst, origin=origin, source=f"the slower measured card's: {worst.source}", uncertainty=0.5)

    slower = figure("matrix_flops", "flops")
    basis_sequence = max(gpu.sequence_seconds.value * gpu.matrix_flops.value for gpu in known)
    return GpuType(
        name=name,
        price_per_hour=price_per_hour,
        sheet=sheet,
        matrix_flops=slower,
        attention_flops=figure("attention_flops", "flops"),
        read_bytes_per_second=figure("read_bytes_per_second", "bytes_per_second"),
        attention_bytes_per_second=figure("attention_bytes_per_second", "bytes_per_second"),
        link_bytes_per_second=figure("link_bytes_per_second", "link_bytes_per_second", 0.4),
        layer_seconds=copied("layer_seconds"),
        sequence_seconds=replace(
            slower, value=basis_sequence / slower.value, source="as matrix_flops", uncertainty=0.5
        ),
        prefill_base_seconds=copied("prefill_base_seconds"),
        launch_seconds=copied("launch_seconds"),
        whole_attention_flops=figure("whole_attention_flops", "flops"),
        whole_launch_seconds=copied("whole_launch_seconds"),
        transfer_base_seconds=known[0].transfer_base_seconds,
        notes=(f"{name} was never measured with this engine: its figures are from {where}, and times may be 30 % off",),
    )


def find(name: str, price_per_hour: float, given: Sheet | None = None) -> GpuType:
    """A GPU by its name, or by figures given for it. ConfigError says which are known and what to give of others."""
    if given is not None:
        return from_sheet(name, given, price_per_hour, "given")
    if name in MEASURED:
        return measured(name, price_per_hour)
    if name in SHEETS:
        return from_sheet(name, SHEETS[name], price_per_hour)
    raise ConfigError(
        f"no figures for GPU {name!r}: measured are {', '.join(MEASURED)}; from data sheets "
        f"{', '.join(other for other in SHEETS if other not in MEASURED)}; of any other give memory_gb, tflops "
        "(dense bfloat16), memory_tb_per_second and link_gb_per_second (one way)",
        gpu=name,
    )
