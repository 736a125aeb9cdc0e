"""Opens the operation manager's service from its settings."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from harness.errors import FailedPreconditionError
from harness.operations.environment import command_environment
from harness.operations.local_manager import LocalOperationManager
from harness.operations.manager_settings import LocalManagerSettings
from harness.operations.output_files import RetentionSettings
from harness.primitives.isolation import DEFAULT_MAX_PROCESSES, ISOLATION_KINDS, IsolationSettings
from services._server.config import (
    Setting,
    ValueProblem,
    client_tls,
    one_of,
    parse_address,
    parse_count,
    parse_path,
    parse_seconds,
    parse_size,
    parse_switch,
    parse_text,
    server_options,
)
from services._server.main import Opened, Program
from services.operation_manager.attach import stay_attached
from services.operation_manager.servicer import OperationManagerServicer, manager_service
from unreal_agent.operationmanager.v1 import operation_manager_service_pb2 as manager_pb2

_DIRECTORY_NAME: Final = "operations"


# This order is a rule: `run_service` opens the manager first and makes the gRPC server after it. Opening starts the
# launcher, which starts every command, while gRPC has no thread yet. A process that has gRPC's threads must not fork:
# its child may hang or abort. What this process executes later itself, a launcher in place of one that died or an image
# worker, it executes by posix_spawn or vfork, which copy nothing and run no fork handlers; nothing here may use
# `preexec_fn` or multiprocessing's fork. At the end the server goes first: its callers are told to resume while the
# manager still answers, and a reader of growing output does not take the manager's end for the output's.
@asynccontextmanager
async def _open(values: Mapping[str, Any], stop: asyncio.Event) -> AsyncIterator[Opened]:
    directory = values["state_dir"] / _DIRECTORY_NAME
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as err:
        raise FailedPreconditionError(
            f"{str(directory)!r} cannot be made ({err.strerror}): check its owner, or choose another --state-dir",
            reason="STATE_DIR_NOT_WRITABLE",
            metadata={"path": str(directory)},
        ) from err
    settings = LocalManagerSettings(
        concurrency=values["concurrency"],
        environment=command_environment(os.environ, dict(values["command_environment"])),
        grace_s=values["kill_grace_seconds"],
        file_size_limit_bytes=values["max_file_bytes"],
        retention=RetentionSettings(max_total_bytes=values["max_output_bytes"]),
        isolation=IsolationSettings(
            kind=values["isolation"],
            has_network=values["isolation_network"],
            readable=[str(path) for path in values["isolation_read"] or ()],
            max_memory_bytes=values["isolation_max_memory"] or 0,
            max_processes=values["isolation_max_processes"],
            hidden=[str(path) for path in _secrets(values) if path is not None],
        ),
    )
    token = _token(values["token_file"], os.environ)
    async with (
        LocalOperationManager.open(directory, name=values["manager_name"], settings=settings) as manager,
        asyncio.TaskGroup() as tasks,
    ):
        info = (await manager.get_server_info(manager_pb2.GetServerInfoRequest())).info
        attaching = [
            tasks.create_task(
                stay_attached(address, OperationManagerServicer(manager), info, token=token, tls=client_tls(values))
            )
            for address in values["attach"]
        ]

        def gauges() -> Mapping[str, float]:
            statistics = manager.statistics()
            return {
                "operations_remembered": statistics.remembered,
                "operations_running": statistics.running,
                "operations_waiting": statistics.waiting,
                "operation_watchers": statistics.watchers,
                "operations_position": statistics.position,
            }

        notes = [f"isolation: {manager.isolation.described}"]
        notes += [f"journal and output are kept in {directory}", f"instance {manager.instance_id}"]
        notes += [f"attaches to {address}" for address in values["attach"]]
        try:
            yield Opened(services=[manager_service(manager)], gauges=[gauges], notes=notes)
        finally:
            for task in attaching:
                task.cancel()


def _token(path: Path | None, environ: Mapping[str, str]) -> str:
    if path is None:
        return environ.get("UNREAL_AGENT_TOKEN", "").strip()
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as err:
        raise FailedPreconditionError(
            f"{str(path)!r} cannot be read: name a file with the token that `unreal-agent tokens create` printed",
            reason="TOKEN_FILE_UNREADABLE",
            metadata={"path": str(path)},
        ) from err


def _parse_variable(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not (separator and name) or "\0" in text:
        raise ValueProblem("must be NAME=VALUE")
    return name, value


def _secrets(values: Mapping[str, Any]) -> tuple[Path | None, ...]:
    """Return what of this process's own no command may see, whatever its workspace."""
    return values["state_dir"], values["token_file"], values["tls_key"]


