"""What the `scripted` provider plays. Read from files by `script_file`, from recordings by `recording`."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from unreal_agent.llm.v1 import llm_pb2

MAX_SCRIPT_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptError:
    """A failure that an entry plays."""

    error_class: llm_pb2.ErrorClass.ValueType
    retry_after_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptEntry:
    """One answer."""

    place: str
    """Where it stands, for messages: "responses[3]"."""

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[llm_pb2.ToolCall, ...] = ()
    stop_reason: llm_pb2.StopReason.ValueType = llm_pb2.STOP_REASON_COMPLETE
    delay_s: float = 0.0
    usage: llm_pb2.Usage | None = None
    error: ScriptError | None = None
    expect: re.Pattern[str] | None = None
    output: llm_pb2.ModelOutput | None = None
    """A recorded response, which is played as it was; then nothing above says anything."""

    failure: llm_pb2.Failure | None = None
    """A recorded failure, likewise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A whole script."""

    responses: tuple[ScriptEntry, ...] = field(default=())
    """Answers to regular turns, in order."""

    compactions: tuple[ScriptEntry, ...] = field(default=())
    """Answers to compactions, in order."""
