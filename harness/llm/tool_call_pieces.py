"""Joins the pieces of tool calls that a chat stream sends, whatever way a server numbers them. Pure.

Servers differ: indices may be missing, or all 0; IDs come once, on each piece, or never; names may be repeated.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from harness.llm import json_text, wire
from unreal_agent.llm.v1 import llm_pb2


@dataclass(slots=True, kw_only=True, eq=False)
class _Call:
    """A call under construction."""

    place: int
    call_id: str = ""
    name: str = ""
    arguments: wire.TextPieces = field(default_factory=wire.TextPieces)
    last_character: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceAdded:
    """What one piece added, to which call."""

    place: int
    name: str
    arguments: str


class ToolCallPieces:
    """The calls of one response."""

    def __init__(self) -> None:
        """Start with no call."""
        self._calls: list[_Call] = []
        self._by_index: dict[int, list[_Call]] = {}

    def add(self, piece: wire.JSONObject) -> PieceAdded:
        """Take one element of a delta's `tool_calls`."""
        function = wire.mapping(piece.get("function"))
        call_id = wire.text(piece.get("id"))
        name = wire.text(function.get("name"))
        arguments = wire.arguments_text(function.get("arguments"))
        index = piece.get("index")
        if not isinstance(index, int) or isinstance(index, bool):
            index = None
        call = self._find(index, call_id)
        if call is None or (name and _is_another_call(call, arguments)):
            call = self._start(index)
        call.call_id = call.call_id or call_id
        _name(call, name)
        if arguments.strip():
            call.last_character = arguments.rstrip()[-1]
        return PieceAdded(
            place=call.place, name=json_text.valid_text(call.name), arguments=call.arguments.add(arguments)
        )

    def calls(self) -> list[llm_pb2.ToolCall]:
        """Return the calls in the order in which they began, IDs and arguments as they came."""
        return [
            llm_pb2.ToolCall(
                call_id=json_text.valid_text(call.call_id),
                name=json_text.valid_text(call.name),
                arguments_json=call.arguments.whole(),
            )
            for call in self._calls
        ]

    def _find(self, index: int | None, call_id: str) -> _Call | None:
        """Return the call that a piece continues: by index, and by ID where an index is used again."""
        candidates = self._calls if index is None else self._by_index.get(index, [])
        if not candidates:
            return None
        latest = candidates[-1]
        if not call_id or not latest.call_id or latest.call_id == call_id:
            return latest
        return next((call for call in reversed(candidates) if call.call_id == call_id), None)

    def _start(self, index: int | None) -> _Call:
        call = _Call(place=len(self._calls))
        self._calls.append(call)
        if index is not None:
            self._by_index.setdefault(index, []).append(call)
        return call


def _is_another_call(call: _Call, arguments: str) -> bool:
    """Tell whether a named piece begins a call although its index and ID are used: the call there is complete."""
    if call.last_character != "}" or not arguments.lstrip().startswith("{"):
        return False
    return json_text.read_object(call.arguments.whole()) is not None


def _name(call: _Call, name: str) -> None:
    """Add to a name that comes once, in pieces, or again with each piece."""
    if not name or name == call.name or call.last_character:
        return
    call.name = name if name.startswith(call.name) else call.name + name
