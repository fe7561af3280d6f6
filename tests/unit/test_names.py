"""Our top-level names are our own: no other installed distribution may provide them (one called `kernels` exists)."""

from importlib import metadata

import pytest

NAMES = ("cluster", "workers", "router", "kernels", "loadtests", "headrace")


@pytest.mark.parametrize("name", NAMES)
def test_no_other_distribution_owns_a_top_level_name(name: str) -> None:
    owners = set(metadata.packages_distributions().get(name, [])) - {"headrace"}
    assert not owners, f"{name} is also provided by {owners}: uninstall it, its modules shadow ours"
