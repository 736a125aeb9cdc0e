"""What a manager says of its isolation when it starts, in the doctor, and when it refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from clients.operation_manager import DialledLink, ProxyOperationManager
from harness.errors import FailedPreconditionError
from harness.operations.manager_settings import LocalManagerSettings
from harness.primitives.isolation import IsolationSettings, container_evidence
from tests.support.cli import Cli
from tests.support.isolation import refusal
from tests.support.manager_service import manager_process
from unreal_agent.operationmanager.v1 import operation_manager_service_pb2 as manager_pb2


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    return Cli(tmp_path)


def refused(state: Path, *flags: str, **variables: str) -> str:
    """Start a manager that must not start; return what it says."""
    done = subprocess.run(
        [sys.executable, "-m", "services.operation_manager", "--state-dir", str(state), *flags],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **variables},
        capture_output=True,
        text=True,
        timeout=25,
    )
    assert done.returncode != 0, done
    return done.stderr


@pytest.mark.parametrize("kind", ["none", "bubblewrap"])
async def test_a_manager_says_at_its_start_and_when_asked_what_holds(tmp_path: Path, kind: str) -> None:
    if kind == "bubblewrap" and refusal():
        assert "not to be had here" in refused(tmp_path / "state", "--isolation", kind)
        return
    async with manager_process(tmp_path / "state", "--isolation", kind) as service:
        async with ProxyOperationManager(DialledLink(service.address)) as proxy:
            told = list((await proxy.get_server_info(manager_pb2.GetServerInfoRequest())).isolation)
        assert len(told) == 1
        assert told[0].startswith(f"{kind}: ")
        assert service.process.stdout is not None
        lines = [(await service.process.stdout.readline()).decode() for _ in range(1)]
        assert f"isolation: {told[0]}" in lines[0] + service.log()


def test_a_machine_without_bubblewrap_is_refused_with_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(FailedPreconditionError, match="apt-get install bubblewrap") as caught:
        LocalManagerSettings(
            environment={"PATH": str(tmp_path)}, isolation=IsolationSettings(kind="bubblewrap")
        ).establish_isolation(tmp_path)
    assert caught.value.reason == "ISOLATION_UNAVAILABLE"


def test_a_bubblewrap_that_may_make_no_namespace_is_refused_in_its_own_words(tmp_path: Path) -> None:
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    broken.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    with pytest.raises(FailedPreconditionError, match=r"No permissions to create new namespace.*sysctl"):
        LocalManagerSettings(
            environment={"PATH": path}, isolation=IsolationSettings(kind="bubblewrap")
        ).establish_isolation(tmp_path)


def test_an_unknown_kind_is_wrong_usage(tmp_path: Path) -> None:
    assert "none, bubblewrap, container" in refused(tmp_path / "state", "--isolation", "magic")


# --- a container ---


@pytest.mark.parametrize(
    ("file", "content", "evidence"),
    [
        (".dockerenv", "", "/.dockerenv is there"),
        ("run/.containerenv", "", "/run/.containerenv is there"),
        ("proc/1/cgroup", "0::/kubepods/burstable/pod1\n", "/proc/1/cgroup names kubepods"),
        ("proc/1/environ", "PATH=/bin\0container=oci\0", "pid 1 has the variable container"),
        ("proc/1/cgroup", "0::/init.scope\n", ""),
    ],
)
def test_a_container_is_known_by_its_marks(tmp_path: Path, file: str, content: str, evidence: str) -> None:
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(content)
    assert container_evidence(tmp_path) == evidence


def test_a_container_is_relied_upon_only_where_there_is_one(tmp_path: Path) -> None:
    settings = LocalManagerSettings(isolation=IsolationSettings(kind="container"))
    evidence = container_evidence()
    if evidence:
        described = settings.establish_isolation(tmp_path).described
        assert described == f"container: all that it isolates, nothing more ({evidence})"
    else:
        with pytest.raises(FailedPreconditionError, match="runs in no container"):
            settings.establish_isolation(tmp_path)


def test_a_manager_in_no_container_refuses_to_say_so(tmp_path: Path) -> None:
    if refusal():
        return
    # The same machine without the marks of a container, if it has any.
    words = ["bwrap", "--unshare-user", "--unshare-pid", "--dev", "/dev", "--proc", "/proc"]
    for name in sorted(os.listdir("/")):
        if name not in ("dev", "proc", "run", ".dockerenv"):
            is_link = os.path.islink(f"/{name}")
            words += ["--symlink", os.readlink(f"/{name}")] if is_link else ["--bind", f"/{name}"]
            words.append(f"/{name}")
    done = subprocess.run(
        [
            *words,
            sys.executable,
            "-m",
            "services.operation_manager",
            "--isolation",
            "container",
            "--state-dir",
            tmp_path,
        ],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=25,
    )
    assert done.returncode == 1, done
    assert "isolation by container is not to be had here: this process runs in no container" in done.stderr


# --- the command line ---

SCRIPT: Sequence[Mapping[str, object]] = [
    {"tool_calls": [{"name": "Bash", "arguments": {"command": "echo made > made; ls /root /home; touch ../outside"}}]},
    {"text": "done"},
]


def test_a_run_isolates_its_commands_and_says_so(cli: Cli) -> None:
    done = cli.run("run", "--isolation", "bubblewrap", "--script", cli.script(SCRIPT), "-p", "go")
    if refusal():
        assert (done.code, "isolation by bubblewrap is not to be had here" in done.stderr) == (1, True)
        return
    assert done.code == 0, done
    assert "isolation: bubblewrap: read-only system yes" in done.stderr
    assert (cli.workspace / "made").read_text() == "made\n"
    assert not (cli.directory / "outside").exists()


def test_a_run_takes_its_isolation_from_the_environment_too(cli: Cli) -> None:
    cli.extra["UNREAL_AGENT_ISOLATION"] = "bubblewrap"
    done = cli.run("run", "--script", cli.script(SCRIPT), "-p", "go")
    assert refusal() or not (cli.directory / "outside").exists()
    assert ("isolation: bubblewrap" in done.stderr) is not bool(refusal())
    cli.extra["UNREAL_AGENT_ISOLATION"] = "magic"
    assert "UNREAL_AGENT_ISOLATION" in cli.run("run", "--script", cli.script(SCRIPT), "-p", "go").stderr


def test_the_doctor_says_what_isolates(cli: Cli) -> None:
    assert "isolation       none: commands run as the manager does" in cli.run("doctor").stdout
    cli.extra["UNREAL_AGENT_ISOLATION"] = "bubblewrap"
    told = cli.run("doctor").stdout
    assert "isolation       bubblewrap: read-only system yes" in told or "not to be had here" in told
    assert ("not to be had here" in told) is bool(refusal())
