"""A service that can't live where it is started says why in one line and ends; it leaves no traceback and no core."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.prepared import few_files, prepared, small_files

SERVICES = ["session-store", "operation-manager"]


def begin(name: str, state: str, address: Path, limits: str) -> tuple[int, list[str], list[str]]:
    """Start a service that can't start; return its exit code, its log and the lines that are for a person."""
    module = f"services.{name.replace('-', '_')}"
    done = subprocess.run(
        prepared([sys.executable, "-m", module, "--state-dir", state, "--listen", f"unix:{address}"], limits),
        capture_output=True,
        text=True,
        timeout=25,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": os.getcwd()},
        check=False,
    )
    lines = done.stderr.splitlines()
    assert done.stdout == ""
    return done.returncode, [one for one in lines if one.startswith("{")], [one for one in lines if one[0] != "{"]


@pytest.mark.parametrize("name", SERVICES)
@pytest.mark.parametrize("count", [6, 12, 16, 63])
def test_too_few_open_files_are_one_line(tmp_path: Path, name: str, count: int) -> None:
    code, _, lines = begin(name, str(tmp_path / "state"), tmp_path / "socket", few_files(count))
    expected = f"{name}: only {count} files may be open, at least 64 are needed: raise the limit (ulimit -n)"
    assert (code, lines) == (2, [expected])
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("name", SERVICES)
@pytest.mark.parametrize("room", [0, 20_000])
def test_a_full_disk_is_one_line(tmp_path: Path, name: str, room: int) -> None:
    code, log, lines = begin(name, str(tmp_path / "state"), tmp_path / "socket", small_files(room))
    assert code == 1
    assert len(lines) == 1 and lines[0].startswith(f"{name}: ") and str(tmp_path / "state") in lines[0], lines
    assert "Traceback" not in "".join(log)


@pytest.mark.parametrize("name", SERVICES)
def test_a_state_directory_that_can_not_be_written_is_one_line(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    code, log, lines = begin(name, str(tmp_path / "file" / "state"), tmp_path / "socket", "")
    assert code == 1
    assert len(lines) == 1 and "check its owner, or choose another --state-dir" in lines[0], lines
    assert "Traceback" not in "".join(log)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--listen", "0.0.0.0:0"], "there is no TLS"),
        (["--tls-certificate", "/none.pem", "--tls-key", "/none.key"], "'/none.key' cannot be read"),
    ],
    ids=["unprotected", "no certificate"],
)
def test_what_can_not_be_served_is_told_before_the_store_is_waited_for(
    tmp_path: Path, flags: list[str], words: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "services.coordinator", "--state-dir", str(tmp_path / "state"), *flags],
        capture_output=True,
        text=True,
        timeout=20,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": os.getcwd()},
        check=False,
    )
    lines = [line for line in done.stderr.splitlines() if not line.startswith("{")]
    assert (done.returncode, done.stdout, len(lines)) == (1, "", 1), done.stderr
    assert words in lines[0]
