"""What every test shares: how hypothesis behaves. Fixtures live beside the tests that use them, or in tests/support."""

from __future__ import annotations

import os

from hypothesis import settings

# No deadline: a busy machine stalls for longer than any example takes. In CI a run repeats the one before.
settings.register_profile("development", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "development")
