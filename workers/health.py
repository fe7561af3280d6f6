"""Whether a worker is well by its own word, and what gRPC's health service says of it. It does not depend on peers, on
routers or on Redis."""

import asyncio
import logging
from collections.abc import Sequence

from grpc_health.v1 import health, health_pb2

from workers.engine import Engine

log = logging.getLogger(__name__)

WATCH_SECONDS = 0.25


class Health:
    """Owns what ended the worker, whether it drains, and what is shown of both under each of `services`."""

    def __init__(self, engine: Engine, worker_id: str, stall_seconds: float, services: Sequence[str]) -> None:
        self._engine = engine
        self._worker_id = worker_id
        self._stall_seconds = stall_seconds
        self._services = ("", *services)
        self.servicer = health.aio.HealthServicer()
        self.draining = False
        self.failure: str | None = None

    @property
    def unhealthy_reason(self) -> str:
        if self.failure is not None:
            return self.failure
        stalled, limit = self._engine.seconds_since_progress(), self._stall_seconds
        if stalled > limit:
            return f"no step finished for {stalled:.1f} s though there is work (limit {limit:g} s)"
        return ""

    async def watch(self) -> None:
        """Shows what changes, until cancelled."""
        shown = ""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            reason = self.unhealthy_reason
            if bool(reason) != bool(shown):
                log.warning("%s is %s", self._worker_id, f"unhealthy: {reason}" if reason else "well again")
                shown = reason
                await self.show()

    async def show(self) -> None:
        serving = not self.draining and not self.unhealthy_reason
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in self._services:
            await self.servicer.set(service, status)
