"""Renders ended operations for the model, by their type. Pure.

The texts are recorded once, in a call's final status, and are never made again for the same call.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from harness.primitives.terminal_text import plain_text
from harness.tools.presentation import text_part
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.operation.v1 import operation_pb2
from unreal_agent.session.v1 import item_pb2

MAX_ERROR_CHARS: Final = 4_000
"""Of one error's message; a manager's word is not trusted to be short."""

_OUTPUT_LIMIT = "output over max_output_length"
# The worst first: one operation whose effect is unknown makes the call's effect unknown.
_OUTCOMES = (
    (operation_pb2.OPERATION_STATUS_OUTCOME_UNKNOWN, item_pb2.CALL_OUTCOME_UNKNOWN),
    (operation_pb2.OPERATION_STATUS_FAILED, item_pb2.CALL_OUTCOME_FAILED),
    (operation_pb2.OPERATION_STATUS_CANCELED, item_pb2.CALL_OUTCOME_CANCELED),
)
_REPEATABLE = (operation_pb2.EFFECT_CLASS_PURE, operation_pb2.EFFECT_CLASS_IDEMPOTENT)


def render_operations(operations: Sequence[operation_pb2.Operation]) -> item_pb2.CallResult:
    """Return the result of a call that waited for these operations; never raises, whatever is in them."""
    result = item_pb2.CallResult(outcome=_outcome(operations))
    for index, operation in enumerate(operations):
        if len(operations) > 1:
            result.parts.append(text_part(f"[operation {index + 1} of {len(operations)}: {operation.type}]"))
        result.parts.extend(_render(operation))
    if not operations:
        result.parts.append(text_part("[no result: nothing was run]"))
    omitted_bytes = sum(one.bash.stdout.omitted_bytes + one.bash.stderr.omitted_bytes for one in operations)
    if omitted_bytes:
        result.truncation.omitted_bytes = omitted_bytes
        result.truncation.reason = _OUTPUT_LIMIT
    return result


def _outcome(operations: Iterable[operation_pb2.Operation]) -> item_pb2.CallOutcome.ValueType:
    statuses = {operation.status for operation in operations}
    return next((outcome for status, outcome in _OUTCOMES if status in statuses), item_pb2.CALL_OUTCOME_COMPLETED)


def _render(operation: operation_pb2.Operation) -> list[llm_pb2.ContentPart]:
    state = operation.WhichOneof("state")
    if state == "bash":
        return [text_part(_bash_text(operation))]
    if operation.status != operation_pb2.OPERATION_STATUS_COMPLETED:
        return [text_part(f"{_subject(operation)}{_ending(operation)}")]
    match state:
        case "view_image":
            return _image_parts(operation.view_image)
        case "skill_use":
            return [_verbatim(operation.skill_use.content)]
        case "value":
            return [_verbatim(operation.value.value_json)]
        case "remote_job":
            return [_verbatim(operation.remote_job.result_json)]
        case _:
            return [text_part("[done]")]


def _verbatim(text: str) -> llm_pb2.ContentPart:
    # Neither the store nor a provider takes NUL, and some providers refuse a blank text.
    return text_part(text.replace("\0", "\ufffd") if text.strip() else "(empty)")


def _subject(operation: operation_pb2.Operation) -> str:
    match operation.WhichOneof("state"):
        case "view_image":
            return f"{_one_line(operation.view_image.path)}: "
        case "skill_use":
            return f"Skill {_one_line(operation.skill_use.name)}: "
        case _:
            return ""


def _ending(operation: operation_pb2.Operation) -> str:
    """Return the line that tells how an operation ended that did not complete."""
    message = _one_line(operation.error.message or operation.error.reason)
    match operation.status:
        case operation_pb2.OPERATION_STATUS_FAILED:
            return f"[failed: {message or 'no reason was given'}]"
        case operation_pb2.OPERATION_STATUS_CANCELED:
            return f"[canceled: {message}]" if message else "[canceled]"
        case _ if operation.effect_class in _REPEATABLE:
            return f"[outcome unknown: {message or 'the result was lost'}. It may be repeated safely.]"
        case _:
            return (
                f"[outcome unknown: {message or 'the result was lost'}. It may or may not have run to its end. "
                "Check what it did before you repeat it.]"
            )


def _one_line(text: str) -> str:
    line = " ".join(plain_text(text).split())
    return line if len(line) <= MAX_ERROR_CHARS else f"{line[:MAX_ERROR_CHARS]}..."


def _bash_text(operation: operation_pb2.Operation) -> str:
    state = operation.bash
    sections: list[str] = []
    stdout = _captured(state.stdout)
    stderr = _captured(state.stderr)
    if stdout:
        sections.append(stdout)
    if stderr:
        sections.append(f"[stderr]\n{stderr}")
    if not sections and state.has_exit:
        sections.append("(no output)")
    sections.extend(_bash_ending(operation))
    sections.extend(f"[{_one_line(note)}]" for note in (state.directory_note, state.leftover_note) if note)
    if state.stdout.is_lossy or state.stderr.is_lossy:
        sections.append("[bytes that are not UTF-8 were replaced by U+FFFD]")
    return "\n".join(sections) or "(no output)"


def _captured(output: operation_pb2.CapturedOutput) -> str:
    """Return a stream's text, with what was left out counted and located; empty where it showed nothing."""
    head = plain_text(output.head)
    if not output.omitted_bytes:
        return head.rstrip("\n") if head.strip() else ""
    tail = plain_text(output.tail)
    where = f"; all of it: {_one_line(output.path)}" if output.path else ""
    marker = f"[... {output.omitted_bytes} of {output.total_bytes} bytes left out here{where} ...]"
    head_end = "" if not head or head.endswith("\n") else "\n"
    tail_start = "" if not tail or tail.startswith("\n") else "\n"
    return f"{head}{head_end}{marker}{tail_start}{tail}".rstrip("\n")


