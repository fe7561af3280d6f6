"""Sleeps of microseconds between looks, which the kernel otherwise makes longer by 50."""

import ctypes
import threading

PR_SET_TIMERSLACK = 29
SLACK_NANOSECONDS = 1000

_slack = threading.local()


def wake_in_time() -> None:
    """From here on the calling thread sleeps as long as it asks to, give or take what waking costs. Where the kernel knows
    no such setting it stays as it is."""
    if getattr(_slack, "set", False):
        return
    _slack.set = True
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(PR_SET_TIMERSLACK, ctypes.c_ulong(SLACK_NANOSECONDS), *(ctypes.c_ulong(0),) * 3)
