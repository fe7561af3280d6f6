"""Which settings of a link a sweep calls better."""

import pytest

pytestmark = pytest.mark.torch


def test_settings_are_better_where_their_worst_round_is_above_the_median_of_mains() -> None:
    sweep = pytest.importorskip("loadtests.link_sweep", reason="triton is not installed")
    main, more, fewer = sweep.CANDIDATES[:3]
    found = {
        sweep.name_of(main): {"128": [230.0, 240.0, 250.0]},
        sweep.name_of(more): {"128": [241.0, 270.0, 300.0]},
        sweep.name_of(fewer): {"128": [239.0, 290.0, 300.0]},
    }
    rows = sweep.rows_of("", found, sweep.CANDIDATES)
    assert [bool(row.note) for row in rows] == [False, True, False]
    assert [row.ratio for row in rows] == [1.0, 270 / 240, 290 / 240]
    del found[sweep.name_of(main)]
    assert sweep.rows_of("", found, sweep.CANDIDATES) == [], "nothing to be compared with"
