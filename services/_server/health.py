"""`grpc.health.v1`: SERVING until the drain begins.

Not the package's own servicer: that holds a lock while it writes, so that one watcher that does not read would hold up
the drain.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from harness.errors import NotFoundError

HEALTH_SERVICE = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name


class Health(health_pb2_grpc.HealthServicer):
    """Health of a server and of each of its services; the empty name stands for the server."""

    def __init__(self, services: Iterable[str]) -> None:
        self._services = frozenset(("", *services))
        self._is_serving = True
        self._changed = asyncio.Event()

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> health_pb2.HealthCheckResponse:
        """Return a service's health; NOT_FOUND for one that is not here."""
        if request.service not in self._services:
            raise NotFoundError(
                f"service {request.service!r} is not here",
                reason="SERVICE_NOT_FOUND",
                metadata={"service": request.service},
            )
        return health_pb2.HealthCheckResponse(status=self._status(request.service))

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """Yield a service's health, then each change."""
        last = None
        while True:
            changed = self._changed
            status = self._status(request.service)
            if status != last:
                last = status
                yield health_pb2.HealthCheckResponse(status=status)
            else:
                await changed.wait()

    def drain(self) -> None:
        """Set everything to NOT_SERVING."""
        self._is_serving = False
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _status(self, service: str) -> Any:  # an enum of the package, whose stubs do not name its type
        if service not in self._services:
            return health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        if self._is_serving:
            return health_pb2.HealthCheckResponse.SERVING
        return health_pb2.HealthCheckResponse.NOT_SERVING