ISOLATION_OPTIONS: Final = (
    Setting(
        flag="--isolation",
        parse=one_of(*ISOLATION_KINDS),
        default="none",
        metavar="KIND",
        help="of commands: none, bubblewrap (a sandbox each; what this machine can't give is said at the start), or"
        " container (this process runs in one, which is checked, and that is relied upon)",
    ),
    Setting(
        flag="--isolation-network",
        parse=parse_switch,
        default="false",
        help="with bubblewrap: commands get this machine's network, its loopback too; without it none",
    ),
    Setting(
        flag="--isolation-read",
        parse=parse_path,
        default=None,
        is_repeated=True,
        metavar="PATH",
        help="with bubblewrap: a path that commands may read, beside the system's; may be repeated",
    ),
    Setting(
        flag="--isolation-max-memory",
        parse=parse_size,
        default=None,
        metavar="SIZE",
        help="with bubblewrap: memory of each command; without it three quarters of the machine's, where a cgroup"
        " bounds it; with it but without a cgroup, address space of each process",
    ),
    Setting(
        flag="--isolation-max-processes",
        parse=parse_count,
        default=str(DEFAULT_MAX_PROCESSES),
        metavar="COUNT",
        help="with bubblewrap: processes and threads of each command",
    ),
)

PROGRAM: Final = Program(
    name="operation-manager",
    description="Runs commands durably and serves them over gRPC. Commands outlive it.",
    options=(
        *server_options(default_listen="unix:{state_dir}/operation-manager.sock"),
        Setting(
            flag="--manager-name",
            parse=parse_text,
            default="local",
            metavar="NAME",
            help="what it is called; operations are assigned to this name",
        ),
        Setting(
            flag="--attach",
            parse=parse_address,
            default=None,
            is_repeated=True,
            metavar="ADDRESS",
            help="a coordinator to dial, where none can dial this manager; may be repeated: name every coordinator",
        ),
        Setting(
            flag="--token-file",
            parse=parse_path,
            default=None,
            metavar="FILE",
            help="holds the token to attach with; without it UNREAL_AGENT_TOKEN is",
        ),
        Setting(
            flag="--concurrency",
            parse=parse_count,
            default="64",
            metavar="COUNT",
            help="operations that use this machine at once; further ones wait",
        ),
        Setting(
            flag="--kill-grace-seconds",
            parse=parse_seconds,
            default="5",
            metavar="SECONDS",
            help="between SIGTERM and SIGKILL to a command that is ended",
        ),
        Setting(
            flag="--max-file-bytes",
            parse=parse_size,
            default="8GiB",
            metavar="SIZE",
            help="bound of every file that a command writes, its output too",
        ),
        Setting(
            flag="--max-output-bytes",
            parse=parse_size,
            default="10GiB",
            metavar="SIZE",
            help="output of acknowledged operations that is kept, together; the oldest goes first",
        ),
        Setting(
            flag="--command-environment",
            parse=_parse_variable,
            default=None,
            is_repeated=True,
            metavar="NAME=VALUE",
            help="variable of every command, beside PATH, HOME and the like; may be repeated",
        ),
        *ISOLATION_OPTIONS,
    ),
    open=_open,
)
