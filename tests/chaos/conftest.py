"""One stage for all tests that leave it as they found it; it is checked before and after each."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.chaos.stage import Stage, a_stage


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def whole_stage(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    async with a_stage(tmp_path_factory.mktemp("stage")) as stage:
        yield stage


@pytest_asyncio.fixture(loop_scope="session")
async def stage(whole_stage: Stage) -> AsyncIterator[Stage]:
    for name, member in tuple(whole_stage.workers.items()):
        if member.process.process.returncode is not None:
            await whole_stage.respawn(name)  # of a test that failed
    await whole_stage.until_ready()
    await whole_stage.settled()
    yield whole_stage
    await whole_stage.clear()
    await whole_stage.settled()