def _bash_ending(operation: operation_pb2.Operation) -> list[str]:
    state = operation.bash
    lines = []
    if state.is_timed_out and operation.status != operation_pb2.OPERATION_STATUS_OUTCOME_UNKNOWN:
        limit_s = operation.limits.timeout.seconds
        after = f" of {limit_s} s" if limit_s else ""
        lines.append(f"[timed out: the command was ended at its limit{after}]")
    elif operation.status != operation_pb2.OPERATION_STATUS_COMPLETED:
        lines.append(_ending(operation))
        if operation.status == operation_pb2.OPERATION_STATUS_CANCELED and _never_ran(state):
            lines.append("[the command was not started]")
    elif state.signal:
        lines.append(f"[ended by signal {state.signal}; exit code {state.exit_code}]")
    elif state.exit_code:
        lines.append(f"[exit code {state.exit_code}]")
    # Without an exit the files are the only witness; a marker has named them where output was left out.
    if not state.has_exit:
        paths = [one.path for one in (state.stdout, state.stderr) if one.path and not one.omitted_bytes]
        if paths:
            lines.append(f"[output files: {', '.join(_one_line(path) for path in paths)}]")
    return lines


def _never_ran(state: operation_pb2.BashState) -> bool:
    return state.phase == operation_pb2.BashState.PHASE_UNSPECIFIED and not state.process_id


def _image_parts(state: operation_pb2.ViewImageState) -> list[llm_pb2.ContentPart]:
    if not state.image.digest:
        return [text_part(f"{_one_line(state.path)}: [failed: the prepared image is missing]")]
    image = llm_pb2.ImagePart(
        blob=state.image, media_type=state.image.media_type, width=state.width, height=state.height
    )
    return [llm_pb2.ContentPart(image=image), text_part(_image_text(state))]


def _image_text(state: operation_pb2.ViewImageState) -> str:
    sentences = [f"{_one_line(state.path)}: {state.image.media_type}, {state.width} x {state.height} pixels."]
    original_type = state.original_media_type
    if original_type and original_type != state.image.media_type:
        sentences.append(f"Converted from {_one_line(original_type)}.")
    original = (state.original_width, state.original_height)
    if all(original) and state.width and state.height and original != (state.width, state.height):
        x_factor = f"{state.original_width / state.width:.4g}"
        y_factor = f"{state.original_height / state.height:.4g}"
        factor = x_factor if x_factor == y_factor else f"{x_factor} (x) and {y_factor} (y)"
        sentences.append(
            f"Scaled down from {original[0]} x {original[1]} pixels (scale {state.width / state.original_width:.4g}). "
            f"Multiply coordinates in this image by {factor} to get those in the file."
        )
    return " ".join(sentences)
