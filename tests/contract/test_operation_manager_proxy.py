"""The proxy keeps the contract of the operation managers, over a manager that is dialled and one that dials."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from clients.operation_manager import ProxyOperationManager
from harness.operations.manager_settings import LocalManagerSettings
from tests.contract.operation_manager_suite import QUICK, OperationManagerSuite
from tests.support.manager_service import attached_manager, served_manager


class TestProxyOperationManager(OperationManagerSuite):
    @asynccontextmanager
    async def open(
        self, state_directory: Path, settings: LocalManagerSettings = QUICK
    ) -> AsyncIterator[ProxyOperationManager]:
        async with served_manager(state_directory, settings) as (_, proxy):
            yield proxy


class TestAttachedOperationManager(OperationManagerSuite):
    @asynccontextmanager
    async def open(
        self, state_directory: Path, settings: LocalManagerSettings = QUICK
    ) -> AsyncIterator[ProxyOperationManager]:
        async with attached_manager(state_directory, settings) as (_, proxy):
            yield proxy
