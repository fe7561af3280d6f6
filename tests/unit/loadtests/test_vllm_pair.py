import pytest

from loadtests.report import Row
from loadtests.vllm_pair import beside, peers

PD = {
    "mode": "pd",
    "ttft_2048_ms_p50": 91.0,
    "ttft_8192_ms_p50": 293.0,
    "ttft_loaded_8k_p50": 333.0,
    "itl_alone_p99": 9.6,
    "itl_beside_8k_p99": 32.0,
}
AGGREGATED = {"mode": "agg", "ttft_2048_ms_p50": 58.0, "itl_alone_p99": 9.6, "itl_beside_8k_p99": 200.0}


def test_vllms_figures_stand_beside_ours() -> None:
    found = peers([PD, AGGREGATED])
    assert found == {
        "ttft_added_2k_ms": 33.0,
        "ttft_8k_loaded_beside_ms": 333.0,
        "itl_p99_beside_over_alone": pytest.approx(3.33, abs=0.01),
        "itl_p99_aggregated_over_alone": pytest.approx(20.8, abs=0.1),
    }
    ours = Row("ttft_8k_loaded_beside_ms", 235.0, "ms", "lower")
    (row,) = beside([ours], found)
    assert (row.peer, row.met) == (333.0, True)
    assert row.must == pytest.approx(0.8 * 333)
    assert beside([ours], {}) == [ours]
