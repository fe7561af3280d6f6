"""A mailbox as it is, with outputs to put into it."""

from headrace.values import FinishReason, RequestKey, SequenceOutput
from router.mailbox import Mailbox, Pacer

KEY = RequestKey("r")


def output(number: int, finish: FinishReason | None = None) -> SequenceOutput:
    return SequenceOutput(KEY, 0, (number,), number, finish=finish)


def box(pacer: Pacer) -> Mailbox[list[SequenceOutput]]:
    """One whose request takes the outputs as they are."""
    return Mailbox(KEY, pacer, lambda outputs: outputs)
