"""Runs the operation manager as a process."""

from __future__ import annotations

import sys

from services._server.main import run_service
from services.operation_manager.app import PROGRAM

if __name__ == "__main__":
    sys.exit(run_service(PROGRAM, sys.argv[1:]))
