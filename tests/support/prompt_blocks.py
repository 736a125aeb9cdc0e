"""What a provider's prompt cache sees of a request body, in any wire format: a list of blocks, cache markers aside."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

CACHE_MARKER = "cache_control"


def blocks_of(body: Mapping[str, Any]) -> list[str]:
    """Return tools and instructions as the first block, then each block of the conversation with its role.

    Neighbouring messages of one role are one message to some formats, so a message's blocks count one by one.
    """
    plain = _without_markers(body)
    conversation = plain.get("messages", plain.get("input"))
    head = {name: plain[name] for name in ("tools", "system", "instructions") if name in plain}
    return [_text(head), *(_text(block) for entry in conversation for block in _split(entry))]


def assert_begins(earlier: Mapping[str, Any], later: Mapping[str, Any]) -> None:
    """Fail where the blocks of an earlier request do not begin those of a later one."""
    first, second = blocks_of(earlier), blocks_of(later)
    for place, (before, after) in enumerate(zip(first, second, strict=False)):
        assert before == after, f"block {place} changed"
    assert len(first) <= len(second), "blocks are missing"


def _split(entry: Mapping[str, Any]) -> Iterator[Any]:
    content = entry.get("content")
    if not isinstance(content, list):
        yield entry
        return
    rest = {name: value for name, value in entry.items() if name != "content"}
    for block in content:
        yield [entry.get("role"), block]
    if set(rest) - {"role", "type"}:
        yield rest


def _without_markers(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_markers(one) for name, one in value.items() if name != CACHE_MARKER}
    if isinstance(value, list):
        return [_without_markers(one) for one in value]
    return value


def _text(value: object) -> str:
    return json.dumps(value, sort_keys=True)
