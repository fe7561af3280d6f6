"""How much one step computes, as the cost model counts it, and what an engine learns of it."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from headrace.costmodel import CostModel, OnlineFit
from workers.scheduling.plan import StepPlan

WARM_UP_STEPS = 4
# A GPU replays steps with so few prompts as graphs, of the next larger number of tokens. Beyond the last an 8B model keeps
# it busy for longer than the launches take; and padding costs what tokens do.
GRAPH_TOKENS = (16, 32, 64, 128, 192, 256, 384, 512, 640, 768, 896, 1024, 1280)
GRAPH_PROMPTS = 8


class StepKind(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


@dataclass(slots=True)
class StepWork:
    """How much a plan computes. Contexts in tokens. Of a decode step, in `num_turns` such all rows have their turn. Nobody
    changes one; not frozen, as one is made for every step."""

    kind: StepKind
    num_sequences: int
    num_prefills: int
    prefill_tokens: int
    mean_prefill_context: float
    decode_context_tokens: int
    num_turns: int = 1

    @classmethod
    def of(cls, plan: StepPlan) -> "StepWork":
        num_decodes = plan.num_decodes
        prefills = plan.work[num_decodes:]
        contexts = sum([row.start for row in plan.work[:num_decodes]]) + num_decodes
        if not prefills:
            return cls(StepKind.DECODE, num_decodes, 0, 0, 0.0, contexts, plan.num_turns)
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

    def seconds(self, cost: CostModel, graph_tokens: Sequence[int] = ()) -> float:
        """What the step takes by this model, on a device with graphs of so many tokens."""
        num_decodes = self.num_sequences - self.num_prefills
        if self.kind is StepKind.DECODE:
            return cost.decode_step_seconds(num_decodes, self.decode_context_tokens)
        return cost.step_seconds(
            self.prefill_tokens,
            self.mean_prefill_context,
            num_decodes,
            self.decode_context_tokens,
            padding_tokens=self.padding_tokens(graph_tokens),
        )

    def padding_tokens(self, graph_tokens: Sequence[int]) -> int:
        """What a step with prompts is filled up with, to one of so many tokens."""
        num_tokens = self.prefill_tokens + self.num_sequences - self.num_prefills
        at = bisect_left(graph_tokens, num_tokens)
        return 0 if at == len(graph_tokens) or self.num_prefills > GRAPH_PROMPTS else graph_tokens[at] - num_tokens


class StepFit:
    """What a worker's steps and transfers cost, as measured so far. Owned by its engine."""

    def __init__(self, now: Callable[[], float] | None = None, graph_tokens: Sequence[int] = ()) -> None:
        """`now`: see OnlineFit. `graph_tokens`: numbers of tokens that the device has graphs of. Padding is work that a
        step did: left out, short prompts would teach slopes by which long ones are priced a tenth wrong."""
        self._fit = OnlineFit(now=now)
        self._graph_tokens = graph_tokens
        self._warm_up = dict.fromkeys(StepKind, WARM_UP_STEPS)

    @property
    def model(self) -> CostModel:
        return self._fit.model

    def add(self, work: StepWork, seconds: float) -> None:
        """Steps of one kind teach the fit; mixed ones cannot be told apart, and the first of a kind are warm-up. Of decode
        steps it learns what a token of every row takes: all their turns."""
        if self._warm_up[work.kind]:
            self._warm_up[work.kind] -= 1
            return
        match work.kind:
            case StepKind.PREFILL:
                tokens = work.prefill_tokens + work.padding_tokens(self._graph_tokens)
                self._fit.add_prefill(tokens, work.mean_prefill_context * work.prefill_tokens / tokens, seconds)
            case StepKind.DECODE:
                turns = work.num_turns
                self._fit.add_decode(turns * work.num_sequences, turns * work.decode_context_tokens, turns * seconds)
            case StepKind.MIXED:
                pass

    def add_transfer(self, num_bytes: int, seconds: float) -> None:
        self._fit.add_transfer(num_bytes, seconds)
