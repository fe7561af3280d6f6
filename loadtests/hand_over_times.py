"""What the notes of two workers (loadtests.noted_worker) say about each hand-off. Pure."""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar


@dataclass(frozen=True, slots=True)
class HandOver:
    """Seconds. The parts follow each other and sum up to `runnable`: from the end of prefill's last kernel until decode's
    scheduler can run the sequence. `begun`: from there to the device's start of the first step that holds it."""

    landed: float
    announced: float
    heard: float
    asked: float
    begins: float
    pulled: float
    told: float
    runnable: float
    begun: float

    PARTS: ClassVar[tuple[str, ...]] = ("landed", "announced", "heard", "asked", "begins", "pulled", "told")


def hand_overs(prefill: dict[str, Any], decode: dict[str, Any]) -> dict[str, HandOver]:
    """By request id. Hand-offs must have followed each other."""
    sent, got = _by_what(prefill), _by_what(decode)
    ends = sorted(end for _, end, *_ in prefill["steps"])
    landed = _times(sent["step landed"])
    asked, begins, pulled = (_times(got[what]) for what in ("pull asked", "pull begins", "pull ends"))
    first_steps = sorted(begin for begin, *_, arrives in decode["steps"] if arrives)
    announced = dict(sent["announced"])
    heard = dict(got["heard"])
    found = {}
    for key, runnable in got["runnable"]:
        done = _last(ends, announced[key])
        moments = (
            done,
            _last(landed, announced[key]),
            announced[key],
            heard[key],
            _first(asked, heard[key]),
            _first(begins, heard[key]),
            _last(pulled, runnable),
            runnable,
        )
        parts = [after - before for before, after in pairwise(moments)]
        named = dict(zip(HandOver.PARTS, parts, strict=True))
        found[key] = HandOver(**named, runnable=runnable - done, begun=_first(first_steps, runnable) - done)
    return found


def step_seconds(worker: dict[str, Any], num_decodes: int) -> list[float]:
    """Of a worker's steps of so many sequences and more, one token each, that followed another at once: from its start
    to the next one's."""
    steps = sorted(worker["steps"])
    return [
        after[0] - step[0]
        for step, after in pairwise(steps)
        if step[2] >= num_decodes and step[2] == step[3] and after[2] >= num_decodes
    ]


def _by_what(worker: dict[str, Any]) -> dict[str, list[tuple[str, float]]]:
    by_what: defaultdict[str, list[tuple[str, float]]] = defaultdict(list)
    for what, key, at in worker["notes"]:
        by_what[what].append((key, at))
    return by_what


def _times(notes: Sequence[tuple[str, float]]) -> list[float]:
    return sorted(at for _, at in notes)


def _last(times: Sequence[float], until: float) -> float:
    return times[bisect_right(times, until) - 1]


def _first(times: Sequence[float], since: float) -> float:
    return times[bisect_left(times, since)]
