"""The command line as its users have it: real processes, a state directory of their own, no key and no network."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pexpect

from tests.support.prepared import prepared

PROGRAM = Path(sys.executable).with_name("unreal-agent")

TIMEOUT_S = 25.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """How a command ended."""

    code: int
    stdout: str
    stderr: str

    @property
    def items(self) -> list[dict[str, Any]]:
        """Standard output as JSON lines."""
        return [json.loads(line) for line in self.stdout.splitlines()]


@dataclass(slots=True)
class Cli:
    """Runs `unreal-agent` with one state directory and one workspace."""

    directory: Path
    extra: dict[str, str] = field(default_factory=dict)
    """Environment variables on top."""

    def __post_init__(self) -> None:
        self.workspace.mkdir(exist_ok=True)

    @property
    def state(self) -> Path:
        return self.directory / "state"

    @property
    def workspace(self) -> Path:
        return self.directory / "workspace"

    @property
    def environment(self) -> dict[str, str]:
        """Nothing of the machine's own settings but the path."""
        return {
            "PATH": os.environ.get("PATH", os.defpath),
            "HOME": str(self.directory),
            "LANG": "C.UTF-8",
            "UNREAL_AGENT_STATE_DIR": str(self.state),
            **self.extra,
        }

    def script(self, responses: Sequence[Mapping[str, object]], name: str = "script.json") -> str:
        """Write a script and return its path."""
        path = self.directory / name
        path.write_text(json.dumps({"responses": list(responses)}))
        return str(path)

    def run(self, *arguments: str, stdin: str | bytes = "", first: str = "", **options: Any) -> Finished:
        """Run a command to its end, after `first` as `prepared` takes it; `options` are those of `subprocess.run`."""
        command = [str(PROGRAM), *arguments]
        done = subprocess.run(
            prepared(command, first) if first else command,
            input=stdin.encode() if isinstance(stdin, str) else stdin,
            capture_output=True,
            env=self.environment,
            cwd=self.workspace,
            **{"timeout": TIMEOUT_S, **options},
        )
        return Finished(code=done.returncode, stdout=done.stdout.decode(), stderr=done.stderr.decode())

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Start a command without a terminal; the caller ends it."""
        return subprocess.Popen(
            [str(PROGRAM), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=self.environment,
            cwd=self.workspace,
        )

    def on_terminal(
        self, *arguments: str, columns: int = 80, rows: int = 24, has_shell: bool = False
    ) -> pexpect.spawn[str]:
        """Start a command on a terminal of its own, or from a shell with job control there; the caller closes it."""
        command = [str(PROGRAM), *arguments]
        shell = ["bash", "--norc", "--noediting", "-i"]
        started = shell if has_shell else command
        child = pexpect.spawn(
            started[0],
            started[1:],
            env={"TERM": "xterm-256color", "PS1": "> ", **self.environment},
            cwd=str(self.workspace),
            dimensions=(rows, columns),
            encoding="utf-8",
            timeout=TIMEOUT_S,
        )
        if has_shell:
            child.sendline(shlex.join(command))
        return child


def bash(command: str, **arguments: object) -> dict[str, object]:
    """Return a scripted Bash call."""
    return {"name": "Bash", "arguments": {"command": command, **arguments}}
