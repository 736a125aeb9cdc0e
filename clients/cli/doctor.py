"""Looks at what is set up and says what is missing, and what to type. Changes nothing, prints no key."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from clients.cli.finding import Finding, Level
from clients.cli.isolation import KIND_VARIABLE, IsolationOptions, isolation_settings
from clients.cli.place import Place
from clients.cli.server_check import server_findings
from clients.cli.state_check import check_state, store_format
from clients.cli.state_dir import STATE_DIR_VARIABLE
from clients.cli.style import Style, environment_style
from clients.cli.text import one_line, plural, size
from harness.errors import HarnessError
from harness.llm.providers import provider_config_from_environment
from harness.operations.environment import command_environment
from harness.operations.manager_settings import LocalManagerSettings
from harness.primitives.confined_files import open_directory
from harness.primitives.isolation import establish
from harness.primitives.skills import discover_skills

MIN_FREE_BYTES = 500_000_000
"""Less free room than this is told of: outputs and histories grow."""

MAX_PROBLEMS = 10
"""Of the workspace's skills; the rest is counted."""

MIN_PYTHON = (3, 11)


def examine(place: Place, workspace: str, *, checks_state: bool) -> int:
    """Print the findings and return the exit code."""
    style = environment_style(sys.stdout.encoding, is_terminal=sys.stdout.isatty())
    findings = list(look_around(place, workspace, os.environ))
    if checks_state:
        findings += check_state(place.state)
    for finding in findings:
        print(_row(finding, style))
        if finding.what_to_type:
            print(f"  {'':<16}{style.dim('→')} {finding.what_to_type}")
    return 1 if any(finding.level is Level.BAD for finding in findings) else 0


def _row(finding: Finding, style: Style) -> str:
    marks: Mapping[Level, str] = {
        Level.GOOD: style.good(style.marks.good),
        Level.HINT: style.unsure(style.marks.bullet),
        Level.BAD: style.bad(style.marks.bad),
    }
    return f"{marks[finding.level]} {finding.subject:<16}{one_line(finding.text)}"


