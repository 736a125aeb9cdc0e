"""Describes the machine and the versions that a run was made on; names neither it nor a path of it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sqlite3
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import psutil

PACKAGES = ("unreal-agent", "grpcio", "protobuf", "httpx")


def describe() -> dict[str, str | float]:
    """Return what a reader needs to judge figures, the load before the run among it."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "processor": _processor(),
        "architecture": platform.machine(),
        "cores": os.cpu_count() or 0,
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "file_system": _file_system(Path(tempfile.gettempdir())),
        "load_before": round(os.getloadavg()[0], 2),
        "python": sys.version.split()[0],
        "sqlite": sqlite3.sqlite_version,
        **{package: importlib.metadata.version(package) for package in PACKAGES},
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _file_system(path: Path) -> str:
    holders = [one for one in psutil.disk_partitions(all=True) if path.is_relative_to(one.mountpoint)]
    return max(holders, key=lambda one: len(one.mountpoint)).fstype if holders else "unknown"
