"""The statistics that bench-sim computes itself."""

import pytest

from loadtests.bench_sim import chi2_p


@pytest.mark.parametrize(
    ("statistic", "degrees", "chance"),
    [(21.666, 9, 0.01), (8.343, 9, 0.5), (3.841, 1, 0.05), (0.0, 9, 1.0), (500.0, 9, 0.0)],
)
def test_chances_of_chi_squares_are_those_of_the_tables(statistic: float, degrees: int, chance: float) -> None:
    assert chi2_p(statistic, degrees) == pytest.approx(chance, abs=1e-4)
