"""Reasoning in chat streams: three unofficial forms, kept so that it can go back as it came. Pure."""

from __future__ import annotations

from harness.llm import json_text, wire
from unreal_agent.llm.v1 import llm_pb2

WIRE_FORMAT = "openai-chat"

_TEXT_FIELDS = ("reasoning_content", "reasoning")
_DETAILS_FIELD = "reasoning_details"
_JOINED = ("text", "summary", "data")
"""Members of a detail whose pieces are joined; of others the last word counts."""


class ChatReasoning:
    """The reasoning of one response."""

    def __init__(self) -> None:
        """Start with none."""
        self._field = ""
        self._text = wire.TextPieces()
        self._details: list[dict[str, object]] = []

    def add(self, delta: wire.JSONObject) -> str:
        """Take a delta and return the readable reasoning in it; empty if none."""
        details = wire.objects(delta.get(_DETAILS_FIELD))
        for detail in details:
            self._add_detail(detail)
        # Some servers send the same text under both names.
        for name in (self._field,) if self._field else _TEXT_FIELDS:
            piece = wire.text(delta.get(name))
            if piece:
                self._field = name
                return self._text.add(piece)
        if self._field:
            return ""
        return self._text.add("".join(wire.text(detail.get("text") or detail.get("summary")) for detail in details))

    def item(self) -> llm_pb2.Reasoning | None:
        """Return the reasoning, or None if there was none."""
        if self._details:
            raw: dict[str, object] = {_DETAILS_FIELD: self._details}
        elif self._field:
            raw = {self._field: self._text.whole()}
        else:
            return None
        raw_json = json_text.valid_text(json_text.write(raw))
        return llm_pb2.Reasoning(summary=self._text.whole(), raw_json=raw_json, wire_format=WIRE_FORMAT)

    def _add_detail(self, detail: wire.JSONObject) -> None:
        last = self._details[-1] if self._details else None
        if last is None or any(last.get(name) != detail.get(name) for name in ("type", "index")):
            self._details.append(dict(detail))
            return
        for name, value in detail.items():
            before = last.get(name)
            if name in _JOINED and isinstance(value, str) and isinstance(before, str):
                last[name] = before + value
            elif value is not None or name not in last:
                last[name] = value


def replayed(reasoning: llm_pb2.Reasoning) -> dict[str, object]:
    """Return the members that an assistant message carries for its reasoning; empty for another format's."""
    if reasoning.wire_format != WIRE_FORMAT:
        return {}
    members = json_text.read_object(reasoning.raw_json) or {}
    return {name: value for name, value in members.items() if name in (*_TEXT_FIELDS, _DETAILS_FIELD)}
