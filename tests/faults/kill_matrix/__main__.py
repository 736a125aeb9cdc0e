"""`python -m tests.faults.kill_matrix`: kills, checks, prints the table; exits with 1 where anything is wrong."""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.faults.kill_matrix import report, victims
from tests.faults.kill_matrix.matrix import run_matrix


def main(arguments: Sequence[str]) -> int:
    """Run the matrix and print what it found."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.kill_matrix", description=__doc__)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--systems", type=int, default=2, help="how many are under fire side by side")
    parser.add_argument("--sessions", type=int, default=4, help="of each system")
    parser.add_argument("--directory", type=Path, help="where to leave everything; default: removed if all is well")
    options = parser.parse_args(arguments)
    directory = options.directory or Path(tempfile.mkdtemp(prefix="kill-matrix-"))
    print(f"{options.kills} kills, seed {options.seed}, in {directory}", flush=True)
    begin_s = time.monotonic()
    matrix = asyncio.run(
        run_matrix(
            directory, kills=options.kills, seed=options.seed, systems=options.systems, sessions=options.sessions
        )
    )
    for line in report.table(matrix.kills, matrix.verdicts, victims.points()):
        print(line)
    print("", *report.totals(matrix.kills, matrix.verdicts), sep="\n")
    print(f"in {time.monotonic() - begin_s:.0f} s")
    violations = matrix.violations
    for violation in violations:
        print(f"VIOLATION {violation}")
    if violations:
        print(f"everything is left in {directory}; seed {options.seed}")
        return 1
    if options.directory is None:
        shutil.rmtree(directory, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
