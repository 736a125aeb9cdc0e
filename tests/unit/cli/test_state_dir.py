"""The state directory: where it is, who holds it, and what is said where it can't be used."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from clients.cli.failures import CommandError, UsageError
from clients.cli.place import find_place
from clients.cli.state_dir import StateDirectory, state_directory


def at(path: Path) -> StateDirectory:
    return StateDirectory(path=path, is_default=False)


def test_where_it_is() -> None:
    home = str(Path.home())
    assert str(state_directory(None, {}).path) == f"{home}/.local/state/unreal-agent"
    assert str(state_directory(None, {"XDG_STATE_HOME": "/x"}).path) == "/x/unreal-agent"
    assert str(state_directory(None, {"XDG_STATE_HOME": "relative"}).path) == f"{home}/.local/state/unreal-agent"
    assert str(state_directory(None, {"UNREAL_AGENT_STATE_DIR": "/y", "XDG_STATE_HOME": "/x"}).path) == "/y"
    assert str(state_directory("/z", {"UNREAL_AGENT_STATE_DIR": "/y"}).path) == "/z"


def test_the_command_that_goes_on_names_a_place_that_was_chosen() -> None:
    named = find_place("/a b", None, {}).next_command("s1")
    assert named.endswith(" run --session s1 --state-dir '/a b'")
    assert find_place(None, None, {}).next_command("s1").endswith(" run --session s1")
    assert find_place(None, "h:1", {}).next_command("s1").endswith(" run --session s1 --server h:1")
    assert find_place(None, None, {"UNREAL_AGENT_SERVER": "h:1"}).watch_command("s1").endswith(" sessions watch s1")


def test_one_process_holds_it(tmp_path: Path) -> None:
    state = at(tmp_path / "state")
    assert state.holder() is None
    with state.hold():
        assert state.holder() == os.getpid()
        with pytest.raises(CommandError, match=f"in use by another unreal-agent .*pid {os.getpid()}"), state.hold():
            pass
    assert state.holder() is None
    with state.hold():
        pass


def test_a_killed_holder_holds_nothing(tmp_path: Path) -> None:
    hold = (
        "import sys, pathlib; from clients.cli.state_dir import StateDirectory\n"
        "with StateDirectory(path=pathlib.Path(sys.argv[1]), is_default=False).hold():\n"
        "    print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", hold, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert at(tmp_path).holder() == holder.pid
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        with at(tmp_path).hold():
            pass


def test_it_is_for_its_owner_alone(tmp_path: Path) -> None:
    state = at(tmp_path / "a" / "state")
    with state.hold():
        assert state.path.stat().st_mode & 0o077 == 0
        assert state.lock_path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_what_is_no_directory_is_said(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CommandError, match="is not a directory") as error, at(tmp_path / place).hold():
        pass
    assert "--state-dir" in error.value.what_to_do


def test_what_names_the_place_goes_before_what_is_default(tmp_path: Path) -> None:
    assert find_place(None, None, {"UNREAL_AGENT_SERVER": "h:1"}).server == "h:1"
    assert find_place(None, "h:2", {"UNREAL_AGENT_SERVER": "h:1"}).server == "h:2"
    assert find_place(str(tmp_path), None, {"UNREAL_AGENT_SERVER": "h:1"}).server == ""
    with pytest.raises(UsageError, match="--server and --state-dir"):
        find_place("/a", "h:1", {})


def test_a_directory_that_is_served_is_reached_through_its_server(tmp_path: Path) -> None:
    state = at(tmp_path)
    with state.hold(), state.served_at("unix:/run/x.sock"):
        assert find_place(str(tmp_path), None, {}).server == "unix:/run/x.sock"
    assert find_place(str(tmp_path), None, {}).server == ""


def test_a_server_that_was_killed_serves_nothing(tmp_path: Path) -> None:
    state = at(tmp_path)
    with state.hold(), state.served_at("unix:/run/x.sock"):
        left_behind = (tmp_path / "server.json").read_text()
    (tmp_path / "server.json").write_text(left_behind)
    assert state.server_address() is None
    (tmp_path / "server.json").write_text("[]")
    assert state.server_address() is None
