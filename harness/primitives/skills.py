"""Finds the skills of a workspace, `.harness/skills/*/SKILL.md`, through confined reads.

One bad file hides nothing else: each is listed with its path, line and reason. Blocking: call it from a thread.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from harness.errors import HarnessError, NotFoundError
from harness.primitives.confined_files import list_directory, open_directory, read_file
from harness.primitives.primitives import ComputeError, ComputeOutcome
from harness.primitives.skill_files import MAX_FILE_BYTES, SkillFault, SkillFile, parse_skill
from unreal_agent.operation.v1 import operation_pb2

SKILLS_DIRECTORY = ".harness/skills"
SKILL_FILE = "SKILL.md"

MAX_FOLDERS = 256
"""Bounds what an inspection stores: a description has up to 1,024 characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SkillContent:
    """A skill as it is shown to the model."""

    path: str
    """Relative to the workspace."""

    content: str
    """The whole file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SkillIndex:
    """What was found in a workspace."""

    skills: Sequence[operation_pb2.Skill]
    """By name."""

    problems: Sequence[operation_pb2.SkillProblem]
    """By path, then line."""


def discover_skills(root: int) -> SkillIndex:
    """Return the skills below an opened workspace and everything that is wrong with them; never raises.

    Args:
        root: Descriptor of `confined_files.open_directory`.
    """
    finder = _Finder(root)
    skills = [
        operation_pb2.Skill(name=file.name, description=file.description, path=path) for path, file in finder.find()
    ]
    return SkillIndex(
        skills=sorted(skills, key=lambda skill: skill.name),
        problems=sorted(finder.problems, key=lambda problem: (problem.path, problem.line)),
    )


def use_skill(workspace: str, name: str) -> ComputeOutcome:
    """Return a `SkillContent`; a compute function.

    Raises:
        ComputeError: SKILL_NOT_FOUND, naming the skills that exist; or the reason of the workspace's error.
    """
    try:
        with open_directory(workspace) as root:
            finder = _Finder(root)
            names = []
            for path, file in finder.find():
                if file.name == name:
                    return ComputeOutcome(value=SkillContent(path=path, content=file.content))
                names.append(file.name)
    except HarnessError as error:
        raise ComputeError(error.reason, error.message) from error
    raise ComputeError("SKILL_NOT_FOUND", _unknown_skill(name, sorted(names), finder.problems))


def _unknown_skill(name: str, names: Sequence[str], problems: Sequence[operation_pb2.SkillProblem]) -> str:
    known = f"there are: {', '.join(names)}" if names else "the workspace has no skill"
    broken = [problem for problem in problems if not problem.is_loaded]
    if not broken:
        return f"no skill is named {name!r}; {known}"
    first = broken[0]
    return (
        f"no skill is named {name!r}; {known}; {len(broken)} could not be loaded, the first is "
        f"{first.path} (line {first.line}): {first.reason}"
    )


class _Finder:
    """Walks the skill folders in the order of their names, and gathers the problems."""

    def __init__(self, root: int) -> None:
        self._root = root
        self.problems: list[operation_pb2.SkillProblem] = []

    def find(self) -> Iterator[tuple[str, SkillFile]]:
        """Yield each usable skill with its path; the first of a name wins."""
        first_paths: dict[str, str] = {}
        for folder in self._folders():
            path = f"{SKILLS_DIRECTORY}/{folder}/{SKILL_FILE}"
            parsed = self._read(path)
            if parsed is None:
                continue
            if isinstance(parsed, SkillFault):
                self._report(path, parsed)
            elif parsed.name in first_paths:
                reason = f"the name {parsed.name!r} is taken by {first_paths[parsed.name]}"
                self._report(path, SkillFault(line=1, reason=reason))
            else:
                first_paths[parsed.name] = path
                for repair in parsed.repairs:
                    self._report(path, repair, is_loaded=True)
                yield path, parsed

    def _folders(self) -> Sequence[str]:
        try:
            names = list_directory(self._root, SKILLS_DIRECTORY)
        except NotFoundError:
            return ()
        except HarnessError as error:
            self._report(SKILLS_DIRECTORY, SkillFault(line=0, reason=error.message))
            return ()
        folders = [name for name in names if not name.startswith(".")]
        if len(folders) > MAX_FOLDERS:
            reason = f"there are {len(folders):,} entries; only the first {MAX_FOLDERS} were read"
            self._report(SKILLS_DIRECTORY, SkillFault(line=0, reason=reason), is_loaded=True)
        return folders[:MAX_FOLDERS]

    def _read(self, path: str) -> SkillFile | SkillFault | None:
        """Return what the file holds; None where there is no such file."""
        try:
            path.encode()
        except UnicodeEncodeError:
            return SkillFault(line=0, reason="the folder's name is not UTF-8")
        try:
            return parse_skill(read_file(self._root, path, max_bytes=MAX_FILE_BYTES))
        except NotFoundError:
            if not self._is_dangling_link(path):
                return None
            return SkillFault(line=0, reason="the file is a link to something that does not exist")
        except HarnessError as error:
            return SkillFault(line=0, reason=error.message)

    def _is_dangling_link(self, path: str) -> bool:
        try:
            os.stat(path, dir_fd=self._root, follow_symlinks=False)
        except OSError:
            return False
        return True

    def _report(self, path: str, fault: SkillFault, *, is_loaded: bool = False) -> None:
        self.problems.append(
            operation_pb2.SkillProblem(
                path=path.encode("utf-8", "surrogateescape").decode("utf-8", "replace"),
                line=fault.line,
                reason=fault.reason.encode("utf-8", "replace").decode(),
                is_loaded=is_loaded,
            )
        )
