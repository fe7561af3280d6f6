"""How much one step computes, as the cost model counts it, and what an engine learns of it."""

from dataclasses import dataclass
from enum import StrEnum

from headrace.costmodel import CostModel, OnlineFit
from workers.scheduling.plan import StepPlan

WARM_UP_STEPS = 4


class StepKind(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


@dataclass(slots=True)
class StepWork:
    """How much a plan computes. Contexts in tokens. Nobody changes one; not frozen, as one is made for every step."""

    kind: StepKind
    num_sequences: int
    num_prefills: int
    prefill_tokens: int
    mean_prefill_context: float
    decode_context_tokens: int

    @classmethod
    def of(cls, plan: StepPlan) -> "StepWork":
        num_decodes = plan.num_decodes
        prefills = plan.work[num_decodes:]
        contexts = sum([row.start for row in plan.work[:num_decodes]]) + num_decodes
        if not prefills:
            return cls(StepKind.DECODE, num_decodes, 0, 0, 0.0, contexts)
        tokens = sum([row.num_tokens for row in prefills])
        weighted = sum([row.num_tokens * (row.start + row.num_tokens / 2) for row in prefills])
        return cls(
            kind=StepKind.MIXED if num_decodes else StepKind.PREFILL,
            num_sequences=len(plan.work),
            num_prefills=len(prefills),
            prefill_tokens=tokens,
            mean_prefill_context=weighted / tokens if tokens else 0.0,
            decode_context_tokens=contexts,
        )

    def seconds(self, cost: CostModel) -> float:
        """What the step takes by this model. A mixed step reads the weights once: of the two bases it pays the larger."""
        num_decodes = self.num_sequences - self.num_prefills
        if self.kind is StepKind.DECODE:
            return cost.decode_step_seconds(num_decodes, self.decode_context_tokens)
        prefill = cost.prefill_token_seconds + cost.prefill_token_context_seconds * self.mean_prefill_context
        seconds = cost.prefill_base_seconds + prefill * self.prefill_tokens
        if num_decodes:
            decode = cost.decode_step_seconds(num_decodes, self.decode_context_tokens)
            seconds += decode - min(cost.decode_base_seconds, cost.prefill_base_seconds)
        return seconds


class StepFit:
    """What a worker's steps and transfers cost, as measured so far. Owned by its engine."""

    def __init__(self) -> None:
        self._fit = OnlineFit()
        self._warm_up = dict.fromkeys(StepKind, WARM_UP_STEPS)

    @property
    def model(self) -> CostModel:
        return self._fit.model

    def add(self, work: StepWork, seconds: float) -> None:
        """Steps of one kind teach the fit; mixed ones cannot be told apart, and the first of a kind are warm-up."""
        if self._warm_up[work.kind]:
            self._warm_up[work.kind] -= 1
            return
        match work.kind:
            case StepKind.PREFILL:
                self._fit.add_prefill(work.prefill_tokens, work.mean_prefill_context, seconds)
            case StepKind.DECODE:
                self._fit.add_decode(work.num_sequences, work.decode_context_tokens, seconds)
            case StepKind.MIXED:
                pass

    def add_transfer(self, num_bytes: int, seconds: float) -> None:
        self._fit.add_transfer(num_bytes, seconds)
