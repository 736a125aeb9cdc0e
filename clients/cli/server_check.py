"""What a coordinator behind an address says of itself, as findings of the doctor."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator

from clients.cli.failures import CommandError, UsageError
from clients.cli.finding import Finding, Level
from clients.cli.place import SERVER_VARIABLE, Place
from harness.errors import HarnessError
from unreal_agent.coordinator.v1 import coordinator_service_pb2 as coordinator_pb2


def server_findings(place: Place) -> Iterator[Finding]:
    """Yield whether the coordinator answers, and what it offers."""
    try:
        told = asyncio.run(_ask(place))
    except UsageError as error:
        yield Finding(level=Level.BAD, subject="server", text=str(error), what_to_type=_OTHER)
        return
    except CommandError as error:
        yield Finding(level=Level.BAD, subject="server", text=str(error), what_to_type="unreal-agent serve all")
        return
    except HarnessError as error:
        yield Finding(level=Level.BAD, subject="server", text=error.message, what_to_type=_OTHER)
        return
    release = f"{told.info.name}, release {told.info.release}"
    yield Finding(level=Level.GOOD, subject="server", text=f"{place.server}: {release}")
    yield Finding(level=Level.GOOD, subject="its tools", text=", ".join(told.tools) or "none")
    yield _offered("its managers", told.managers, "unreal-agent serve operation-manager")
    yield _offered("its providers", told.providers, "export OPENAI_API_KEY=…   (where the server is started)")


_OTHER = f"export {SERVER_VARIABLE}=ADDRESS   (or --server ADDRESS)"


def _offered(subject: str, names: Iterable[str], what_to_type: str) -> Finding:
    listed = ", ".join(names)
    if listed:
        return Finding(level=Level.GOOD, subject=subject, text=listed)
    return Finding(level=Level.BAD, subject=subject, text="none", what_to_type=what_to_type)


async def _ask(place: Place) -> coordinator_pb2.GetServerInfoResponse:
    from clients.cli.opening import open_place

    async with open_place(place, None) as coordinator:
        return await coordinator.get_server_info(coordinator_pb2.GetServerInfoRequest())
