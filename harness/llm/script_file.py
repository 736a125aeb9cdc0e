"""The script file of the `scripted` provider: reading and validating. Plays nothing.

{"responses": [
    {"text": "Looking.", "tool_calls": [{"name": "Bash", "arguments": {"command": "ls"}}]},
    {"expect": "README", "text": "Done.", "usage": {"input_tokens": 10}},
    {"for": "compaction", "text": "What happened so far."},
    {"error": {"class": "rate_limit", "retry_after_seconds": 2}}
]}
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path

from harness.errors import FailedPreconditionError, InvalidArgumentError
from harness.llm import json_text
from harness.llm.recording import load_recording
from harness.llm.script import MAX_SCRIPT_BYTES, Script, ScriptEntry, ScriptError
from unreal_agent.llm.v1 import llm_pb2

STOP_REASONS: Mapping[str, llm_pb2.StopReason.ValueType] = {
    "complete": llm_pb2.STOP_REASON_COMPLETE,
    "max_output_tokens": llm_pb2.STOP_REASON_MAX_OUTPUT_TOKENS,
    "refused": llm_pb2.STOP_REASON_REFUSED,
}
_UNSTORED = (llm_pb2.ERROR_CLASS_UNSPECIFIED, llm_pb2.ERROR_CLASS_CANCELLED)
ERROR_CLASSES: Mapping[str, llm_pb2.ErrorClass.ValueType] = {
    name.removeprefix("ERROR_CLASS_").lower(): number
    for name, number in llm_pb2.ErrorClass.items()
    if number not in _UNSTORED
}
_USAGE_FIELDS = ("input_tokens", "cached_input_tokens", "cache_write_tokens", "output_tokens", "reasoning_tokens")
_ENTRY_FIELDS = ("text", "reasoning", "tool_calls", "stop", "delay_seconds", "usage", "error", "expect", "for")


def load_script(path: Path) -> Script:
    """Return the script in a JSON or YAML file, or the recording in a directory.

    Raises:
        FailedPreconditionError: The file is missing or cannot be read.
        InvalidArgumentError: It is not a script; the message names entry and field.
    """
    if path.is_dir():
        return load_recording(path)
    try:
        if path.stat().st_size > MAX_SCRIPT_BYTES:
            raise InvalidArgumentError(
                f"script {str(path)!r} is larger than {MAX_SCRIPT_BYTES} bytes", reason="LLM_SCRIPT_INVALID"
            )
        text = path.read_text(encoding="utf-8-sig")
    except OSError as err:
        raise FailedPreconditionError(
            f"script {str(path)!r} cannot be read ({err.strerror}): name an existing file", reason="LLM_SCRIPT_MISSING"
        ) from err
    except UnicodeDecodeError:
        raise InvalidArgumentError(f"script {str(path)!r} is not UTF-8", reason="LLM_SCRIPT_INVALID") from None
    return parse_script(text, name=str(path))


def parse_script(text: str, *, name: str = "script") -> Script:
    """Return the script in a JSON or YAML text; `name` stands in messages.

    Raises:
        InvalidArgumentError: It is not a script; the message names entry and field.
    """
    try:
        root = _fields(_parse(text), "the script", ("responses",))
        entries = root.get("responses")
        if not isinstance(entries, list):
            raise _WrongError("responses must be a list")
        regular: list[ScriptEntry] = []
        compactions: list[ScriptEntry] = []
        for place, entry in enumerate(entries):
            is_compaction, read = _entry(entry, f"responses[{place}]")
            (compactions if is_compaction else regular).append(read)
    except _WrongError as err:
        raise InvalidArgumentError(f"script {name!r}: {err}", reason="LLM_SCRIPT_INVALID") from None
    return Script(responses=tuple(regular), compactions=tuple(compactions))


class _WrongError(Exception):
    """Says what is wrong, and where."""


def _parse(text: str) -> object:
    json_error = ""
    if text.lstrip().startswith("{"):
        try:
            return json_text.read(text)
        except json_text.JSONTextError as err:
            # It may still be YAML, which allows braces too.
            json_error = f" (as JSON: {err})"
    # Loaded only where it is needed: a JSON script does without.
    import yaml

    try:
        return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (yaml.YAMLError, RecursionError, ValueError) as err:
        place = getattr(err, "problem_mark", None)
        where = f" at line {place.line + 1}, column {place.column + 1}" if place is not None else ""
        raise _WrongError(f"is neither JSON nor YAML{where}{json_error}") from None


def _fields(value: object, place: str, known: tuple[str, ...]) -> dict[str, object]:
    if not isinstance(value, dict):
        raise _WrongError(f"{place} must be an object with {', '.join(known)}")
    for name in value:
        if name not in known:
            raise _WrongError(f"{place} has the unknown field {str(name)[:60]!r}; known are {', '.join(known)}")
    return value


def _entry(value: object, place: str) -> tuple[bool, ScriptEntry]:
    fields = _fields(value, place, _ENTRY_FIELDS)
    purpose = fields.get("for")
    if purpose not in (None, "compaction"):
        raise _WrongError(f"{place}.for must be 'compaction'")
    error = _error(fields["error"], f"{place}.error") if "error" in fields else None
    if error is not None:
        for name in ("text", "reasoning", "tool_calls", "stop", "usage"):
            if name in fields:
                raise _WrongError(f"{place} has both error and {name}")
    stop = fields.get("stop", "complete")
    if not isinstance(stop, str) or stop not in STOP_REASONS:
        raise _WrongError(f"{place}.stop must be one of {', '.join(STOP_REASONS)}")
    entry = ScriptEntry(
        place=place,
        text=_text(fields, "text", place),
        reasoning=_text(fields, "reasoning", place),
        tool_calls=_tool_calls(fields.get("tool_calls", []), f"{place}.tool_calls"),
        stop_reason=STOP_REASONS[stop],
        delay_s=_seconds(fields.get("delay_seconds", 0), f"{place}.delay_seconds"),
        usage=_usage(fields["usage"], f"{place}.usage") if "usage" in fields else None,
        error=error,
        expect=_pattern(fields["expect"], f"{place}.expect") if "expect" in fields else None,
    )
    return purpose == "compaction", entry


def _text(fields: Mapping[str, object], name: str, place: str) -> str:
    value = fields.get(name, "")
    if not isinstance(value, str):
        raise _WrongError(f"{place}.{name} must be a text")
    return json_text.valid_text(value)


def _seconds(value: object, place: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= sys.float_info.max:
        raise _WrongError(f"{place} must be a number of seconds, 0 or more")
    return float(value)


def _tool_calls(value: object, place: str) -> tuple[llm_pb2.ToolCall, ...]:
    if not isinstance(value, list):
        raise _WrongError(f"{place} must be a list")
    return tuple(_tool_call(call, f"{place}[{number}]") for number, call in enumerate(value))


def _tool_call(value: object, place: str) -> llm_pb2.ToolCall:
    fields = _fields(value, place, ("name", "arguments", "call_id"))
    if not fields.get("name"):
        raise _WrongError(f"{place}.name is missing")
    arguments = fields.get("arguments", {})
    if isinstance(arguments, dict):
        try:
            arguments = json_text.write(arguments)
        except (TypeError, ValueError):
            raise _WrongError(f"{place}.arguments holds a value that JSON does not have") from None
    if not isinstance(arguments, str):
        raise _WrongError(f"{place}.arguments must be an object or a raw text")
    return llm_pb2.ToolCall(
        name=_text(fields, "name", place),
        arguments_json=json_text.valid_text(arguments),
        call_id=_text(fields, "call_id", place),
    )


def _usage(value: object, place: str) -> llm_pb2.Usage:
    usage = llm_pb2.Usage()
    for name, amount in _fields(value, place, _USAGE_FIELDS).items():
        if isinstance(amount, bool) or not isinstance(amount, int) or not 0 <= amount < 2**63:
            raise _WrongError(f"{place}.{name} must be a whole number, 0 or more")
        setattr(usage, name, amount)
    return usage


def _error(value: object, place: str) -> ScriptError:
    fields = _fields(value, place, ("class", "retry_after_seconds"))
    name = fields.get("class")
    if not isinstance(name, str) or name.lower() not in ERROR_CLASSES:
        raise _WrongError(f"{place}.class must be one of {', '.join(ERROR_CLASSES)}")
    retry_after_s = None
    if "retry_after_seconds" in fields:
        retry_after_s = _seconds(fields["retry_after_seconds"], f"{place}.retry_after_seconds")
    return ScriptError(error_class=ERROR_CLASSES[name.lower()], retry_after_s=retry_after_s)


def _pattern(value: object, place: str) -> re.Pattern[str]:
    if not isinstance(value, str):
        raise _WrongError(f"{place} must be a regular expression")
    try:
        with warnings.catch_warnings():
            # What a later Python may read otherwise is the author's affair, and no line on standard error.
            warnings.simplefilter("ignore", FutureWarning)
            return re.compile(value)
    except (re.error, RecursionError, OverflowError) as err:
        raise _WrongError(f"{place} is no regular expression: {err}") from None
