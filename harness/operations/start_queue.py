"""Which operation starts next: bounded in number, fair between sessions, in order within one. Pure bookkeeping."""

from __future__ import annotations

from collections import OrderedDict, deque


class StartQueue:
    """Operations that wait for a slot, and those that hold one."""

    def __init__(self, slots: int) -> None:
        """Take the number of operations that may hold a slot at once."""
        self._slots = slots
        self._waiting: OrderedDict[str, deque[str]] = OrderedDict()
        self._holders: set[str] = set()

    @property
    def holders(self) -> int:
        """Operations that hold a slot."""
        return len(self._holders)

    @property
    def waiting(self) -> int:
        """Operations that wait for one."""
        return sum(map(len, self._waiting.values()))

    def put(self, session_id: str, operation_id: str) -> None:
        """Let an operation wait behind those of its session."""
        self._waiting.setdefault(session_id, deque()).append(operation_id)

    def hold(self, operation_id: str) -> None:
        """Give a slot without asking for the bound: the operation ran before a restart."""
        self._holders.add(operation_id)

    def release(self, operation_id: str) -> None:
        """Give a slot back; harmless where none is held."""
        self._holders.discard(operation_id)

    def take(self) -> str | None:
        """Return the operation that starts now and holds a slot from here on, or None."""
        if len(self._holders) >= self._slots or not self._waiting:
            return None
        session_id, operations = self._waiting.popitem(last=False)
        operation_id = operations.popleft()
        if operations:
            # The session goes to the end: one operation of each in turn.
            self._waiting[session_id] = operations
        self._holders.add(operation_id)
        return operation_id
