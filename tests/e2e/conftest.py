"""One Ray for all tests here that want its nodes."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster


@pytest.fixture(scope="package")
def ray_nodes() -> "Iterator[Cluster]":
    from tests.e2e.nodes import three_nodes  # loads Ray, which most tests here do without

    with three_nodes() as cluster:
        yield cluster


@pytest.fixture(scope="package")
def ray_address(ray_nodes: "Cluster") -> str:
    address: str = ray_nodes.address
    return address
