"""The coordinator's contract; the implementation is opened by `harness.app`."""

from harness.coordinator.coordinator import Coordinator, CoordinatorConfig

__all__ = ["Coordinator", "CoordinatorConfig"]
