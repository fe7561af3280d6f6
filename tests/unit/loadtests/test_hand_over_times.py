"""From the notes of two workers to the parts of a hand-off."""

import pytest

from loadtests.hand_over_times import HandOver, hand_overs, step_seconds

PREFILL = {
    "steps": [[0.0, 1.0, 0, 64, False], [1.0, 2.0, 0, 64, False], [9.0, 9.5, 0, 64, False]],
    "notes": [["step landed", "", 1.1], ["step landed", "", 2.1], ["announced", "a", 2.3]],
}
DECODE = {
    "steps": [[2.0, 3.9, 4, 4, False], [4.0, 4.9, 4, 4, False], [5.0, 5.9, 5, 5, True], [6.0, 7.0, 5, 69, False]],
    "notes": [
        ["pull ends", "", 1.9],  # of the chunk before
        ["heard", "a", 2.6],
        ["pull ends", "", 3.4],
        ["runnable", "a", 3.5],
    ],
}


def test_tokens_and_blocks_come_side_by_side_from_the_last_kernels_end_until_it_can_run() -> None:
    found = hand_overs(PREFILL, DECODE)["a"]
    parts = {name: getattr(found, name) for name in HandOver.PARTS}
    assert parts == pytest.approx({"landed": 0.1, "announced": 0.2, "heard": 0.3, "pulled": 1.4, "told": 0.1})
    assert found.runnable == pytest.approx(found.pulled + found.told)
    assert found.begun == pytest.approx(3.0)  # the step that begins at 5.0


def test_a_step_lasts_until_the_next_begins_and_counts_only_when_it_decodes_alone() -> None:
    assert step_seconds(DECODE, 4) == pytest.approx([2.0, 1.0, 1.0])
