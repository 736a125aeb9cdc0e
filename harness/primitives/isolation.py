"""What isolates commands on this host: nothing, bubblewrap, or the container that the manager runs in. Blocks.

Looks at the start what the host can give and says it; makes the words that a command is started with. What runs in the
manager itself (skills, images, the look at a workspace) is confined to the workspace elsewhere.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from harness.errors import FailedPreconditionError
from harness.primitives.cgroups import Cgroups, describe, find_cgroups
from harness.primitives.sandbox_mounts import Mounts

IsolationKind: TypeAlias = Literal["none", "bubblewrap", "container"]

ISOLATION_KINDS: tuple[IsolationKind, ...] = get_args(IsolationKind)

DEFAULT_MAX_PROCESSES = 1024

# Of the machine's memory: a command may not have all of it where nobody said how much.
_MEMORY_SHARE = 0.75

_PROBE_S = 20.0

# RLIMIT_NPROC is counted within a user namespace since then; before it counted all processes of the user.
_COUNTED_APART = (5, 14)

_FLAGS = (
    *("--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-uts", "--unshare-cgroup-try"),
    *("--new-session", "--cap-drop", "ALL", "--hostname", "sandbox"),
)

_PROBE = 'read -r line </proc/self/stat && : >"$1/.written" && echo "$line"'


@dataclass(frozen=True, slots=True, kw_only=True)
class IsolationSettings:
    """What is asked for."""

    kind: IsolationKind = "none"
    has_network: bool = False
    """Bubblewrap: commands get this machine's network, its loopback too. Else none at all."""

    readable: Sequence[str] = ()
    """Bubblewrap: further paths that commands may read, beside the system's."""

    max_memory_bytes: int = 0
    """Bubblewrap: of each command; 0: three quarters of the machine's where a cgroup bounds it, else none."""

    max_processes: int = DEFAULT_MAX_PROCESSES
    """Bubblewrap: of each command, threads included."""

    hidden: Sequence[str] = ()
    """Bubblewrap: paths that no command may see wherever its workspace lies: the state directory, keys, tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sandbox:
    """How one command is started."""

    words: Sequence[str] = ()
    """The program that the command's bash is executed by, and its arguments; none: no such program."""

    cgroups: Sequence[str] = ()
    """Files to which the process that becomes the command writes "0"."""

    limits: Sequence[str] = ()
    """Within the sandbox: number of processes, KiB of address space; "unlimited" for none. Empty: neither."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Isolation:
    """What holds on this host; made by `establish`."""

    kind: IsolationKind = "none"
    described: str = "none: commands run as the manager does, with its files and its network"
    """One line for people: what is isolated and what is not."""

    cgroups: Cgroups = field(default_factory=Cgroups)
    words: Sequence[str] = ()
    mounts: Mounts | None = None
    limits: Sequence[str] = ()
    max_memory_bytes: int = 0
    max_processes: int = 0

    def sandbox(self, workspace: str, directory: str) -> Sandbox:
        """Return how to start the command whose own directory this is.

        Raises:
            WorkspaceRefusedError: Its workspace can't be the only thing that it may write.
            OSError: Its control group can't be made.
        """
        if self.mounts is None:
            return Sandbox()
        words = [*self.words, *self.mounts.words(workspace)]
        groups = self.cgroups.make(directory, max_memory_bytes=self.max_memory_bytes, max_processes=self.max_processes)
        return Sandbox(words=words, cgroups=groups, limits=self.limits)


def establish(settings: IsolationSettings, environment: Mapping[str, str], file_size_limit_bytes: int) -> Isolation:
    """Look whether the host gives what is asked for, and return what holds.

    Args:
        settings: What is asked for.
        environment: Of the commands.
        file_size_limit_bytes: Of each file that a command writes; 0: none. Told only.

    Raises:
        FailedPreconditionError: ISOLATION_UNAVAILABLE, with what to do.
    """
    match settings.kind:
        case "none":
            return Isolation()
        case "container":
            evidence = container_evidence()
            if not evidence:
                raise _unavailable(
                    "container",
                    "this process runs in no container (no /.dockerenv, no /run/.containerenv, no mark in /proc/1): "
                    "start it in one, or choose --isolation bubblewrap",
                )
            return Isolation(kind="container", described=f"container: all that it isolates, nothing more ({evidence})")
        case "bubblewrap":
            return _bubblewrap(settings, environment, file_size_limit_bytes)


def container_evidence(root: Path = Path("/")) -> str:
    """Return what shows that this process runs in a container, or nothing.

    Args:
        root: Where the machine's files are looked for.
    """
    for name in (".dockerenv", "run/.containerenv"):
        if (root / name).exists():
            return f"/{name} is there"
    try:
        told = re.search(r"docker|kubepods|libpod|containerd|lxc|podman", (root / "proc/1/cgroup").read_text())
        if told:
            return f"/proc/1/cgroup names {told[0]}"
    except OSError:
        pass
    try:
        variables = (root / "proc/1/environ").read_bytes().split(b"\0")
    except OSError:
        return ""
    return "pid 1 has the variable container" if any(each.startswith(b"container=") for each in variables) else ""


# --- bubblewrap ---


def _bubblewrap(settings: IsolationSettings, environment: Mapping[str, str], file_size_limit_bytes: int) -> Isolation:
    path = environment.get("PATH", os.defpath)
    program, bash = shutil.which("bwrap", path=path), shutil.which("bash", path=path)
    if program is None or bash is None:
        raise _unavailable("bubblewrap", f"{'bash' if program else 'bwrap'} was not found: apt-get install bubblewrap")
    words = [program, *_FLAGS]
    if _knows(program, "--disable-userns"):
        words.append("--disable-userns")
    if not settings.has_network:
        words.append("--unshare-net")
    if "TMPDIR" in environment:
        words += ["--unsetenv", "TMPDIR"]  # a directory that is not there
    memory_bytes = _machine_memory()
    mounts = Mounts.of_this_host(
        home=environment.get("HOME", ""),
        readable=settings.readable,
        hidden=settings.hidden,
        has_network=settings.has_network,
        scratch_bytes=max(memory_bytes // 4, 64 << 20),
    )
    groups = find_cgroups()
    groups.sweep()
    bounded = describe(groups)
    limits = _rlimits(settings, bounded)
    max_memory_bytes = settings.max_memory_bytes or (int(memory_bytes * _MEMORY_SHARE) if groups.memory else 0)
    isolation = Isolation(
        kind="bubblewrap",
        described=_described(settings, bounded, limits, max_memory_bytes, file_size_limit_bytes),
        cgroups=groups,
        words=words,
        mounts=mounts,
        limits=limits,
        max_memory_bytes=max_memory_bytes,
        max_processes=settings.max_processes,
    )
    _probe(isolation, bash, environment)
    return isolation


def _rlimits(settings: IsolationSettings, bounded: Mapping[str, str]) -> Sequence[str]:
    """Return the limits of the kernel's older kind for what no control group bounds."""
    processes = "unlimited" if bounded["pids"] or not _binds_processes() else str(settings.max_processes)
    is_memory_asked = settings.max_memory_bytes and not bounded["memory"]
    memory = str(settings.max_memory_bytes // 1024) if is_memory_asked else "unlimited"
    return () if processes == memory == "unlimited" else (processes, memory)


def _binds_processes() -> bool:
    """Whether RLIMIT_NPROC bounds one command: it never binds root, nor counted apart before Linux 5.14."""
    numbers = re.findall(r"\d+", platform.release())[:2]
    return os.getuid() != 0 and tuple(map(int, numbers)) >= _COUNTED_APART


def _described(
    settings: IsolationSettings,
    bounded: Mapping[str, str],
    limits: Sequence[str],
    max_memory_bytes: int,
    file_size_limit_bytes: int,
) -> str:
    if max_memory_bytes:
        memory = _size(max_memory_bytes) + " " + (f"({bounded['memory']})" if bounded["memory"] else "of each process")
    else:
        memory = "none (no cgroup that may be written)"
    if bounded["pids"]:
        processes = f"{settings.max_processes} ({bounded['pids']})"
    elif limits and limits[0] != "unlimited":
        processes = f"{settings.max_processes} (rlimit)"
    else:
        why = "no rlimit binds root" if os.getuid() == 0 else "this kernel's rlimit counts all of the user's"
        processes = f"none (no cgroup that may be written, {why})"
    files = _size(file_size_limit_bytes) if file_size_limit_bytes else "none"
    network = "granted, this machine's loopback too" if settings.has_network else "off"
    return (
        f"bubblewrap: read-only system yes, private /tmp and /proc yes, new privileges none, network {network}, "
        f"memory limit {memory}, process limit {processes}, file size limit {files}"
    )


def _size(size_bytes: int) -> str:
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:.3g} {unit}"
    return f"{size_bytes} B"


