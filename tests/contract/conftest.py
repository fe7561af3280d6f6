from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def forked_ranks() -> Iterator[None]:
    """The ranks of executors in this process are forked, and no new interpreters: two seconds less each."""
    from tests.forked import spawn_local
    from workers.ranks import build

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "spawn_local", spawn_local)
        yield