def look_around(place: Place, workspace: str, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield what is set up and what is missing; behind an address, what its coordinator says of itself."""
    yield _python()
    if place.server:
        yield from server_findings(place)
    is_elsewhere = place.server and place.state.server_address() != place.server
    if is_elsewhere:
        return
    yield _program("bash", environ, is_needed=True, use="commands run in it")
    yield _program("git", environ, is_needed=False, use="not needed by unreal-agent; agents like it")
    yield from _state(place)
    if not place.server:
        yield _provider(environ)
    yield from _workspace(workspace)
    yield _isolation(place, environ)


def _isolation(place: Place, environ: Mapping[str, str]) -> Finding:
    """Say what holds for commands here; where nothing is asked for, also what could be had."""
    wanted = isolation_settings(IsolationOptions(), environ, hidden=[str(place.state.path)])
    commands = command_environment(environ)
    limit_bytes = LocalManagerSettings().file_size_limit_bytes
    try:
        holds = establish(wanted, commands, limit_bytes)
    except HarnessError as error:
        return Finding(
            level=Level.BAD, subject="isolation", text=error.message, what_to_type=f"export {KIND_VARIABLE}=none"
        )
    if holds.kind != "none":
        return Finding(level=Level.GOOD, subject="isolation", text=holds.described)
    try:
        offer = establish(replace(wanted, kind="bubblewrap"), commands, limit_bytes)
    except HarnessError as error:
        return Finding(level=Level.HINT, subject="isolation", text=f"{holds.described}; {error.message}")
    hint = f"export {KIND_VARIABLE}=bubblewrap   ({offer.described})"
    return Finding(level=Level.HINT, subject="isolation", text=holds.described, what_to_type=hint)


def _python() -> Finding:
    version = platform.python_version()
    if sys.version_info[:2] < MIN_PYTHON:
        needed = ".".join(map(str, MIN_PYTHON))
        return Finding(
            level=Level.BAD, subject="python", text=f"{version}, {needed} is needed", what_to_type="make install"
        )
    return Finding(level=Level.GOOD, subject="python", text=f"{version} ({sys.executable})")


def _program(name: str, environ: Mapping[str, str], *, is_needed: bool, use: str) -> Finding:
    path = shutil.which(name, path=environ.get("PATH"))
    if path is not None:
        return Finding(level=Level.GOOD, subject=name, text=path)
    level = Level.BAD if is_needed else Level.HINT
    command = f"apt-get install {name}   (or your system's own way)"
    return Finding(level=level, subject=name, text=f"not found; {use}", what_to_type=command)


def _state(place: Place) -> Iterator[Finding]:
    state = place.state
    subject = "state directory"
    directory = next(path for path in (state.path, *state.path.parents) if path.exists())
    choose = f"export {STATE_DIR_VARIABLE}=DIR   (or --state-dir DIR)"
    if not directory.is_dir():
        yield Finding(level=Level.BAD, subject=subject, text=f"{directory} is not a directory", what_to_type=choose)
        return
    if not os.access(directory, os.W_OK | os.X_OK):
        yield Finding(level=Level.BAD, subject=subject, text=f"{directory} can't be written", what_to_type=choose)
        return
    told = f"{state.path}" if directory == state.path else f"{state.path} (will be made)"
    yield Finding(level=Level.GOOD, subject=subject, text=told)
    if (pid := state.holder()) is not None and not place.server:
        yield Finding(
            level=Level.HINT,
            subject="in use",
            text=f"by unreal-agent with pid {pid}: other commands on it wait for its end, or use another --state-dir",
        )
    free = shutil.disk_usage(directory).free
    if free < MIN_FREE_BYTES:
        hint = f"df -h {directory}   (make room, or {choose})"
        yield Finding(level=Level.HINT, subject="free space", text=f"{size(free)} left", what_to_type=hint)
    else:
        yield Finding(level=Level.GOOD, subject="free space", text=size(free))
    yield store_format(state)


def _provider(environ: Mapping[str, str]) -> Finding:
    try:
        config = provider_config_from_environment("", environ)
    except HarnessError as error:
        return Finding(
            level=Level.BAD,
            subject="model provider",
            text=error.message,
            what_to_type="export OPENAI_API_KEY=…   (or see it work without any: make demo)",
        )
    model = config.model or "no model by default: set UNREAL_AGENT_LLM_MODEL"
    key = "key set" if config.api_key else "no key"
    address = f", {config.base_url}" if config.base_url else ""
    return Finding(
        level=Level.GOOD if config.model else Level.HINT,
        subject="model provider",
        text=f"{config.provider}, {model}{address}, {key}",
    )


def _workspace(workspace: str) -> Iterator[Finding]:
    path = Path(workspace).expanduser()
    if not path.is_dir():
        text = f"{workspace} is not a directory" if path.exists() else f"{workspace} does not exist"
        yield Finding(level=Level.BAD, subject="workspace", text=text, what_to_type=f"mkdir -p {workspace}")
        return
    path = path.resolve()
    if not os.access(path, os.W_OK | os.X_OK):
        yield Finding(level=Level.BAD, subject="workspace", text=f"{path} can't be written")
        return
    with open_directory(str(path)) as root:
        found = discover_skills(root)
    skills = f", {plural(len(found.skills), 'skill')}" if found.skills else ""
    yield Finding(level=Level.GOOD, subject="workspace", text=f"{path}{skills}")
    for problem in found.problems[:MAX_PROBLEMS]:
        place = f"{problem.path}, line {problem.line}" if problem.line else problem.path
        yield Finding(level=Level.HINT, subject="skill", text=f"{place}: {problem.reason}")
    if (hidden := len(found.problems) - MAX_PROBLEMS) > 0:
        yield Finding(level=Level.HINT, subject="skill", text=f"and {plural(hidden, 'problem')} more")
