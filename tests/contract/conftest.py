"""Lets the assertions of the reusable suites explain themselves."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("tests.contract.session_store_suite")
