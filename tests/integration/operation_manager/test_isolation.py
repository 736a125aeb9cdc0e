"""What a command in a sandbox can't do, tried by commands that try. Where there is no bubblewrap: that it is said."""

from __future__ import annotations

import asyncio
import os
import shlex
import socket
import subprocess
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from harness.operations.local_manager import LocalOperationManager
from tests.support.eventually import eventually
from tests.support.isolation import BUBBLEWRAP, ISOLATION, PYTHON, isolated_manager
from tests.support.operations import adding, bash, carriers, run, running
from unreal_agent.operation.v1 import operation_pb2
from unreal_agent.operationmanager.v1 import operation_manager_service_pb2 as manager_pb2

COMPLETED = operation_pb2.OPERATION_STATUS_COMPLETED
FAILED = operation_pb2.OPERATION_STATUS_FAILED

SECRET = f"planted-{uuid.uuid4().hex}"


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    (tmp_path / "workspace").mkdir()
    return tmp_path / "workspace"


@pytest.fixture
async def manager(tmp_path: Path) -> AsyncIterator[LocalOperationManager | None]:
    async with isolated_manager(tmp_path / "state") as opened:
        yield opened


async def tried(manager: LocalOperationManager, workspace: Path, command: str) -> operation_pb2.BashState:
    """Run a command that must begin and come to its end."""
    ended = await run(manager, bash(command, timeout_s=20), workspace)
    assert (ended.status, ended.bash.is_timed_out) == (COMPLETED, False), ended
    return ended.bash


# --- files ---


async def test_the_workspace_alone_is_seen_and_written(
    manager: LocalOperationManager | None, workspace: Path, tmp_path: Path
) -> None:
    if manager is None:
        return
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "secret").write_text(SECRET)
    (workspace / "way-out").symlink_to(tmp_path / "other")
    (workspace / "to-state").symlink_to(tmp_path / "state")
    (workspace / "to-proc").symlink_to("/proc/1/root")
    command = (
        f"echo kept > inside; cd {tmp_path} && ls; "
        f"for p in {tmp_path}/other {workspace}/way-out {workspace}/to-state {workspace}/to-proc{tmp_path}/other; do "
        "cat $p/secret; ls $p/operations; echo gone > $p/written; done; "
        "for p in /usr/bin/x /etc/x /opt/x /x /root/../x /bin/x /lib/x; do echo gone > $p; done; "
        "find / -xdev -name journal.sqlite3 2>/dev/null"
    )
    result = await tried(manager, workspace, command)
    assert (workspace / "inside").read_text() == "kept\n"
    assert result.stdout.head == "workspace\n"
    assert SECRET not in result.stdout.head + result.stderr.head
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["secret"]
    assert not (tmp_path / "state" / "written").exists()
    assert not any(Path(path).exists() for path in ("/usr/bin/x", "/etc/x", "/opt/x", "/x", "/bin/x", "/lib/x"))


async def test_files_of_others_and_what_not_every_user_may_read_are_not_seen(workspace: Path, tmp_path: Path) -> None:
    plain = replace(BUBBLEWRAP, isolation=replace(ISOLATION, readable=()))
    closed = [path for path in ("/etc/shadow", "/etc/gshadow", "/etc/sudoers") if os.path.exists(path)]
    async with isolated_manager(tmp_path / "state", plain) as manager:
        if manager is None:
            return
        command = f"cat {' '.join(closed)} </dev/null; ls -A /root /home /srv /mnt /run /var /sys /boot"
        result = await tried(manager, workspace, command)
    assert set(result.stdout.head.split()) <= {"/root:", "/run:", "/var:", "tmp"}, result


async def test_a_state_directory_within_the_workspace_is_covered(tmp_path: Path) -> None:
    state = tmp_path / "deep" / "state"
    async with isolated_manager(state) as manager:
        if manager is None:
            return
        first = await tried(manager, tmp_path, "echo mine")
        assert Path(first.stdout.path).is_relative_to(state)
        listed = await tried(
            manager, tmp_path, "ls -A deep/state; echo x > deep/state/x; cd deep/state; touch y; ls -A"
        )
        assert listed.stdout.head == ""
        assert sorted(path.name for path in state.iterdir() if path.name in ("x", "y")) == []


