"""Step times of a device whose kernels are known: what planning and virtual workers hold a GPU for.

A worker's own fit is linear (headrace.costmodel). A device is not: attention of a chunk runs in waves of programs, and a
chunk that does not fill the last wave pays for it all the same. 768 tokens of eight KV heads are 192 programs, and take 132
multiprocessors as long as 1,024 do.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import pow
from typing import Any

from headrace.costmodel import CostModel

# Fitted to single steps of a prompt alone, held against others that streams decode beside: cluster.simulation.cards.steps
PARTS_SLOWER = 1.15
RIDGE = 8.0


@dataclass(frozen=True, slots=True)
class AttentionGrid:
    """How attention of prompts is laid over a device (kernels.paged_prefill): a program for each `tile_tokens` tokens of
    a chunk and each of a rank's KV heads, one on each multiprocessor at a time. Where a step, or the graph that it is
    padded to, has too few tokens for that, up to `most_parts` programs share a context (kernels.cuda), each `parts_slower`
    times as slow by a token of it."""

    multiprocessors: int
    num_heads: int
    tile_tokens: int
    most_parts: int = 16
    parts_slower: float = PARTS_SLOWER

    def __post_init__(self) -> None:
        for name in ("multiprocessors", "num_heads", "tile_tokens", "most_parts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    def parts(self, step_tokens: int) -> int:
        programs = -(-step_tokens // self.tile_tokens) * self.num_heads
        return max(1, min(self.most_parts, self.multiprocessors // max(programs, 1)))

    def attended(self, num_tokens: int, step_tokens: int) -> float:
        """For how many tokens a full device would have had the time that attention of `num_tokens` takes, in a step of
        `step_tokens` with all that is padding or decodes."""
        parts = self.parts(step_tokens)
        programs = -(-num_tokens // self.tile_tokens) * self.num_heads * parts
        waves = -(-programs // self.multiprocessors)
        full = waves * self.multiprocessors * self.tile_tokens / self.num_heads / parts
        return full * (self.parts_slower if parts > 1 else 1.0)


@dataclass(frozen=True, slots=True)
class WholeAttention:
    """Attention of a prompt that is alone in its step and whole, from so many tokens on: a kernel of its own. Seconds of
    all launches, and of a token and one of its context."""

    least_tokens: int
    launch_seconds: float
    token_context_seconds: float


@dataclass(frozen=True, slots=True)
class DeviceCost(CostModel):
    """`prefill_token_context_seconds` is of a device that is full. Of `prefill_base_seconds` the launches of attention take
    `attention_launch_seconds`, whether the rest of the step is bound by weights or not. Near the corner of the roofline
    some products are bound by the one side and some by the other: reading and computing add up as powers of `ridge`. Never
    on the wire: workers report what they learned."""

    grid: AttentionGrid = field(kw_only=True)
    attention_launch_seconds: float = field(kw_only=True)
    whole: WholeAttention = field(kw_only=True)
    ridge: float = field(default=RIDGE, kw_only=True)

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> "DeviceCost":
        grid, whole = AttentionGrid(**found["grid"]), WholeAttention(**found["whole"])
        return cls(**{**found, "grid": grid, "whole": whole})

    def step_seconds(
        self,
        prefill_tokens: int,
        mean_context: float,
        num_sequences: int = 0,
        context_tokens: int = 0,
        *,
        padding_tokens: int = 0,
    ) -> float:
        tokens = prefill_tokens + padding_tokens
        read = self.decode_base_seconds + self.decode_sequence_seconds * num_sequences
        row = max(self.prefill_token_seconds, self.decode_sequence_seconds)
        base = self.prefill_base_seconds - self.attention_launch_seconds
        computed = base + self.prefill_token_seconds * tokens + row * num_sequences
        longer = max(read, computed)
        products = longer * pow(1 + pow(min(read, computed) / longer, self.ridge), 1 / self.ridge) if longer else 0.0
        if not num_sequences and mean_context * 2 == prefill_tokens >= self.whole.least_tokens:
            attention = self.whole.token_context_seconds * prefill_tokens * mean_context
            return products + self.whole.launch_seconds + attention
        attended = self.grid.attended(prefill_tokens, tokens + num_sequences)
        attention = self.prefill_token_context_seconds * attended * mean_context
        decodes = self.decode_context_token_seconds * context_tokens
        return products + self.attention_launch_seconds + attention + decodes
