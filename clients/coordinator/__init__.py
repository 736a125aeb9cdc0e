"""Client of the coordinator's service."""

from clients.coordinator.coordinator_client import CoordinatorClient

__all__ = ["CoordinatorClient"]
