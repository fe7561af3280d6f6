"""Epoch words of another process: seen as they change, read alone, kept beyond their owner."""

import os

import pytest

from workers.kv.shared_words import SharedWords, map_words

pytestmark = pytest.mark.torch


def test_what_the_owner_sets_its_readers_see() -> None:
    words = SharedWords(3)
    mine = map_words(words.export())
    assert list(mine) == [0, 0, 0, 0]
    words.tensor[1] = 2**40 + 7
    words.done[0] = 9
    assert list(mine) == [0, 2**40 + 7, 0, 9]


def test_a_reader_cannot_write_and_outlives_the_owner() -> None:
    words = SharedWords(2)
    words.tensor[0] = 5
    descriptor = words.export()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.write(descriptor, bytes(8))
    mine = map_words(descriptor)
    del words
    assert mine[0] == 5
    with pytest.raises(TypeError, match="read-only"):
        mine[0] = 6
