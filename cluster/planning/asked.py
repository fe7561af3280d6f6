"""What a planner asks for: one YAML file, frozen and validated once. See examples/plan.yaml and docs/planning.md.

An unknown key or an impossible value raises ConfigError with the key, the value and what is allowed.
"""

import pathlib
from dataclasses import replace
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from cluster.planning.gpus import SHEETS, GpuType, Sheet, find
from cluster.planning.load import Target
from cluster.planning.shapes import Precision
from headrace.config_file import first_fault
from headrace.errors import ConfigError

FEWEST_REQUESTS = 40  # of a run that says anything


def _no_bool(value: Any) -> Any:
    """`yes` is no number, though Python counts with it; text is one where YAML takes 1e3 for text."""
    if isinstance(value, bool):
        raise ValueError("a number is needed")
    return value


Number = Annotated[float, BeforeValidator(_no_bool)]
Positive = Annotated[Number, Field(gt=0, strict=False)]
Price = Annotated[Number, Field(ge=0, le=1e6, strict=False)]
Weight = Annotated[Number, Field(ge=0, le=1e12, strict=False)]
Fraction = Annotated[Number, Field(ge=0, lt=1, strict=False)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class GpuAsked(_Section):
    """A GPU type. Its figures are for one that is not known, or to overrule its data sheet: together, or none; their ranges
    are those of any GPU there may soon be, in these units. `per_host` null: as its data sheet says, 8 of your own;
    `multiprocessors` alike, 132."""

    type: str = Field(pattern=r"^[\w.+-]([\w .+-]{0,38}[\w.+-])?$")
    price_per_hour: Price
    available: int | None = Field(default=None, ge=1, description="GPUs there are; null: as many as needed")
    memory_gb: Positive | None = Field(default=None, ge=1, le=10_000)
    tflops: Positive | None = Field(default=None, ge=1, le=1e6, description="dense, bfloat16")
    memory_tb_per_second: Positive | None = Field(default=None, ge=0.01, le=1000)
    link_gb_per_second: Positive | None = Field(
        default=None, ge=0.1, le=1e5, description="between two GPUs of a host, one way"
    )
    per_host: int | None = Field(default=None, ge=1, le=72)
    multiprocessors: int | None = Field(default=None, ge=1, le=10_000)

    @field_validator("type")
    @classmethod
    def _as_it_is_known(cls, name: str) -> str:
        return name.lower() if name.lower() in SHEETS else name

    def resolve(self) -> GpuType:
        figures = (self.memory_gb, self.tflops, self.memory_tb_per_second, self.link_gb_per_second)
        if any(figure is not None for figure in figures):
            if None in figures:
                raise ConfigError(
                    f"gpus: of {self.type} give all of memory_gb, tflops, memory_tb_per_second, link_gb_per_second, or none"
                )
            memory, flops, read, link = (float(figure or 0) for figure in figures)
            found = find(self.type, self.price_per_hour, Sheet(memory * 1e9, flops * 1e12, read * 1e12, link * 1e9))
        else:
            found = find(self.type, self.price_per_hour)
        sheet = found.sheet
        per_host, multiprocessors = self.per_host or sheet.per_host, self.multiprocessors or sheet.multiprocessors
        return replace(found, sheet=replace(sheet, per_host=per_host, multiprocessors=multiprocessors))


class TokensAsked(_Section):
    """A length: log-normal around its mean. `cv`: deviation over mean, 0 for one length."""

    mean: Annotated[Number, Field(ge=1, le=10_000_000, strict=False)]
    cv: Annotated[Number, Field(ge=0, le=10, strict=False)] = 1.0


class TrafficAsked(_Section):
    """A trace, or a rate and lengths. `requests_per_second`: the mean of a day; of a trace unless given, its own.

    `day`: what each hour's rate is to the others, in any unit; or `peak_to_mean`, the busiest hour over the mean (a curve
    is drawn through both). `burstiness`: variance over squared mean of the gaps between arrivals within an hour, 1 for
    Poisson; of a trace, its own. `hit_rate`: prompt tokens that are in a cache, of all; of a trace, what prefixes allow.
    """

    trace: pathlib.Path | None = None
    requests_per_second: Positive | None = None
    input_tokens: TokensAsked | None = None
    output_tokens: TokensAsked | None = None
    hit_rate: Fraction | None = None
    day: list[Weight] | None = Field(default=None, min_length=24, max_length=24)
    peak_to_mean: Annotated[Number, Field(ge=1, le=24, strict=False)] | None = None
    burstiness: Annotated[Number, Field(gt=0, le=1000, strict=False)] | None = None

    @model_validator(mode="after")
    def _one_of(self) -> "TrafficAsked":
        given = (self.requests_per_second, self.input_tokens, self.output_tokens)
        if self.trace is None and None in given:
            raise ValueError("give a trace, or requests_per_second, input_tokens and output_tokens")
        if self.trace is not None and (self.input_tokens or self.output_tokens or self.hit_rate is not None):
            raise ValueError("input_tokens, output_tokens and hit_rate are the trace's own where one is given")
        if self.day is not None and self.peak_to_mean is not None:
            raise ValueError("give day or peak_to_mean, not both")
        if self.day is not None and not sum(self.day):
            raise ValueError("a day needs an hour with traffic")
        return self


class SloAsked(_Section):
    """In seconds: a target beyond these bounds was meant in milliseconds."""

    ttft_seconds: Annotated[Positive, Field(le=600)]
    tpot_seconds: Annotated[Positive, Field(le=10)]
    attainment: Annotated[Number, Field(gt=0, lt=1, strict=False)] = 0.95

    @property
    def target(self) -> Target:
        return Target(self.ttft_seconds, self.tpot_seconds, self.attainment)


class HeadroomAsked(_Section):
    """`spare_workers` of each pool may be gone and the SLO still holds; `traffic`: sized for so many times the peak."""

    spare_workers: int = Field(default=1, ge=0, le=64)
    traffic: Annotated[Number, Field(ge=1, le=10, strict=False)] = 1.0


class BudgetAsked(_Section):
    gpus: int | None = Field(default=None, ge=1)
    per_month: Positive | None = None


class EngineAsked(_Section):
    """As in headrace.config."""

    max_num_seqs: int = Field(default=256, ge=1, le=4096)
    max_step_tokens: int = Field(default=8192, ge=1, le=2**20)
    max_context_tokens: int | None = Field(default=None, ge=1, description="null: what the traffic needs")


class ApiAsked(_Section):
    """What somebody else's API asks for a million tokens."""

    per_million_input: Price
    per_million_output: Price


class SimulateAsked(_Section):
    """`requests` of each run; 0: nothing is simulated, and the plan says so."""

    requests: int = Field(default=1500, ge=0, le=1_000_000)
    seed: int = 0

    @field_validator("requests")
    @classmethod
    def _enough(cls, number: int) -> int:
        if 0 < number < FEWEST_REQUESTS:
            raise ValueError(f"0, or at least {FEWEST_REQUESTS}: fewer show nothing, got {number}")
        return number


class PlanAsked(_Section):
    model: str
    precision: str = "bfloat16"
    kv_precision: str | None = Field(
        default=None, description="null: as the weights, bfloat16 where those are quantised"
    )
    gpus: list[GpuAsked] = Field(min_length=1)
    serve: Literal["any", "disaggregated", "aggregated"] = "any"
    traffic: TrafficAsked
    slo: SloAsked
    headroom: HeadroomAsked = HeadroomAsked()
    budget: BudgetAsked = BudgetAsked()
    engine: EngineAsked = EngineAsked()
    api: ApiAsked | None = None
    simulate: SimulateAsked = SimulateAsked()

    @model_validator(mode="after")
    def _each_type_once(self) -> "PlanAsked":
        names = [gpu.type for gpu in self.gpus]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(
                f"gpus: {twice} is named twice: a plan knows one price of each type, and one number of them"
            )
        return self

    @property
    def held(self) -> Precision:
        kv = self.kv_precision
        if kv is None:
            kv = self.precision if self.precision in ("float32", "bfloat16", "float16") else "bfloat16"
        return Precision(self.precision, kv)


def parse(raw: Any) -> PlanAsked:
    if not isinstance(raw, dict):
        raise ConfigError(f"a plan's file must hold keys and values, got {type(raw).__name__}")
    if "pools" in raw and "gpus" not in raw:
        raise ConfigError(
            "this is a cluster's file (pools): a plan's has gpus, traffic and slo, as examples/plan.yaml", key="pools"
        )
    try:
        return PlanAsked.model_validate(raw)
    except ValidationError as error:
        raise first_fault("", error, PlanAsked) from None


def load(path: pathlib.Path) -> PlanAsked:
    """The file; paths in it are relative to where it is."""
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    traffic = raw.get("traffic") if isinstance(raw, dict) else None
    if isinstance(traffic, dict) and isinstance(traffic.get("trace"), str):
        traffic["trace"] = path.parent / traffic["trace"]
    return parse(raw)