def _machine_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _knows(program: str, flag: str) -> bool:
    try:
        told = subprocess.run([program, "--help"], capture_output=True, timeout=_PROBE_S, check=False)
    except (OSError, subprocess.SubprocessError):
        return False
    return flag.encode() in told.stdout + told.stderr


def _probe(isolation: Isolation, bash: str, environment: Mapping[str, str]) -> None:
    """Run a command in a sandbox as all later ones.

    Raises:
        FailedPreconditionError: ISOLATION_UNAVAILABLE.
    """
    with tempfile.TemporaryDirectory(prefix="unreal-agent-") as workspace:
        try:
            sandbox = isolation.sandbox(workspace, workspace)
            words = [*sandbox.words, "--chdir", os.path.realpath(workspace), "--remount-ro", "/", "--"]
            words += [bash, "--norc", "--noprofile", "-c", _PROBE, "bash", os.path.realpath(workspace)]
            done = subprocess.run(
                words,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_PROBE_S,
                check=False,
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise _unavailable("bubblewrap", f"a first command could not be run: {error}") from error
        finally:
            isolation.cgroups.remove(workspace)
    if done.returncode != 0:
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines() or [f"exit {done.returncode}"]
        raise _unavailable("bubblewrap", f"{lines[-1]}. {_advice(lines[-1])}")


def _advice(line: str) -> str:
    if "proc" in line:
        return "In a container, start that with --security-opt unmask=/proc/* (or systempaths=unconfined)"
    switches = (
        "kernel.unprivileged_userns_clone, user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns"
    )
    return f"User namespaces must be allowed here: look at sysctl {switches}"


def _unavailable(kind: str, why: str) -> FailedPreconditionError:
    return FailedPreconditionError(
        f"isolation by {kind} is not to be had here: {why}", reason="ISOLATION_UNAVAILABLE", metadata={"kind": kind}
    )
