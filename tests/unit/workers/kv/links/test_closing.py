"""Closing: once, with the first reason, and with everything let go."""

import threading

import pytest

from headrace.errors import LinkClosed
from workers.kv.links.closing import Closing, abandonable


def test_the_first_reason_stays_and_everything_is_let_go_once() -> None:
    closing, gone = Closing(), list[str]()
    closing.on_close(lambda: gone.append("first"))
    forget = closing.on_close(lambda: gone.append("taken back"))
    closing.on_close(lambda: gone.append("second"))
    forget()
    assert not closing.closed
    closing.close("the peer is gone")
    closing.close("another reason")
    assert closing.closed
    assert gone == ["first", "second"]
    assert str(closing.error()) == "link closed: the peer is gone"


def test_what_comes_after_the_close_is_let_go_at_once() -> None:
    closing, gone = Closing(), list[str]()
    closing.close("done")
    closing.on_close(lambda: gone.append("late"))()
    assert gone == ["late"]


def test_work_that_ends_is_returned_or_raised() -> None:
    assert abandonable(lambda: 7, Closing()) == 7
    with pytest.raises(ZeroDivisionError):
        abandonable(lambda: 1 // 0, Closing())


def test_work_that_does_not_end_is_left_alone_when_closed() -> None:
    closing, started, go_on = Closing(), threading.Event(), threading.Event()

    def work() -> None:
        started.set()
        go_on.wait()

    def close() -> None:
        started.wait()
        closing.close("nobody waits")

    threading.Thread(target=close).start()
    with pytest.raises(LinkClosed, match="nobody waits"):
        abandonable(work, closing)
    go_on.set()