@pytest.mark.parametrize("wanted", ["/", "/etc", "/usr", "/usr/bin", "/tmp", "state", "state/operations", "link"])
async def test_a_workspace_that_is_not_apart_is_refused(
    manager: LocalOperationManager | None, tmp_path: Path, wanted: str
) -> None:
    if manager is None:
        return
    (tmp_path / "link").symlink_to("state")
    ended = await run(manager, bash("echo inside"), tmp_path / wanted)
    assert (ended.status, ended.error.reason) == (FAILED, "WORKSPACE_NOT_ISOLATED")


async def test_a_working_directory_that_is_not_seen_is_a_clear_failure(
    manager: LocalOperationManager | None, workspace: Path, tmp_path: Path
) -> None:
    if manager is None:
        return
    (tmp_path / "other").mkdir()
    ended = await run(manager, bash("echo inside", working_directory=str(tmp_path / "other")), workspace)
    assert (ended.status, ended.error.reason) == (FAILED, "SANDBOX_FAILED")
    assert "chdir" in ended.error.message


async def test_tmp_and_home_are_the_commands_own_and_gone_with_it(
    manager: LocalOperationManager | None, workspace: Path
) -> None:
    if manager is None:
        return
    name = f"unreal-agent-{uuid.uuid4().hex}"
    command = f'for d in /tmp /var/tmp /dev/shm "$HOME"; do echo x >"$d/{name}" && cat "$d/{name}"; done'
    for _ in range(2):
        result = await tried(manager, workspace, f"ls -A /tmp | grep -c unreal-agent; {command}")
        assert result.stdout.head == "0\nx\nx\nx\nx\n"
    assert not any(os.path.exists(f"{place}/{name}") for place in ("/tmp", "/var/tmp", "/dev/shm", Path.home()))


