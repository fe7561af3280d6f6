"""What one engine step does, as a value: made by the scheduler, carried out by every rank, answered by one result.

Rows. A rank keeps a fixed table of `max_num_seqs` rows, one a sequence: its prompt and output ids, sampling state,
last sampled token and block table live there, so that a plan says only what changed. A row begins with RowStart, works
in any number of plans, and ends when a plan names it in `ends`. The scheduler owns the numbering; ranks obey.

One step ahead. Plan k+1 may be made before the result of plan k is known: RowWork.token_ids is then None, which means
"the token this row sampled last". What a sequence that ended in step k computes in step k+1 is thrown away by the
scheduler, and its row and blocks are given up only in a plan after that. With several pipeline stages so many plans more
are in flight, of other rows.

Pure values; no torch.
"""

from dataclasses import dataclass
from typing import NamedTuple

from headrace.values import SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class RowStart:
    """A sequence takes a row. `output_ids` is not empty when it resumes or arrives from another worker: penalties and
    counters are rebuilt from it. `sample_index` and `sampling.seed` key the randomness, with the position."""

    row: int
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    sampling: SamplingParams
    sample_index: int = 0


class RowWork(NamedTuple):
    """Tokens that a row computes in this step, at positions start, start + 1, ….

    `new_blocks` are appended to the row's block table before the step computes. `num_samples` tokens are drawn from the
    logits of the last position: 0 for a chunk that is not the prompt's last, 1 ordinarily, n when a prompt is answered
    n times (sample i then uses sample_index i). With num_samples ≥ 1 sample 0 becomes the row's last sampled token.
    A tuple, not a dataclass: one is made for every row of every step, and crosses to every rank.
    """

    row: int
    start: int
    num_tokens: int
    token_ids: tuple[int, ...] | None
    new_blocks: tuple[int, ...] = ()
    num_samples: int = 1


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. Carried out in this order: ends, fresh, copies, starts, work; `work` holds decode rows first.

    fresh: (block, epoch) for every block that changed hands since the last plan: each rank sets the pool's epoch word
    before it writes the block. copies: (source, target) blocks, copied whole before anything computes (a partly filled
    prompt block shared by n samples). `num_decodes` of the leading rows in `work` compute exactly one token. In
    `num_turns` plans like this one every row that decodes has its turn.
    """

    number: int
    work: tuple[RowWork, ...]
    num_decodes: int
    starts: tuple[RowStart, ...] = ()
    ends: tuple[int, ...] = ()
    fresh: tuple[tuple[int, int], ...] = ()
    copies: tuple[tuple[int, int], ...] = ()
    num_turns: int = 1

    @property
    def num_tokens(self) -> int:
        return sum(work.num_tokens for work in self.work)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The tokens a plan drew: for each RowWork in order, its `num_samples` tokens in order, flattened.

    `logprobs` is empty when no row asked for any, else parallel to `token_ids` with None where not asked. `margins`:
    how far the best (for seeded rows: perturbed) logit was above the second, parallel to `token_ids`; empty unless the
    executor records margins. `seconds`: the step's own duration on its slowest rank. `ahead_seconds`: how long before the
    end of the plan before it this one had been launched, on the rank that was last; negative: the device waited for it.
    `launch_seconds`: how long the longest launch took, on a device that is not awaited.
    """

    number: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    margins: tuple[float, ...] = ()
    seconds: float = 0.0
    ahead_seconds: float = 0.0
    launch_seconds: float = 0.0
