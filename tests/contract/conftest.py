"""Ranks that start sooner than a new interpreter, and every implementation of a KvLink that this host can try."""

from collections.abc import Iterator

import pytest

from tests.contract.links import MAKE, Implementation, why_not

ON_GPU = ("nccl", "nvlink")


@pytest.fixture(scope="module")
def forked_ranks() -> Iterator[None]:
    """The ranks of executors in this process are forked, and no new interpreters: two seconds less each."""
    from tests.forked import spawn_local
    from workers.ranks import build

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "spawn_local", spawn_local)
        yield


@pytest.fixture(params=[pytest.param(name, marks=[pytest.mark.gpu] if name in ON_GPU else []) for name in sorted(MAKE)])
def scheme(request: pytest.FixtureRequest) -> str:
    if reason := why_not(request.param):
        pytest.skip(reason)
    return str(request.param)


@pytest.fixture
def kind(scheme: str) -> Implementation:
    return MAKE[scheme]()
