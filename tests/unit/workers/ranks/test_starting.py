"""workers.ranks.starting: who watches weights come."""

import io
import logging

import pytest

from workers.ranks.starting import weights_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_log_is_told_every_quarter_and_a_terminal_has_a_bar_that_goes(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), weights_progress(io.StringIO()) as progress:
        for done in range(1, 11):
            progress(done, 10)
    assert [record.args for record in caplog.records] == [(3, 10), (5, 10), (8, 10), (10, 10)]
    caplog.clear()
    screen = Terminal()
    with weights_progress(screen) as progress:
        progress(7, 10)
    assert "7/10" in screen.getvalue()
    assert screen.getvalue().endswith("\x1b[2K")
    assert not caplog.records
