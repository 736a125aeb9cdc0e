"""Whether what a state directory holds is sound. Prints nothing; the store and the manager look, each into its own."""

from __future__ import annotations
