"""Ways to serve: a GPU type, aggregated or disaggregated, a layout a pool; each with the pools that prediction asks for."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from cluster.planning.gpus import GpuType
from cluster.planning.load import Load, Pools, Target, Worker
from cluster.planning.memory import Budget
from cluster.planning.prediction import Overload, Prediction
from cluster.planning.shapes import ModelSpec, Precision
from cluster.planning.sizing import Idle, Sized, Unreachable, size
from cluster.planning.speed import cost_model
from cluster.planning.stages import predict
from headrace.values import ParallelLayout

Kind = Literal["disaggregated", "aggregated"]
HOURS_PER_MONTH = 730.0


@dataclass(frozen=True, slots=True)
class Option:
    """`needed` keeps the SLO at the peak; `pools` is `needed` with its spare workers. `decode` is also the worker of
    unified pools; `reason` says what one worker less would do."""

    kind: Kind
    gpu: GpuType
    prefill_budget: Budget
    decode_budget: Budget
    prefill: Worker
    decode: Worker
    needed: Pools
    pools: Pools
    reason: str

    @property
    def num_gpus(self) -> int:
        return self.gpus_of(self.pools)

    def gpus_of(self, pools: Pools) -> int:
        on_decode = self.decode_budget.layout.world_size
        return pools.prefill * self.prefill_budget.layout.world_size + (pools.decode + pools.unified) * on_decode

    @property
    def per_hour(self) -> float:
        return self.num_gpus * self.gpu.price_per_hour

    @property
    def per_month(self) -> float:
        return self.per_hour * HOURS_PER_MONTH

    @property
    def layouts(self) -> str:
        prefill, decode = self.prefill_budget.layout, self.decode_budget.layout
        return str(decode) if self.kind == "aggregated" else f"{prefill} → {decode}"

    def with_needed(self, needed: Pools, spare: int) -> "Option":
        return replace(self, needed=needed, pools=with_spare(needed, spare))

    def predict(self, pools: Pools, load: Load, target: Target) -> Prediction | Overload:
        return predict(pools, self.prefill, self.decode, load, target)

    def size(self, load: Load, target: Target) -> Sized | Idle | Unreachable:
        return size(self.prefill, self.decode, load, target, unified=self.kind == "aggregated")


def with_spare(needed: Pools, spare: int) -> Pools:
    return Pools(*(number + spare if number else 0 for number in (needed.prefill, needed.decode, needed.unified)))


def worker_of(
    model: ModelSpec,
    gpu: GpuType,
    budget: Budget,
    precision: Precision,
    *,
    num_links: int,
    max_num_seqs: int,
    max_step_tokens: int,
) -> Worker:
    return Worker(
        cost_model(model, gpu, budget.layout, precision, num_links=num_links),
        budget.kv_tokens,
        max_num_seqs,
        max_step_tokens,
        budget.kv_bytes_per_token,
    )


def worth_comparing(budgets: Sequence[Budget]) -> list[Budget]:
    """Stages add memory and no speed: they are looked at where no layout without them fits."""
    flat = [budget for budget in budgets if budget.layout.pp == 1]
    return flat or list(budgets)


def options(
    model: ModelSpec,
    gpu: GpuType,
    budgets: Sequence[Budget],
    precision: Precision,
    load: Load,
    target: Target,
    *,
    spare: int,
    max_num_seqs: int,
    max_step_tokens: int,
) -> tuple[list[Option], list[Unreachable]]:
    """Every pair of layouts, and every layout as unified workers; the cheapest first. And why others keep no SLO."""
    found: list[Option] = []
    unreachable: list[Unreachable] = []
    budgets = worth_comparing(budgets)

    def made(budget: Budget, other: Budget) -> Worker:
        links = _links(budget.layout, other.layout)
        # engine.kv_bytes of a cluster's file is one for all pools: what the smaller worker holds.
        budget = replace(budget, kv_tokens=int(min(budget.kv_bytes, other.kv_bytes) / budget.kv_bytes_per_token))
        return worker_of(
            model,
            gpu,
            budget,
            precision,
            num_links=links,
            max_num_seqs=max_num_seqs,
            max_step_tokens=max_step_tokens,
        )

    pairs: list[tuple[Kind, Budget, Budget]] = [("aggregated", budget, budget) for budget in budgets]
    pairs += [("disaggregated", prefill, decode) for prefill in budgets for decode in budgets]
    for kind, on_prefill, on_decode in pairs:
        prefill, decode = made(on_prefill, on_decode), made(on_decode, on_prefill)
        sized = size(prefill, decode, load, target, unified=kind == "aggregated")
        if isinstance(sized, Sized):
            pools = with_spare(sized.pools, spare)
            found.append(Option(kind, gpu, on_prefill, on_decode, prefill, decode, sized.pools, pools, sized.reason))
        elif isinstance(sized, Unreachable):
            where = f"on {gpu.name}, {kind}, {on_prefill.layout} and {on_decode.layout}, "
            layouts = f"{on_prefill.layout} → {on_decode.layout}" if kind == "disaggregated" else on_decode.layout
            way = f"{kind} on {gpu.name}, {layouts}"
            unreachable.append(replace(sized, reason=where + sized.reason, way=way))
    found.sort(key=lambda option: (option.per_hour, option.num_gpus, option.pools.num_workers))
    return found, unreachable


def _links(one: ParallelLayout, other: ParallelLayout) -> int:
    """Every rank reads its part over a link of its own."""
    return min(one.world_size, other.world_size)
