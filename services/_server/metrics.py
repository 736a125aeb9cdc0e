"""Plain-text metrics over HTTP on loopback, in the form that Prometheus reads."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Final

from harness.errors import FailedPreconditionError, InvalidArgumentError
from services._server.inflight import CallsInHand

logger = logging.getLogger(__name__)

_PREFIX: Final = "unreal_agent_"
_REQUEST_TIME_S: Final = 5.0
_LOOPBACK: Final = frozenset({"127.0.0.1", "localhost", "[::1]", "::1"})

Gauges = Callable[[], Mapping[str, float]]
"""Returns the values of a component by name; called for every request."""


@asynccontextmanager
async def serve_metrics(
    address: str, component: str, calls: CallsInHand, gauges: Iterable[Gauges]
) -> AsyncIterator[str]:
    """Serve metrics at `host:port` while the block runs; yields the address with its port.

    Raises:
        InvalidArgumentError: METRICS_NOT_LOCAL; they are for this machine alone.
        FailedPreconditionError: ADDRESS_UNUSABLE.
    """
    host, _, port = address.rpartition(":")
    if host not in _LOOPBACK:
        raise InvalidArgumentError(
            f"metrics are served on loopback only, got {address!r}",
            reason="METRICS_NOT_LOCAL",
            metadata={"field": "metrics"},
        )
    sources = tuple(gauges)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_REQUEST_TIME_S):
                await reader.readuntil(b"\r\n\r\n")
                body = render(component, calls, sources).encode()
                head = f"HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4\r\nContent-Length: {len(body)}\r\n"
                writer.write(head.encode() + b"Connection: close\r\n\r\n" + body)
                await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as err:
            logger.debug("metrics request failed", extra={"error": type(err).__name__})
        finally:
            writer.close()

    try:
        server = await asyncio.start_server(answer, host.strip("[]"), int(port))
    except OSError as err:
        raise FailedPreconditionError(
            f"cannot serve metrics on {address!r}: {(err.strerror or str(err)).lower()}",
            reason="ADDRESS_UNUSABLE",
            metadata={"address": address},
        ) from err
    async with server:
        yield f"{host}:{server.sockets[0].getsockname()[1]}"


def render(component: str, calls: CallsInHand, gauges: Iterable[Gauges]) -> str:
    """Return the metrics as text."""
    label = f'component="{component}"'
    lines = [
        f"# TYPE {_PREFIX}calls_in_hand gauge",
        f"{_PREFIX}calls_in_hand{{{label}}} {len(calls)}",
        f"# TYPE {_PREFIX}bytes_in_hand gauge",
        f"{_PREFIX}bytes_in_hand{{{label}}} {calls.bytes_in_hand}",
        f"# TYPE {_PREFIX}calls_total counter",
    ]
    lines += [
        f'{_PREFIX}calls_total{{{label},method="{method}",code="{code}"}} {count}'
        for (method, code), count in sorted(calls.finished.items())
    ]
    for source in gauges:
        for name, value in source().items():
            lines += [f"# TYPE {_PREFIX}{name} gauge", f"{_PREFIX}{name}{{{label}}} {value:g}"]
    return "\n".join(lines) + "\n"
