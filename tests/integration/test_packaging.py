"""A source distribution builds anywhere, and the wheel built from it holds all that the installed project needs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCHEMAS = [path.relative_to(ROOT / "proto") for path in (ROOT / "proto" / "unreal_agent").rglob("*.proto")]


def _run(*command: str | Path, cwd: Path, **environment: str) -> None:
    done = subprocess.run(
        [sys.executable, *command], cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_wheel_from_source_distribution_is_complete(tmp_path: Path) -> None:
    source = tmp_path / "source"
    # As in a fresh checkout: nothing that is generated or ignored.
    ignored = shutil.ignore_patterns(".*", "*_pb2*", "__pycache__", "*.egg-info", "build", "dist", "tests")
    shutil.copytree(ROOT, source, ignore=ignored)
    for marker in (source / "proto").rglob("__init__.py"):
        marker.unlink()

    _run("-c", f"import codegen; codegen.build_sdist({str(tmp_path)!r})", cwd=source, PYTHONPATH="proto")
    (archive,) = tmp_path.glob("*.tar.gz")
    options: list[str | Path] = ["--no-build-isolation", "--no-deps", "--no-index", "--quiet", "--wheel-dir", tmp_path]
    _run("-m", "pip", "wheel", *options, archive, cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")

    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {"unreal_agent/py.typed", "harness/py.typed", "clients/cli/__init__.py", "services/__init__.py"}
    for schema in SCHEMAS:
        generated = schema.with_suffix("")
        expected |= {str(schema), f"{generated}_pb2.py", f"{generated}_pb2.pyi", f"{generated}_pb2_grpc.py"}
        expected |= {f"{generated}_pb2_grpc.pyi", f"{generated.parent}/__init__.py"}
    assert expected <= names
    assert not {name for name in names if name.startswith(("tests/", "proto/"))}
    # What stands on the path comes before the editable installation that runs this test.
    program = f"import sys; sys.path.insert(0, {str(wheel)!r}); import {{}} as module; assert '.whl' in module.__file__"
    _run("-c", program.format("unreal_agent.session.v1.session_pb2"), cwd=tmp_path)
    _run("-c", program.format("harness"), cwd=tmp_path)
