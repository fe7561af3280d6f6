"""How late a look wakes."""

import ctypes
import threading

from workers.kv.links import looks

PR_GET_TIMERSLACK = 30


def test_a_thread_that_looks_is_woken_in_time_and_no_other() -> None:
    libc, slack = ctypes.CDLL(None), list[int]()

    def look() -> None:
        slack.append(libc.prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0))
        looks.wake_in_time()
        slack.append(libc.prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert slack == [libc.prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0), looks.SLACK_NANOSECONDS]
