"""What the notes of a decode worker (loadtests.noted_worker) say of its launches while sequences arrived. Pure.

launch_ms           a launch by the host, of steps behind another in which nothing arrives, p50; the note has those in which
                    something does, and how many of each were over just as the step before them was: they waited for it
held_ms             launched late: how long a step was held back, p50
lead_ms             … the time kept in hand, p50, of steps of the rows before; the note has that of others
waited_fraction     … of the steps, for how many the device waited
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from loadtests.hand_over_times import quantile
from loadtests.report import Row

AT_ITS_END = 1e-3


def launch_rows(decode: dict[str, Any], num_decodes: int) -> list[Row]:
    """Of steps of so many sequences and more from the first arrival to the last."""
    steps = sorted(decode["steps"])
    times = [at for what, _, at in decode["notes"] if what == "runnable"]
    first, last = min(times), max(times)
    pairs = [(before, step) for before, step in pairwise(steps) if first <= step[0] <= last and step[2] >= num_decodes]
    rows = [_launches(pairs)]
    paced = [each[1:] for each in decode["paced"] if first <= each[0] <= last]
    return rows + _held(paced, pairs) if paced else rows


def _launches(pairs: Sequence[tuple[Any, Any]]) -> Row:
    """A step: begin and end on the device, decodes, tokens, whether something arrives, begin and end of its launch."""
    parts, plain = [], [0.0]
    for name, arrives in (("nothing arrives", False), ("something does", True)):
        chosen = [(before, step) for before, step in pairs if bool(step[4]) is arrives]
        if not chosen:
            continue
        lasted = [(step[6] - step[5]) * 1e3 for _, step in chosen]
        plain = plain if arrives else lasted
        waited = sum(abs(step[6] - before[1]) < AT_ITS_END for before, step in chosen)
        parts.append(
            f"{name}: p50 {quantile(lasted, 0.5):.2f}, p99 {quantile(lasted, 0.99):.2f} ms, {waited} of {len(chosen)} over "
            f"within {AT_ITS_END * 1e3:g} ms of the end before"
        )
    return Row("launch_ms", quantile(plain, 0.5), "ms", "lower", note="; ".join(parts))


def _held(paced: Sequence[Any], pairs: Sequence[tuple[Any, Any]]) -> list[Row]:
    """Of each step what a Paced says, in the order of its fields."""
    held = [each[1] * 1e3 for each in paced]
    leads = {
        alike: [each[4] * 1e3 for each in paced if each[0] is alike and each[4] is not None] for alike in (True, False)
    }
    waits = [-each[5] * 1e3 for each in paced if each[5] < 0]
    gaps = [max(step[0] - before[1], 0.0) for before, step in pairs]
    lasted = sum(step[0] - before[0] for before, step in pairs) or 1.0
    return [
        Row("held_ms", quantile(held, 0.5), "ms", "higher", samples=held, note=f"p99 {quantile(held, 0.99):.2f} ms"),
        Row(
            "lead_ms",
            quantile(leads[True], 0.5),
            "ms",
            "lower",
            note=f"p99 {quantile(leads[True], 0.99):.2f} ms; of other rows than before: "
            f"p50 {quantile(leads[False], 0.5):.2f}, p99 {quantile(leads[False], 0.99):.2f} ms",
        ),
        Row(
            "waited_fraction",
            len(waits) / len(paced),
            "",
            "lower",
            note=f"of {len(paced)} steps; for p50 {quantile(waits, 0.5):.2f}, p99 {quantile(waits, 0.99):.2f} ms; by the "
            f"device's clock between steps {sum(gaps) / lasted:.4f} of its time",
        ),
    ]
