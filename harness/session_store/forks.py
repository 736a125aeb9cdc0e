"""What a fork, and an import, writes of its own. Pure; shared by every engine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from harness.clock import timestamp
from harness.session_store.session_store import ITEM_SCHEMA_VERSION
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.session.v1 import item_pb2, session_pb2

_FORKED_TEXT: Final = (
    "Not carried over: this call was still running where the conversation was forked. Its result stays in the original"
    " conversation; call the tool again if you need it."
)
_IMPORTED_TEXT: Final = (
    "Not carried over: this call was still running when the conversation was moved to another store. What it did may"
    " have had its effect; look before calling the tool again."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenCall:
    """A call without final status."""

    turn_id: str
    call_id: str


def fork_items(
    origin: session_pb2.ForkOrigin, request_id: str, open_calls: Iterable[OpenCall], revision: int, now: datetime
) -> list[item_pb2.Item]:
    """Return a fork's first own items: the fork, and a final status for each call that is open at the cut."""
    fork = item_pb2.Item(fork=item_pb2.Fork(origin=origin, request_id=request_id))
    statuses = [_not_carried_over(call, _FORKED_TEXT) for call in open_calls]
    return _stamped([fork, *statuses], origin.cut_sequence, revision, now)


def closing_items(
    open_calls: Iterable[OpenCall], last_sequence: int, revision: int, now: datetime
) -> list[item_pb2.Item]:
    """Return what ends the open calls of an imported session."""
    statuses = [_not_carried_over(call, _IMPORTED_TEXT) for call in open_calls]
    return _stamped(statuses, last_sequence, revision, now)


def ancestry_at(
    parent_session_id: str, parent_ancestry: Iterable[session_pb2.ForkOrigin], cut_sequence: int
) -> list[session_pb2.ForkOrigin]:
    """Return a fork's whole ancestry, the direct parent first; no cut lies behind a nearer one."""
    ancestry = [session_pb2.ForkOrigin(parent_session_id=parent_session_id, cut_sequence=cut_sequence)]
    for origin in parent_ancestry:
        ancestry.append(
            session_pb2.ForkOrigin(
                parent_session_id=origin.parent_session_id,
                cut_sequence=min(origin.cut_sequence, ancestry[-1].cut_sequence),
            )
        )
    return ancestry


def _not_carried_over(call: OpenCall, text: str) -> item_pb2.Item:
    result = item_pb2.CallResult(
        outcome=item_pb2.CALL_OUTCOME_NOT_CARRIED_OVER,
        parts=[llm_pb2.ContentPart(text=llm_pb2.TextPart(text=text))],
    )
    return item_pb2.Item(
        tool_call_status=item_pb2.ToolCallStatus(turn_id=call.turn_id, call_id=call.call_id, result=result)
    )


def _stamped(items: list[item_pb2.Item], last_sequence: int, revision: int, now: datetime) -> list[item_pb2.Item]:
    for sequence, item in enumerate(items, start=last_sequence + 1):
        item.schema_version = ITEM_SCHEMA_VERSION
        item.sequence = sequence
        item.revision = revision
        item.record_time.CopyFrom(timestamp(now))
    return items
