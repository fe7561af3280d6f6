import asyncio
import threading

import pytest

from cluster import threads
from cluster.threads import asking


async def test_it_answers_and_fails_as_the_work_does() -> None:
    assert await asking(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await asking(divmod, 7, 0)


@pytest.mark.parametrize("fails", [False, True])
async def test_who_is_cancelled_leaves_work_behind_that_never_answers(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    monkeypatch.setattr(threads, "LAST_SECONDS", 0.0)
    begun, answer = threading.Event(), threading.Event()
    worker: list[threading.Thread] = []

    def work() -> None:
        worker.append(threading.current_thread())
        begun.set()
        answer.wait()
        if fails:
            raise ConnectionError

    asked = asyncio.ensure_future(asking(work))
    await asyncio.to_thread(begun.wait)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    (thread,) = worker
    assert thread.is_alive()
    assert thread.daemon  # so that no process stays for it
    answer.set()
    await asyncio.to_thread(thread.join)
    await asyncio.sleep(0)  # what it said is heard, and nobody's


async def test_who_is_cancelled_waits_a_moment_for_what_is_nearly_done() -> None:
    begun, answer = threading.Event(), threading.Event()
    done: list[bool] = []

    def work() -> None:
        begun.set()
        answer.wait()
        done.append(True)

    asked = asyncio.ensure_future(asking(work))
    await asyncio.to_thread(begun.wait)
    asked.cancel()
    await asyncio.sleep(0)
    answer.set()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert done == [True]