# --- sockets and the network ---


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """Stands for the coordinator's port on loopback."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.5)
        yield server


async def test_no_port_is_reached_unless_the_network_is_granted(
    manager: LocalOperationManager | None, workspace: Path, tmp_path: Path, listener: socket.socket
) -> None:
    if manager is None:
        return
    port = listener.getsockname()[1]
    knock = f"(exec 5<>/dev/tcp/127.0.0.1/{port}) && echo reached; cat /proc/net/dev | tail -n +3 | cut -d: -f1"
    result = await tried(manager, workspace, knock)
    assert result.stdout.head.split() == ["lo"], result
    granted = replace(BUBBLEWRAP, isolation=replace(ISOLATION, has_network=True))
    async with isolated_manager(tmp_path / "granted", granted) as other:
        assert other is not None
        assert "network granted, this machine's loopback too" in other.isolation.described
        assert (await tried(other, workspace, knock)).stdout.head.splitlines()[0] == "reached"


async def test_no_socket_of_the_services_is_reached(
    manager: LocalOperationManager | None, workspace: Path, tmp_path: Path
) -> None:
    if manager is None:
        return
    path, abstract = str(tmp_path / "state" / "store.sock"), f"\0{SECRET}"
    with socket.socket(socket.AF_UNIX) as named, socket.socket(socket.AF_UNIX) as unnamed:
        named.bind(path)
        named.listen()
        unnamed.bind(abstract)
        unnamed.listen()
        (workspace / "store.sock").symlink_to(path)
        (workspace / "knock.py").write_text(
            "import socket\n"
            f"for address in ({path!r}, 'store.sock', {abstract!r}):\n"
            "    try:\n"
            "        socket.socket(socket.AF_UNIX).connect(address)\n"
            "        print('reached')\n"
            "    except OSError as error:\n"
            "        print(error.errno)\n"
        )
        result = await tried(manager, workspace, f"{PYTHON} knock.py")
    assert result.stdout.head == "2\n2\n111\n", result


# --- processes ---


async def test_the_services_process_and_its_environment_are_not_seen(
    manager: LocalOperationManager | None, workspace: Path
) -> None:
    if manager is None:
        return
    holder = subprocess.Popen(["sleep", "60"], env={**os.environ, "API_KEY": SECRET})
    try:
        result = await tried(
            manager,
            workspace,
            f"cat /proc/{holder.pid}/environ /proc/{os.getpid()}/environ /proc/*/environ | tr '\\0' '\\n'; "
            "echo; ls -d /proc/[0-9]*; kill -9 -1; echo never",
        )
        assert holder.poll() is None
    finally:
        holder.kill()
        holder.wait()
    assert SECRET not in result.stdout.head
    assert len([line for line in result.stdout.head.splitlines() if line.startswith("/proc/")]) <= 5
    assert (await tried(manager, workspace, "echo the manager lives")).exit_code == 0


async def test_no_privilege_is_to_be_had(manager: LocalOperationManager | None, workspace: Path) -> None:
    if manager is None:
        return
    result = await tried(
        manager,
        workspace,
        "grep -E '^(NoNewPrivs|CapEff|CapPrm|CapBnd)' /proc/self/status; "
        "mount -t tmpfs none /usr; mount -o remount,rw /usr; mount --bind /proc /usr; umount /proc; umount -l /etc; "
        "unshare -Ur true && echo a namespace of its own; unshare -m true && echo its own mounts; "
        "chroot / true && echo chroot; mknod disk b 8 0 && echo a device; hostname other && echo renamed; "
        "cp /bin/bash own && chmod u+s own && ./own -p -c 'grep CapEff /proc/self/status'; nice -n -5 true; "
        "head -c 8 /dev/mem /dev/kmsg; ls /dev",
    )
    said = result.stdout.head.splitlines()
    assert said[:4] == [f"{name}:\t0000000000000000" for name in ("CapPrm", "CapEff", "CapBnd")] + ["NoNewPrivs:\t1"]
    assert said[4] == "CapEff:\t0000000000000000"
    devices = {"full", "null", "ptmx", "pts", "random", "shm", "tty", "urandom", "zero", "core", "fd"}
    assert set(said[5:]) <= devices | {"stdin", "stdout", "stderr", "console", "==> /dev/mem <=="}


async def test_setuid_programs_give_nothing(manager: LocalOperationManager | None, workspace: Path) -> None:
    if manager is None:
        return
    programs = [path for path in ("/usr/bin/su", "/usr/bin/passwd", "/usr/bin/mount") if os.path.exists(path)]
    result = await tried(
        manager, workspace, f"ls -l {' '.join(programs)}; su -c 'cat /etc/shadow' </dev/null; sudo -n id"
    )
    assert "root:" not in result.stdout.head


async def test_nobody_outside_is_traced(manager: LocalOperationManager | None, workspace: Path) -> None:
    if manager is None:
        return
    (workspace / "trace.py").write_text(
        "import ctypes, os, sys\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "PTRACE_ATTACH = 16\n"
        "for pid in map(int, sys.argv[1:]):\n"
        "    print(libc.ptrace(PTRACE_ATTACH, pid, 0, 0))\n"
    )
    # The pid of the manager means nobody within; pid 1 there is bubblewrap, which holds nothing of outside.
    result = await tried(manager, workspace, f"{PYTHON} trace.py {os.getpid()} {os.getppid()}; readlink /proc/1/fd/*")
    first, second, *held = result.stdout.head.splitlines()
    assert (first, second) == ("-1", "-1")
    assert {name for name in held if "/" in name} <= {"/dev/null", result.stdout.path, result.stderr.path}


async def test_a_command_inherits_nothing_but_its_streams(
    manager: LocalOperationManager | None, workspace: Path
) -> None:
    if manager is None:
        return
    result = await tried(manager, workspace, "for d in /proc/$$/fd/*; do [ -e $d ] && echo ${d##*/}; done")
    assert result.stdout.head.split() == ["0", "1", "2"]


# --- limits ---


async def test_a_fork_bomb_is_bounded_and_gone_afterwards(workspace: Path, tmp_path: Path) -> None:
    settings = replace(BUBBLEWRAP, isolation=replace(ISOLATION, max_processes=64))
    async with isolated_manager(tmp_path / "state", settings) as manager:
        if manager is None:
            return
        if "process limit none" in manager.isolation.described:
            assert "no cgroup that may be written" in manager.isolation.described
            return
        bomb = "b() { (b & b &) 2>/dev/null; sleep 60; }; b & b & sleep 60"
        operation = bash(bomb, timeout_s=1.5)
        (await manager.add_operations(adding([operation], workspace)))
        await running(manager, operation.operation_id)
        seen = [await asyncio.to_thread(carriers, operation.operation_id) for _ in range(5)]
        assert max(map(len, seen)) <= 64 + 3  # the supervisor and its sandbox
        ended = await run(manager, operation, workspace)
        assert ended.bash.is_timed_out
        await eventually(lambda: not carriers(operation.operation_id), within_s=10)
        assert (await tried(manager, workspace, "echo on")).stdout.head == "on\n"


async def test_a_memory_hog_is_ended_or_the_missing_limit_is_said(workspace: Path, tmp_path: Path) -> None:
    size = 64 << 20
    settings = replace(BUBBLEWRAP, isolation=replace(ISOLATION, max_memory_bytes=size))
    async with isolated_manager(tmp_path / "state", settings) as manager:
        if manager is None:
            return
        assert "memory limit 64 MiB" in manager.isolation.described
        hog = f"{PYTHON} -c 'kept = [bytes([1]) * (1 << 20) for _ in range(1 << 10)]; print(len(kept))'; echo over"
        result = await tried(manager, workspace, hog)
        assert (result.stdout.head, result.exit_code) == ("over\n", 0), result
        assert "Killed" in result.stderr.head or "MemoryError" in result.stderr.head, result
        # The files of a private /tmp are memory as well.
        fill = await tried(manager, workspace, "head -c 256M /dev/zero >/tmp/hog; stat -c %s /tmp/hog")
        is_of_group = "cgroup" in manager.isolation.described.partition("memory limit")[2].partition(",")[0]
        assert not is_of_group or fill.stdout.head.strip() != str(256 << 20), fill


async def test_one_command_can_not_fill_the_disk_with_a_file(workspace: Path, tmp_path: Path) -> None:
    settings = replace(BUBBLEWRAP, file_size_limit_bytes=1 << 20)
    async with isolated_manager(tmp_path / "state", settings) as manager:
        if manager is None:
            return
        assert "file size limit 1 MiB" in manager.isolation.described
        result = await tried(
            manager, workspace, "head -c 8M /dev/zero >big; stat -c %s big; head -c 8M /dev/zero >/tmp/big"
        )
        assert result.stdout.head == f"{1 << 20}\n"
        assert (workspace / "big").stat().st_size == 1 << 20


async def test_no_control_group_is_left_behind(manager: LocalOperationManager | None, workspace: Path) -> None:
    if manager is None:
        return
    groups = manager.isolation.cgroups
    parents = [parent for parent in (groups.memory, groups.pids) if parent is not None]
    before = {path for parent in parents for path in parent.glob("unreal-agent-*")}
    operation = bash("sleep 60")
    await manager.add_operations(adding([operation], workspace))
    await running(manager, operation.operation_id)
    during = {path for parent in parents for path in parent.glob("unreal-agent-*")} - before
    assert len(during) >= len(set(parents))
    mine = {path for path in during if any(_holds(path, process.pid) for process in carriers(operation.operation_id))}
    await manager.cancel_operation(
        manager_pb2.CancelOperationRequest(
            operation_id=operation.operation_id, fence=manager_pb2.Fence(session_id=operation.session_id, epoch=1)
        )
    )
    await eventually(lambda: not any(path.exists() for path in mine), within_s=10)


def _holds(group: Path, pid: int) -> bool:
    try:
        return str(pid) in (group / "cgroup.procs").read_text().split()
    except OSError:
        return False


# --- what is told ---


async def test_what_holds_is_told(manager: LocalOperationManager | None) -> None:
    if manager is None:
        return
    told = list((await manager.get_server_info(manager_pb2.GetServerInfoRequest())).isolation)
    assert told == [manager.isolation.described]
    for part in (
        "bubblewrap: read-only system yes",
        "network off",
        "memory limit ",
        "process limit ",
        "file size limit",
    ):
        assert part in told[0]


async def test_paths_may_be_granted_to_be_read(workspace: Path, tmp_path: Path) -> None:
    granted = tmp_path / "tools"
    granted.mkdir()
    (granted / "tool").write_text("useful")
    settings = replace(BUBBLEWRAP, isolation=replace(ISOLATION, readable=[str(granted)]))
    async with isolated_manager(tmp_path / "state", settings) as manager:
        if manager is None:
            return
        result = await tried(manager, workspace, f"cat {shlex.quote(str(granted))}/tool; echo x > {granted}/tool")
        assert (result.stdout.head, (granted / "tool").read_text()) == ("useful", "useful")
