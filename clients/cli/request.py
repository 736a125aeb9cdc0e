"""What `run` is asked to do: read from options, a JSON file or standard input, checked before anything is opened."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from clients.cli.failures import UsageError, os_error_text

EFFORTS = ("low", "medium", "high", "xhigh", "max")

FIELDS = (
    "prompt",
    "messages",
    "system_prompt",
    "model",
    "provider",
    "session_id",
    "effort",
    "tools",
    "max_turns",
    "workspace",
    "manager",
)
MESSAGE_FIELDS = ("content", "message_id")

_HALF_PAIR = re.compile("[\ud800-\udfff]")
"""JSON can write it, UTF-8 can't."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One input to submit."""

    content: str
    input_id: str
    """The same ID with the same content again is a duplicate: it changes nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """What to run. None: not said, so that a default or what the session has applies."""

    messages: tuple[Message, ...] = ()
    """Empty: go on with what the session left unfinished."""

    system_prompt: str | None = None
    model: str | None = None
    provider: str | None = None
    session_id: str | None = None
    effort: str | None = None
    tools: tuple[str, ...] | None = None
    max_turns: int | None = None
    workspace: str | None = None
    manager: str | None = None
    """The operation manager that runs the session's commands; needed where the coordinator has several."""


def new_input_id() -> str:
    """Return an ID that no other input has."""
    return str(uuid.uuid4())


def prompt_request(prompt: str, input_id: str | None) -> RunRequest:
    """Return the request that `-p` makes.

    Raises:
        UsageError: The prompt is blank.
    """
    return RunRequest(messages=(Message(content=_not_blank(prompt, "-p"), input_id=input_id or new_input_id()),))


def parse_request(text: str, source: str, input_id: str | None) -> RunRequest:
    """Return the request that JSON text makes; `source` names it in errors.

    Shape: {"prompt": "Fix the test."} or {"messages": [{"content": "Fix the test.", "message_id": "m1"}]}, and any of
    "system_prompt", "model", "provider", "session_id", "effort", "manager": strings; "tools": ["Bash"];
    "max_turns": 10; "workspace": "/path".

    Raises:
        UsageError: It is no such JSON; the message names the field or the place.
    """
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise UsageError(
            f"the request is not JSON ({source}: {error})", 'Write for example {"prompt": "…"}.'
        ) from error
    except RecursionError as error:
        raise UsageError(
            f"the request is nested too deeply ({source})", 'Write for example {"prompt": "…"}.'
        ) from error
    if not isinstance(fields, dict):
        raise UsageError(f"the request is not a JSON object ({source})", 'Write for example {"prompt": "…"}.')
    _refuse_unknown(fields, FIELDS, source)
    request = RunRequest(
        messages=_messages(fields, source, input_id),
        tools=_tools(fields, source),
        max_turns=_max_turns(fields, source),
        **{
            name: _string(fields, name, source)
            for name in ("system_prompt", "model", "provider", "session_id", "effort", "workspace", "manager")
        },
    )
    if request.effort is not None and request.effort not in EFFORTS:
        raise UsageError(f"effort is unknown ({source}: {request.effort[:60]!r})", f"One of: {', '.join(EFFORTS)}.")
    return request


def read_request_file(path: str, input_id: str | None) -> RunRequest:
    """Return the request that a file holds.

    Raises:
        UsageError: The file can't be read or holds no request.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        hint = "A prompt is given with -p." if " " in path else ""
        raise UsageError(f"the request file can't be read ({path}: {os_error_text(error)})", hint) from error
    except UnicodeDecodeError as error:
        raise UsageError(f"the request file is not UTF-8 ({path})") from error
    return parse_request(text, path, input_id)


def with_options(request: RunRequest, **options: Any) -> RunRequest:
    """Return the request with options in the place of its own fields; None leaves a field as it is."""
    return replace(request, **{name: value for name, value in options.items() if value is not None})


def _messages(fields: Mapping[str, Any], source: str, input_id: str | None) -> tuple[Message, ...]:
    if "prompt" in fields and "messages" in fields:
        raise UsageError(f"the request holds both prompt and messages ({source})", "Give one of them.")
    if "prompt" in fields:
        prompt = _not_blank(_string(fields, "prompt", source) or "", f"{source}: prompt")
        return (Message(content=prompt, input_id=input_id or new_input_id()),)
    entries = fields.get("messages", [])
    if not isinstance(entries, list):
        raise UsageError(f"messages is not a list ({source})", 'Write [{"content": "…"}].')
    if input_id is not None and len(entries) != 1:
        raise UsageError(f"--input-id names one input ({source} has {len(entries)})", "Give each a message_id.")
    messages = tuple(_message(entry, f"{source}: messages[{i}]", input_id) for i, entry in enumerate(entries))
    repeated = {message.input_id for message in messages}
    if len(repeated) != len(messages):
        raise UsageError(f"two messages have the same message_id ({source})", "Give each its own.")
    return messages


def _message(entry: object, source: str, input_id: str | None) -> Message:
    if not isinstance(entry, dict):
        raise UsageError(f"a message is not an object ({source})", 'Write {"content": "…"}.')
    _refuse_unknown(entry, MESSAGE_FIELDS, source)
    content = _not_blank(_string(entry, "content", source) or "", f"{source}.content")
    message_id = _string(entry, "message_id", source)
    return Message(content=content, input_id=input_id or message_id or new_input_id())


def _refuse_unknown(fields: Mapping[str, Any], known: tuple[str, ...], source: str) -> None:
    unknown = sorted(set(fields) - set(known))
    if unknown:
        named = ", ".join(repr(name[:60]) for name in unknown[:5])
        raise UsageError(f"the request holds an unknown field ({source}: {named})", f"Known: {', '.join(known)}.")


def _string(fields: Mapping[str, Any], name: str, source: str) -> str | None:
    value = fields.get(name)
    if value is None and name not in fields:
        return None
    if not isinstance(value, str) or not value:
        raise UsageError(f"{name} is not a text ({source}: {json.dumps(value)[:60]})", "Write it in quotes.")
    if (half := _HALF_PAIR.search(value)) is not None:
        raise UsageError(f"{name} holds half of a surrogate pair ({source}: {ascii(half.group())})")
    return value


def _not_blank(text: str, source: str) -> str:
    if not text.strip():
        raise UsageError(f"the prompt is blank ({source})", "Say what is to be done.")
    return text


def _tools(fields: Mapping[str, Any], source: str) -> tuple[str, ...] | None:
    tools = fields.get("tools")
    if tools is None:
        return None
    if not isinstance(tools, list) or not tools or not all(isinstance(name, str) and name for name in tools):
        raise UsageError(f"tools is not a list of names ({source})", 'Write for example ["Bash", "ViewImage"].')
    return tuple(tools)


def _max_turns(fields: Mapping[str, Any], source: str) -> int | None:
    turns = fields.get("max_turns")
    if turns is None:
        return None
    if not isinstance(turns, int) or isinstance(turns, bool) or turns < 1:
        raise UsageError(f"max_turns is not a number from 1 ({source}: {json.dumps(turns)[:60]})")
    return turns
