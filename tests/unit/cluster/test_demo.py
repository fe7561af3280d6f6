from dataclasses import replace

import pytest

from cluster.commands.demo import EXPECTED, check
from cluster.talk import Answer, Path, timeline
from headrace.errors import InternalError

PATH = Path(0.0, 0.001, 0.4, 0.002, 0.7, "decode-0", "prefill-0", 2, 2**20, 0, 1)
FIRST = Answer(EXPECTED, "stop", 37, 8, 0, 0.5, 1.2, PATH)
SECOND = Answer("Its towers.", "stop", 60, 4, 32, 0.4, 0.7, PATH)


def test_the_demo_passes_on_the_right_answer_by_the_right_way() -> None:
    check([FIRST, SECOND])


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (replace(FIRST, text="The capital of France is Lyon."), SECOND, "must be 'The capital of France is Paris.'"),
        (replace(FIRST, path=replace(PATH, prefill_worker="")), SECOND, "prompt 1 was computed by decode-0 alone"),
        (FIRST, replace(SECOND, path=replace(PATH, prefill_worker="decode-0")), "prompt 2 was computed by decode-0"),
        (FIRST, replace(SECOND, cached_tokens=0), "nothing of the first one in the cache"),
    ],
)
def test_the_demo_fails_on_anything_else(first: Answer, second: Answer, message: str) -> None:
    with pytest.raises(InternalError, match=message):
        check([first, second])


def test_tpot_counts_the_tokens_after_the_first() -> None:
    assert FIRST.tpot_seconds == pytest.approx(0.1)
    assert replace(FIRST, completion_tokens=1).tpot_seconds == 0.0


def test_the_timeline_says_where_each_part_was() -> None:
    lines = dict(timeline(FIRST))
    assert "on prefill-0" in lines["prefill"]
    assert lines["hand-off"].startswith("2 blocks, 1.00 MiB moved")
    assert "TTFT 500.0 ms, TPOT 100.0 ms" in lines["client"]
    alone = dict(timeline(replace(FIRST, path=replace(PATH, prefill_worker=""))))
    assert "decode-0 (alone)" in alone["prefill"]
    assert "hand-off" not in alone
