"""Micro-batches: which sequences decode in the next plan, where several plans at once fill the stages of a pipeline.

A stage that computes what a row drew last waits until the last stage has drawn it. So the rows are dealt out over as many
plans as there are stages, each of which is in a stage of its own, and a row's turn comes again when the others' plans are
under way. Who waits longest is next, so that a row is passed over by no order of arrivals and endings.
"""

from collections.abc import Sequence as SequenceOf
from operator import attrgetter

from workers.scheduling.sequence import Sequence

SMALLEST_SHARE = 1024  # tokens of prompts: below, a stage's pass over its weights costs more than what is gained

_planned = attrgetter("planned")


def num_groups(num_micro_batches: int, num_sequences: int) -> int:
    """Over how many plans the rows of so many sequences are dealt out."""
    return max(1, min(num_micro_batches, num_sequences))


def prompt_share(num_tokens: int, num_micro_batches: int) -> int:
    """Of so many tokens of prompts that are left, how many the next plan computes: stages begin on them as the first has
    done its share, and the last of them holds the others up no longer than by a small one."""
    return max(SMALLEST_SHARE, -(-num_tokens // num_micro_batches))


def whose_turn(decoding: SequenceOf[Sequence], number: int, oldest: int, groups: int) -> list[Sequence]:
    """Of `decoding` those that plan `number` computes, a share in `groups`: none that is in one of the last groups - 1
    plans in flight, nor any of whose tokens two are not drawn yet. `oldest`: of the plans in flight, or `number` where
    none is."""
    since = max(number - groups, oldest - 1)
    ready = [seq for seq in decoding if seq.planned <= since and seq.num_scheduled <= seq.num_prompt + len(seq.outputs)]
    ready.sort(key=_planned)
    groups_waiting = groups - (number - 1 - since)
    return ready[: min(-(-len(decoding) // groups), -(-len(ready) // groups_waiting))]
