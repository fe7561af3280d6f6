"""A small model's words, written once for all tests of the edges."""

import pytest

from router.text.vocabulary import Text
from tests.unit.router.checkpoints import byte_level, write


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Text:
    return Text.load(write(tmp_path_factory.mktemp("tiny"), byte_level()))
