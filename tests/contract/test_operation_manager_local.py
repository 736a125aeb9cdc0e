"""The local operation manager keeps the contract."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from pathlib import Path

from harness.operations.local_manager import LocalOperationManager
from harness.operations.manager_settings import LocalManagerSettings
from harness.operations.operations import OperationManager
from tests.contract.operation_manager_suite import QUICK, OperationManagerSuite


class TestLocalOperationManager(OperationManagerSuite):
    def open(
        self, state_directory: Path, settings: LocalManagerSettings = QUICK
    ) -> AbstractAsyncContextManager[OperationManager]:
        return LocalOperationManager.open(state_directory, name="local", settings=settings)
