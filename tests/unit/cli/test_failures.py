"""Errors as one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from clients.cli.failures import CommandError, UsageError, bug_line, error_line, exit_code_of
from harness.errors import AlreadyExistsError, NotFoundError, UnavailableError


def test_an_error_says_what_and_what_to_do() -> None:
    error = NotFoundError("there is no session 's1'", reason="SESSION_NOT_FOUND")
    assert error_line(error) == "there is no session 's1'. See which there are: unreal-agent sessions list."


def test_an_error_that_passes_says_when_to_try_again() -> None:
    error = UnavailableError("draining", reason="DRAINING", retry_after_s=2)
    assert error_line(error) == "draining. Try again in 2 s."


def test_an_error_of_many_lines_becomes_one() -> None:
    error = AlreadyExistsError("one\ntwo", reason="OTHER")
    assert error_line(error) == "one two"


def test_errors_of_tasks_are_told_as_the_first() -> None:
    error = ExceptionGroup("tasks", [CommandError("one", "Do it."), CommandError("two")])
    assert error_line(error) == "one. Do it."
    assert exit_code_of(ExceptionGroup("tasks", [UsageError("x")])) == 2


def test_a_bug_among_the_errors_of_tasks_is_a_bug() -> None:
    assert error_line(ExceptionGroup("tasks", [CommandError("one"), KeyError("x")])) is None


@pytest.mark.parametrize("has_directory", [True, False])
def test_a_bug_leaves_its_traceback_in_a_file(tmp_path: Path, has_directory: bool) -> None:
    directory = tmp_path if has_directory else tmp_path / "missing"
    try:
        raise KeyError("secret")
    except KeyError as error:
        line = bug_line(error, directory)
    path = Path(line.rpartition(" ")[2].rstrip("."))
    assert "KeyError" in line
    assert 'raise KeyError("secret")' in path.read_text()
    assert path.stat().st_mode & 0o077 == 0
    assert (path.parent == tmp_path) == has_directory
    path.unlink()
