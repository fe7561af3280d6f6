"""How two ranks are joined: decided from their endpoints alone, so that both ends and an operator see the same."""

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.errors import IncompatiblePeer
from workers.kv.links.endpoint import Place, place_in, schemes_of

GLOO, NCCL, NIXL, NVLINK = "gloo", "nccl", "nixl", "nvlink"
AWAIT_STEPS = {NVLINK}  # their readers see for themselves when a step of the source is done


@dataclass(frozen=True, slots=True)
class Choice:
    """How one rank reads from another, and why."""

    scheme: str
    reason: str

    @property
    def awaits_steps(self) -> bool:
        return self.scheme in AWAIT_STEPS


def choose(ours: str, theirs: str) -> Choice:
    """The first of the schemes that their endpoint names which ours names too and which reaches from one to the other.
    IncompatiblePeer, with the reason, where nothing joins them."""
    here, there = place_in(ours), place_in(theirs)
    for scheme in schemes_of(theirs):
        if scheme in schemes_of(ours) and (scheme != NVLINK or here.shares_machine(there)):
            return Choice(scheme, _reason(scheme, here, there))
    raise IncompatiblePeer(
        f"no link joins the ranks: one offers {' and '.join(schemes_of(ours))} on machine {here.machine or 'unknown'}, "
        f"the other {' and '.join(schemes_of(theirs))} on machine {there.machine or 'unknown'}",
        field="endpoints",
    )


def all_await_steps(ours: Sequence[str], theirs: Sequence[str]) -> bool:
    """Whether whichever rank of one worker reads from whichever of the other sees its steps end: the ranks of a worker may
    be in several machines."""
    return all(choose(one, other).awaits_steps for one in ours for other in theirs)


def _reason(scheme: str, here: Place, there: Place) -> str:
    match scheme:
        case "nvlink" if here.device == there.device:
            return "both ranks use one GPU"
        case "nvlink":
            return "the GPUs are in one machine"
        case "gloo":
            return "the pools are in host memory"
        case "nixl":
            return "both workers are asked for RDMA (handoff.rdma)"
        case "nccl":
            return "the GPUs are in two machines"
        case _:
            return ""
