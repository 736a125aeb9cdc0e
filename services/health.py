"""Asks a service on this machine whether it serves: `python -m services.health unix:/path`. For containers' probes.

Exits with 0 if it does, else with 1 and a line that says why. Goes by a Unix socket or loopback, without TLS or token:
who may ask for health may ask for nothing else.
"""

from __future__ import annotations

import sys
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

TIMEOUT_S: Final = 4.0
"""Below the timeout of the probes in deploy/."""


def main(arguments: list[str]) -> int:
    """Ask at the one address in the arguments and return the exit code."""
    if len(arguments) != 1:
        print("usage: python -m services.health ADDRESS", file=sys.stderr)  # noqa: T201  # for who wrote the probe
        return 2
    try:
        with grpc.insecure_channel(arguments[0], options=(("grpc.enable_http_proxy", 0),)) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)  # whose methods the package's stubs do not name
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
    except grpc.RpcError as error:
        print(f"{arguments[0]}: {error.code().name}", file=sys.stderr)  # noqa: T201  # the engine keeps it
        return 1
    status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    print(f"{arguments[0]}: {status}")  # noqa: T201  # the engine keeps it
    return 0 if answer.status == health_pb2.HealthCheckResponse.SERVING else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
