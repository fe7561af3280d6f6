"""The controller's actor, in this process: its own thread and loop, and pools that a test plays."""

import threading
from typing import Any

import pytest

from cluster.canary.control import Canary
from cluster.control_actor import ControlActor
from headrace.config import ClusterConfig, PoolConfig
from tests.unit.cluster.played_pools import Pools

pytestmark = pytest.mark.redis

CONFIG = ClusterConfig(name="begins", model="m", pools={"decode": PoolConfig(role="decode", replicas=2)})


class Drained(Pools):
    async def drain(self, worker_id: str, generation: int) -> None:
        self.note(f"{worker_id} drains")


class Slow(ControlActor):
    """Takes until `go_on` to begin."""

    def __init__(self, redis_url: str) -> None:
        self.go_on = threading.Event()
        super().__init__(CONFIG.model_dump_json(), redis_url, "")

    def _pools(self, canary: Canary) -> Any:
        self.go_on.wait()
        return Drained()


def test_a_stop_that_comes_while_it_begins_is_no_stop_of_nothing(redis_url: str) -> None:
    """It returned at once, and the controller went on to start workers."""
    actor = Slow(redis_url)
    stopping = threading.Thread(target=actor.stop, daemon=True)
    stopping.start()
    stopping.join(0.05)
    assert stopping.is_alive()
    actor.go_on.set()
    stopping.join(20)
    assert not stopping.is_alive()
    assert not actor._thread.is_alive()
    actor.stop()
