"""Tool calls in words: a title before, a verdict and the end of the output after. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

from clients.cli.text import last_lines, one_line, plural, size
from clients.cli.view_events import Call
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.operation.v1 import operation_pb2
from unreal_agent.session.v1 import item_pb2

LINES_AFTER_SUCCESS = 4
LINES_AFTER_FAILURE = 10
MAX_TITLE_CHARS = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How a call ended."""

    is_good: bool
    is_known: bool
    """False where the call was cancelled or nobody can know what it did."""

    word: str
    """For example "exit 1" or "cancelled"; empty where success needs no word."""


def call_title(call: llm_pb2.ToolCall) -> str:
    """Return one line that says what a call asks for."""
    try:
        arguments = json.loads(call.arguments_json or "{}")
    except (ValueError, RecursionError):
        arguments = None  # a model may write anything, and as deeply nested as it likes
    if isinstance(arguments, dict):
        match call.name:
            case "Bash" if isinstance(command := arguments.get("command"), str):
                return _command_title(command)
            case "ViewImage" if isinstance(path := arguments.get("path"), str):
                return f"look at {one_line(path)}"
            case "SkillUse" if isinstance(name := arguments.get("name"), str):
                return f"read skill {one_line(name)}"
    return one_line(f"{call.name} {call.arguments_json}")[:MAX_TITLE_CHARS]


def _command_title(command: str) -> str:
    lines = [line for line in command.strip().split("\n") if line.strip()] or [""]
    more = f"  (+{plural(len(lines) - 1, 'line')})" if len(lines) > 1 else ""
    return f"$ {one_line(lines[0])[:MAX_TITLE_CHARS]}{more}"


def call_verdict(call: Call) -> Verdict:
    """Return how an ended call ended."""
    outcome = call.result.outcome if call.result is not None else item_pb2.CALL_OUTCOME_UNSPECIFIED
    for operation in call.operations:
        if operation.WhichOneof("state") == "bash" and operation.bash.has_exit:
            return _bash_verdict(operation.bash, outcome)
    words = {
        item_pb2.CALL_OUTCOME_COMPLETED: "",
        item_pb2.CALL_OUTCOME_REJECTED: "refused",
        item_pb2.CALL_OUTCOME_FAILED: "failed",
        item_pb2.CALL_OUTCOME_CANCELED: "cancelled",
        item_pb2.CALL_OUTCOME_UNKNOWN: "outcome unknown",
        item_pb2.CALL_OUTCOME_NOT_CARRIED_OVER: "not carried over",
    }
    unknown = {
        item_pb2.CALL_OUTCOME_CANCELED,
        item_pb2.CALL_OUTCOME_UNKNOWN,
        item_pb2.CALL_OUTCOME_NOT_CARRIED_OVER,
    }
    return Verdict(
        is_good=outcome == item_pb2.CALL_OUTCOME_COMPLETED,
        is_known=outcome not in unknown,
        word=words.get(outcome, ""),
    )


def _bash_verdict(bash: operation_pb2.BashState, outcome: item_pb2.CallOutcome.ValueType) -> Verdict:
    if outcome == item_pb2.CALL_OUTCOME_CANCELED:
        return Verdict(is_good=False, is_known=False, word="cancelled")
    if bash.is_timed_out:
        return Verdict(is_good=False, is_known=True, word="timed out")
    if bash.signal:
        return Verdict(is_good=False, is_known=True, word=f"killed by {bash.signal}")
    return Verdict(is_good=bash.exit_code == 0, is_known=True, word=f"exit {bash.exit_code}")


def call_lines(call: Call) -> tuple[list[str], str]:
    """Return the lines that show what an ended call brought, and how much stands above them; empty: nothing."""
    verdict = call_verdict(call)
    count = LINES_AFTER_SUCCESS if verdict.is_good else LINES_AFTER_FAILURE
    lines: list[str] = []
    hidden = ""
    for operation in call.operations:
        shown, above = _operation_lines(operation, count)
        lines += shown
        hidden = hidden or above
    if not lines and call.result is not None and not any(_is_told(operation) for operation in call.operations):
        return _last_lines(content_text(call.result.parts), count)
    return lines, hidden


def _last_lines(text: str, count: int) -> tuple[list[str], str]:
    lines, above = last_lines(text, count)
    return lines, f"{plural(above, 'line')} above" if above else ""


def _is_told(operation: operation_pb2.Operation) -> bool:
    """Return whether an operation's own state says how it ended, so that the model's words about it add nothing."""
    match operation.WhichOneof("state"):
        case "bash":
            return operation.bash.has_exit
        case "view_image" | "skill_use":
            return operation.status == operation_pb2.OPERATION_STATUS_COMPLETED
        case _:
            return False


def _operation_lines(operation: operation_pb2.Operation, count: int) -> tuple[list[str], str]:
    match operation.WhichOneof("state"):
        case "bash":
            return _bash_lines(operation.bash, count)
        case "view_image" if operation.view_image.HasField("image"):
            image = operation.view_image
            kind = image.original_media_type.removeprefix("image/").upper()
            shown = "" if image.width == image.original_width else f", shown as {image.width}×{image.height}"
            return [f"{kind} {image.original_width}×{image.original_height}{shown}"], ""
        case "skill_use" if operation.skill_use.content:
            return [one_line(operation.skill_use.path)], ""
    return ([one_line(operation.error.message)], "") if operation.error.message else ([], "")


def _bash_lines(bash: operation_pb2.BashState, count: int) -> tuple[list[str], str]:
    stdout = bash.stdout.tail or bash.stdout.head
    stderr = bash.stderr.tail or bash.stderr.head
    lines, hidden = _last_lines(f"{stdout}\n{stderr}", count)
    if bash.stdout.omitted_bytes or bash.stderr.omitted_bytes:
        # Nobody has counted the lines of what was left out.
        hidden = f"the end of {size(bash.stdout.total_bytes + bash.stderr.total_bytes)}"
    if bash.leftover_note:
        lines = [*lines, one_line(bash.leftover_note)]
    return lines, hidden


def content_text(parts: Iterable[llm_pb2.ContentPart]) -> str:
    """Return the text of message parts, with a mark where an image or a long text stands."""
    texts = []
    for part in parts:
        if part.WhichOneof("part") == "image":
            texts.append("[image]")
        elif part.text.WhichOneof("body") == "blob":
            texts.append(f"[text of {size(part.text.blob.size_bytes)}]")
        else:
            texts.append(part.text.text)
    return "\n".join(texts)
