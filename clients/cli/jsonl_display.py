"""A session for programs: one JSON line per item, and nothing else."""

from __future__ import annotations

import json
from datetime import datetime

from google.protobuf import json_format
from google.protobuf.message import Message

from clients.cli.display import Heading, Summary
from clients.cli.view import SessionView
from unreal_agent.coordinator.v1 import coordinator_service_pb2 as coordinator_pb2


def json_line(message: Message) -> str:
    """Return a message in the JSON form of protobuf, field names as in the schema, as one line without its end.

    Shape: {"schema_version": 1, "sequence": "7", "record_time": "2026-11-30T12:00:00Z", "turn": {...}}.
    """
    fields = json_format.MessageToDict(message, preserving_proto_field_name=True)
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":"))


class JsonlDisplay:
    """Shows each item of a run once, in sequence."""

    def __init__(self, view: SessionView) -> None:
        """Keep a view beside, which knows how far the session is."""
        self._view = view
        self._last_sequence = view.last_sequence
        self._lines: list[str] = []

    @property
    def tick_s(self) -> float | None:
        return None

    def begin(self, heading: Heading) -> None:
        """Nothing but items is shown."""

    def receive(self, response: coordinator_pb2.WatchSessionResponse) -> None:
        self._view.feed(response)
        for item in response.change.items:
            if item.sequence > self._last_sequence:
                self._last_sequence = item.sequence
                self._lines.append(json_line(item))

    def notice(self, text: str) -> None:
        """Nothing but items is shown."""

    def set_typed(self, text: str | None) -> None:
        """Nothing but items is shown."""

    def redraw(self) -> None:
        """Nothing is drawn."""

    def erase(self) -> str:
        return ""

    def end(self, summary: Summary) -> None:
        """Nothing but items is shown."""

    def frame(self, now: datetime) -> str:
        lines, self._lines = self._lines, []
        return "".join(f"{line}\n" for line in lines)
