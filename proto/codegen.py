"""Generates the Python of the schemas, and is the build backend that does so for every install, wheel and sdist.

Owns everything under `proto/unreal_agent` but the schemas themselves. A schema's package equals the Python package,
so what protoc writes is imported as it is and nothing is rewritten. Run as a program it is `make proto`; as a backend
it wraps setuptools' own and generates first.
"""

from __future__ import annotations

import filecmp
import sys
from importlib.metadata import distribution
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from setuptools import build_meta

ROOT = Path(__file__).resolve().parent
PACKAGE = ROOT / "unreal_agent"

get_requires_for_build_wheel = build_meta.get_requires_for_build_wheel
get_requires_for_build_sdist = build_meta.get_requires_for_build_sdist
get_requires_for_build_editable = build_meta.get_requires_for_build_editable


def generate() -> None:
    """Make the modules, stubs and package markers equal to the schemas; those of a schema that went away go too.

    Each file that differs is replaced at once, whole, and no other is touched: a program that imports them meanwhile
    never sees half a module, and the caches of type checkers stay warm.

    Raises:
        SystemExit: protoc refused a schema; it has told why on stderr.
    """
    # Imported late: the hooks above must answer before the build's requirements are installed.
    from grpc_tools import protoc

    schemas = sorted(path.relative_to(ROOT) for path in PACKAGE.rglob("*.proto"))
    with TemporaryDirectory(prefix=".codegen-", dir=ROOT) as scratch:
        built = Path(scratch)
        # The plugins are named by path, because the virtual environment that runs this need not be on PATH.
        scripts = {path.name: path.locate() for path in distribution("mypy-protobuf").files or []}
        plugins = [f"--plugin={name}={scripts[name]}" for name in ("protoc-gen-mypy", "protoc-gen-mypy_grpc")]
        outputs = [f"--{kind}_out={built}" for kind in ("python", "mypy", "grpc_python", "mypy_grpc")]
        includes = [f"-I{ROOT}", f"-I{files('grpc_tools') / '_proto'}"]
        if protoc.main(["protoc", *includes, *plugins, *outputs, *map(str, schemas)]):
            raise SystemExit("protoc failed; its message is above")
        (built / PACKAGE.name / "py.typed").touch()
        for folder in {parent for schema in schemas for parent in schema.parents if parent.name}:
            (built / folder / "__init__.py").touch()
        _publish(built)


def _publish(built: Path) -> None:
    """Move what differs to its place below ROOT, then remove what was not built."""
    wanted = {path.relative_to(built) for path in built.rglob("*") if path.is_file()}
    for name in sorted(wanted):
        if not (ROOT / name).is_file() or not filecmp.cmp(built / name, ROOT / name, shallow=False):
            (built / name).replace(ROOT / name)
    for path in PACKAGE.rglob("*.py*"):
        if path.suffix in (".py", ".pyi") and path.relative_to(ROOT) not in wanted:
            path.unlink()


def prepare_metadata_for_build_wheel(*args: Any, **kwargs: Any) -> str:
    """Generate, then do as setuptools does: it looks for packages here already."""
    generate()
    return build_meta.prepare_metadata_for_build_wheel(*args, **kwargs)


def prepare_metadata_for_build_editable(*args: Any, **kwargs: Any) -> str:
    """Generate, then do as setuptools does."""
    generate()
    return build_meta.prepare_metadata_for_build_editable(*args, **kwargs)


def build_wheel(*args: Any, **kwargs: Any) -> str:
    """Generate, then do as setuptools does."""
    generate()
    return build_meta.build_wheel(*args, **kwargs)


def build_sdist(*args: Any, **kwargs: Any) -> str:
    """Generate, then do as setuptools does."""
    generate()
    return build_meta.build_sdist(*args, **kwargs)


def build_editable(*args: Any, **kwargs: Any) -> str:
    """Generate, then do as setuptools does."""
    generate()
    return build_meta.build_editable(*args, **kwargs)


if __name__ == "__main__":
    sys.exit(generate())
