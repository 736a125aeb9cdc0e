"""Generates the Python of the schemas, and is the build backend that does so for every install, wheel and sdist.

Owns everything under `proto/unreal_agent` but the schemas themselves. A schema's package equals the Python package,
so what protoc writes is imported as it is and nothing is rewritten. Run as a program it is `make proto`; as a backend
it wraps that of setuptools and generates first.
"""

from __future__ import annotations

import filecmp
from collections.abc import Callable
from functools import wraps
from importlib.metadata import distribution
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory

from setuptools import build_meta

ROOT = Path(__file__).resolve().parent
PACKAGE = ROOT / "unreal_agent"


def generate() -> None:
    """Make modules, stubs and package markers equal to the schemas; those of a schema that went away go too.

    Each file that differs is replaced at once, whole, and no other is touched: a program that imports them meanwhile
    never sees half a module, and the caches of type checkers stay warm.

    Raises:
        SystemExit: protoc refused a schema; it has told why on stderr.
    """
    # Imported late: a build asks for requirements before grpc_tools is there.
    from grpc_tools import protoc

    schemas = sorted(path.relative_to(ROOT) for path in PACKAGE.rglob("*.proto"))
    with TemporaryDirectory(prefix=".codegen-", dir=ROOT) as scratch:
        built = Path(scratch)
        # Plugins are named by path: the environment that runs this need not be on PATH.
        scripts = {path.name: path.locate() for path in distribution("mypy-protobuf").files or []}
        plugins = [f"--plugin={name}={scripts[name]}" for name in ("protoc-gen-mypy", "protoc-gen-mypy_grpc")]
        outputs = [f"--{kind}_out={built}" for kind in ("python", "grpc_python")]
        outputs += [f"--{kind}_out=quiet:{built}" for kind in ("mypy", "mypy_grpc")]
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


def _generating(hook: Callable[..., str]) -> Callable[..., str]:
    """Let a hook of setuptools find the generated packages: it looks for packages before it builds anything."""

    @wraps(hook)
    def generate_first(*args: object, **kwargs: object) -> str:
        generate()
        return hook(*args, **kwargs)

    return generate_first


get_requires_for_build_wheel = build_meta.get_requires_for_build_wheel
get_requires_for_build_sdist = build_meta.get_requires_for_build_sdist
get_requires_for_build_editable = build_meta.get_requires_for_build_editable
prepare_metadata_for_build_wheel = _generating(build_meta.prepare_metadata_for_build_wheel)
prepare_metadata_for_build_editable = _generating(build_meta.prepare_metadata_for_build_editable)
build_wheel = _generating(build_meta.build_wheel)
build_sdist = _generating(build_meta.build_sdist)
build_editable = _generating(build_meta.build_editable)

if __name__ == "__main__":
    generate()
