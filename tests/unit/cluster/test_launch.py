"""How `headrace up` leaves a Ray cluster."""

import contextlib
import threading
from collections.abc import Iterator

import pytest

from cluster import launch, ray_session
from cluster.launch import Head
from headrace.config_file import parse

CONFIG = parse("""
model: m
pools: {d: {role: decode}}
redis: {url: "redis://redis:6379/0"}
ray: {address: "head:6379"}
""")


@pytest.mark.parametrize(
    ("looks", "stops"),
    [([False, True, False, True], True), ([True, False, False], False), ([False, False], False)],
    ids=["lost looks", "it goes", "it is gone"],
)
async def test_a_controller_is_stopped_unless_its_head_is_silent_twice(
    monkeypatch: pytest.MonkeyPatch, looks: list[bool], stops: bool
) -> None:
    """One lost look, and the controller was left behind with all workers."""
    seen, answers, stopped = iter(looks), threading.Event(), []

    async def listens(address: str) -> bool:
        return _next(seen, answers)

    def stop(cluster: str, seconds: float) -> None:
        answers.wait(10)
        stopped.append(cluster)

    monkeypatch.setattr(launch, "_listens", listens)
    monkeypatch.setattr(launch, "HEAD_LOOK_SECONDS", 0.0)
    monkeypatch.setattr("cluster.threads.LAST_SECONDS", 0.0)
    monkeypatch.setattr(ray_session, "start_controller", lambda config, url: None)
    monkeypatch.setattr(ray_session, "stop_controller", stop)
    async with contextlib.AsyncExitStack() as ends:
        await launch._start_controller(CONFIG, Head("head:6379", 50.0), ends, lambda step: None)
    assert bool(stopped) == stops
    answers.set()


def _next(looks: Iterator[bool], answers: threading.Event) -> bool:
    """When all looks were taken it listens, and answers what it was asked."""
    for look in looks:
        return look
    answers.set()
    return True
