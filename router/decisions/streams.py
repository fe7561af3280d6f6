"""What a prompt that is computed where others decode does to these: their steps are longer while it is computed. Pure.

A device reads its weights once a step, whatever is in it, so a chunk costs the streams beside it only what the step takes
longer (`CostModel.step_seconds`), and small chunks less for each token. A stream of L tokens that is held up by s seconds
has a TPOT longer by s ÷ L. How long others' answers become nobody knows; with lengths spread exponentially around a mean of
`life` (`ledger.Beside`), of those that run at any time a share of 1 − (1 + z)·e⁻ᶻ is short enough that s takes more than
what is left to their target, z = s ÷ (what is left of a step × life).
"""

from dataclasses import dataclass
from math import exp

from router.decisions.view import WorkerView

SLACK_RATIO = 0.95  # of a TPOT target that prompts beside may use up: what is predicted is a mean
MAX_SHARE_EXPONENT = 50.0


@dataclass(slots=True)
class Effect:
    """A prompt computed beside the streams of a worker. `tpot_seconds`: theirs and its own, with what was computed there in
    their time so far and with it; `compute_seconds`: until it is computed, with their tokens in the same steps;
    `added_seconds`: by how much each of them is held up; `num_missed`: how many of them are expected to miss their target
    for that."""

    tpot_seconds: float
    compute_seconds: float
    added_seconds: float
    num_missed: float


def tpot_beside(worker: WorkerView, tpot_seconds: float) -> float:
    """A decode step's time, and the share of what the worker computes of prompts meanwhile: as much as it did lately."""
    if not worker.beside.tokens:
        return tpot_seconds
    return tpot_seconds + worker.beside.tokens * worker.load.num_running * _token_seconds(worker)


def beside(worker: WorkerView, tpot_seconds: float, num_tokens: int, num_cached: int, target_seconds: float) -> Effect:
    """`num_tokens` computed behind `num_cached` on a worker with such steps (`tpot_beside`), whose streams are all owed the
    TPOT target of the one who asks: of others' nothing is known."""
    load, cost = worker.load, worker.cost
    chunk = _chunk_tokens(worker)
    num_full, rest = divmod(num_tokens, chunk)
    mean_context = num_cached + num_tokens / 2
    step = cost.decode_step_seconds(load.num_running, load.context_tokens)
    added = num_full * (cost.step_seconds(chunk, mean_context, load.num_running, load.context_tokens) - step)
    if rest:
        added += cost.step_seconds(rest, mean_context, load.num_running, load.context_tokens) - step
    compute = added + (num_full + bool(rest)) * step
    tpot = tpot_seconds + added / worker.beside.life
    if not load.num_running:
        return Effect(tpot, compute, added, 0.0)
    slack = (SLACK_RATIO * target_seconds - tpot_seconds) * worker.beside.life
    exponent = added / slack if slack > 0 else MAX_SHARE_EXPONENT
    share = 1 - (1 + exponent) * exp(-min(exponent, MAX_SHARE_EXPONENT))
    return Effect(tpot, compute, added, load.num_running * min(share, 1.0))


def _chunk_tokens(worker: WorkerView) -> int:
    """What a step of the worker has room for beside the streams."""
    return max(worker.max_step_tokens - worker.load.num_running, 1)


def _token_seconds(worker: WorkerView) -> float:
    """What a token of a prompt adds to a step there."""
    load, cost = worker.load, worker.cost
    chunk = min(_chunk_tokens(worker), 512)
    step = cost.step_seconds(chunk, chunk / 2, load.num_running, load.context_tokens)
    return (step - cost.decode_step_seconds(load.num_running, load.context_tokens)) / chunk
