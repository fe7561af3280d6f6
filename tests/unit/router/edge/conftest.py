"""A core that answers as it is told, and the HTTP edge over it."""

from collections.abc import AsyncIterator

import httpx
import pytest

from headrace.clock import ManualClock
from router.text.vocabulary import Text
from tests.unit.router.edge.edges import ANSWER, client_of
from tests.unit.router.scripted import Scripted


@pytest.fixture
def core(tiny: Text) -> Scripted:
    return Scripted(tiny, ANSWER)


@pytest.fixture
async def client(core: Scripted, clock: ManualClock) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(core, clock) as client:
        yield client
