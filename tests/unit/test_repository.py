"""What holds for the repository as a whole: its targets, its lock, and that it names no place but itself."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]

TARGETS = {
    *("help", "install", "demo", "proto", "docs", "fmt", "lint", "types", "check", "breaking", "bench", "bench-quick"),
    *(
        "lock",
        "clean",
        "test",
        "test-unit",
        "test-contract",
        "test-integration",
        "test-e2e",
        "test-faults",
        "test-long",
        "kill-matrix",
        "certs",
        "image",
        "up",
        "down",
    ),
}

# Written so that no pattern matches itself.
FOREIGN_PLACES = re.compile(
    r"pypi\.(?:org|python)|pythonhosted\.(?:org)|npmjs\.(?:org|com)|(?:deb|security)\.debian\.(?:org)"
    r"|(?<!emit-)(?:index|registry)[-_]url *[= ]|://[^/\s'\"]+@(?!127\.)[\w-]+\.\w|/(?:root|Users)/\w|/home/(?!agent\b|x\b)\w",
    re.IGNORECASE,
)


def tracked_files() -> list[Path]:
    """Return every file that git would commit, new ones among them; outside a checkout, every file of the source."""
    if not (ROOT / ".git").exists():
        hidden_or_built = {".venv", "build", "dist", "__pycache__"}
        return [path for path in ROOT.rglob("*") if path.is_file() and not hidden_or_built & set(path.parts)]
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    return [ROOT / name for name in listing.stdout.split("\0") if name and (ROOT / name).is_file()]


def locked_versions() -> dict[str, str]:
    """Return the version in requirements.lock of each distribution, by canonical name."""
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    pins = [line.split(";")[0].strip(" \\") for line in lines if line and line[0] not in " #"]
    return {canonicalize_name(name): version for name, version in (pin.split("==") for pin in pins)}


def declared_requirements() -> list[Requirement]:
    """Return what pyproject.toml asks for: to run, to measure, to develop and to build."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    declared = [
        *project["project"]["dependencies"],
        *project["project"]["optional-dependencies"]["bench"],
        *project["dependency-groups"]["dev"],
        *project["build-system"]["requires"],
    ]
    return [Requirement(text) for text in declared]


def test_help_lists_every_target() -> None:
    answer = subprocess.run(["make", "--no-print-directory"], cwd=ROOT, check=True, capture_output=True, text=True)
    assert {line.split()[1] for line in answer.stdout.splitlines()} == TARGETS


def test_no_file_names_a_registry_or_a_machine() -> None:
    # The place of a checkout directly below the root says nothing: its name may be any word.
    checkout = f"{ROOT}/" if len(ROOT.parts) > 2 else "\0"
    found = []
    for path in tracked_files():
        for number, line in enumerate(path.read_bytes().decode(errors="replace").splitlines(), start=1):
            if FOREIGN_PLACES.search(line) or checkout in line:
                found.append(f"{path.relative_to(ROOT)}:{number}: {line[:200]}")
    assert found == []


def test_the_lock_holds_hashes_and_no_hosts() -> None:
    text = (ROOT / "requirements.lock").read_text()
    assert "://" not in text
    assert not re.search(r"^--", text, re.MULTILINE)
    entries = re.split(r"\n(?=\w)", text)
    assert [entry.splitlines()[0] for entry in entries if "--hash=sha256:" not in entry] == []


@pytest.mark.parametrize("requirement", declared_requirements(), ids=str)
def test_the_lock_holds_what_the_project_asks_for(requirement: Requirement) -> None:
    assert requirement.specifier.contains(locked_versions()[canonicalize_name(requirement.name)])


def test_every_task_has_an_owner() -> None:
    # The linter sees asyncio.create_task; on a loop object only the text tells.
    offenders = [
        path.relative_to(ROOT)
        for path in tracked_files()
        if path.suffix == ".py" and re.search(r"loop(?:\(\))?\.create_task\(", path.read_text())
    ]
    assert offenders == []
