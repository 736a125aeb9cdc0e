"""Whether what a state directory holds is sound. Prints nothing; the store and the manager look, each into its own."""

from __future__ import annotations

from clients.cli.doctor import Finding, Level
from clients.cli.state_dir import StateDirectory


def check_state(state):
    return []


def store_format(state):
    return Finding(level=Level.GOOD, subject="store", text="x")
