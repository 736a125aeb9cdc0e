"""The operation managers' contract; implementations are imported from their own modules."""

from harness.operations.operations import TERMINAL_STATUSES, OperationManager, Step, StepMachine, is_terminal

__all__ = ["TERMINAL_STATUSES", "OperationManager", "Step", "StepMachine", "is_terminal"]
