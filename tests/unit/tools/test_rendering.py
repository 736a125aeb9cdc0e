"""What the model is shown of an ended operation."""

from __future__ import annotations

import pytest

from harness.tools.presentation import text_part
from harness.tools.rendering import render_operations
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.operation.v1 import operation_pb2
from unreal_agent.session.v1 import item_pb2

Captured = operation_pb2.CapturedOutput
COMPLETED = operation_pb2.OPERATION_STATUS_COMPLETED
FAILED = operation_pb2.OPERATION_STATUS_FAILED
CANCELED = operation_pb2.OPERATION_STATUS_CANCELED
UNKNOWN = operation_pb2.OPERATION_STATUS_OUTCOME_UNKNOWN


def bash(
    state: operation_pb2.BashState,
    status: operation_pb2.OperationStatus.ValueType = COMPLETED,
    message: str = "",
    timeout_s: int = 600,
) -> operation_pb2.Operation:
    operation = operation_pb2.Operation(
        type="bash", status=status, effect_class=operation_pb2.EFFECT_CLASS_AT_MOST_ONCE, bash=state
    )
    operation.limits.timeout.seconds = timeout_s
    if message:
        operation.error.message = message
    return operation


def exited(**fields: object) -> operation_pb2.BashState:
    state = operation_pb2.BashState(phase=operation_pb2.BashState.PHASE_EXITED, has_exit=True)
    # The keywords are those of the message.
    state.MergeFrom(operation_pb2.BashState(**fields))  # type: ignore[arg-type]
    return state


def shown(operation: operation_pb2.Operation) -> str:
    (part,) = render_operations([operation]).parts
    return part.text.text


OUT = Captured(head="out\n", total_bytes=4, path="/o/out")
ERR = Captured(head="err\n", total_bytes=4, path="/o/err")


@pytest.mark.parametrize(
    ("operation", "text"),
    [
        (bash(exited(stdout=OUT)), "out"),
        (bash(exited(stdout=OUT, stderr=ERR)), "out\n[stderr]\nerr"),
        (bash(exited(stderr=ERR, exit_code=2)), "[stderr]\nerr\n[exit code 2]"),
        (bash(exited()), "(no output)"),
        (bash(exited(stdout=Captured(head="\n \n", total_bytes=3))), "(no output)"),
        (bash(exited(exit_code=137)), "(no output)\n[exit code 137]"),
        (
            bash(exited(stdout=Captured(head="before"), exit_code=137, signal="SIGKILL")),
            "before\n[ended by signal SIGKILL; exit code 137]",
        ),
        (
            bash(exited(stdout=OUT, exit_code=143, signal="SIGTERM", is_timed_out=True), FAILED, timeout_s=5),
            "out\n[timed out: the command was ended at its limit of 5 s]",
        ),
        (
            bash(exited(leftover_note="1 process was still\nrunning and was ended")),
            "(no output)\n[1 process was still running and was ended]",
        ),
        (
            bash(exited(stdout=OUT, used_directory="/", directory_note="/gone does not exist; ran in /")),
            "out\n[/gone does not exist; ran in /]",
        ),
        (
            bash(exited(stdout=Captured(head="\ufffd", is_lossy=True))),
            "\ufffd\n[bytes that are not UTF-8 were replaced by U+FFFD]",
        ),
        (
            bash(exited(stdout=Captured(head="\r1%\r2%\n\x1b[31mred\x1b[0m\n"))),
            "2%\nred",
        ),
    ],
)
def test_command_that_ran_is_shown_with_its_output_and_end(operation: operation_pb2.Operation, text: str) -> None:
    result = render_operations([operation])

    assert list(result.parts) == [text_part(text)]
    assert not result.HasField("truncation")


def test_long_output_shows_head_and_tail_the_exact_count_and_the_file_once() -> None:
    stdout = Captured(head="a\u2500", tail="\u2500z\n", omitted_bytes=1_999_992, total_bytes=2_000_000, path="/o/out")

    result = render_operations([bash(exited(stdout=stdout, stderr=ERR))])

    assert result.parts[0].text.text == (
        "a\u2500\n[... 1999992 of 2000000 bytes left out here; all of it: /o/out ...]\n\u2500z\n[stderr]\nerr"
    )
    assert result.truncation == item_pb2.RenderedTruncation(
        omitted_bytes=1_999_992, reason="output over max_output_length"
    )


def test_canceled_command_keeps_its_partial_output_and_names_the_files() -> None:
    state = operation_pb2.BashState(phase=operation_pb2.BashState.PHASE_RUNNING, process_id=7, stdout=OUT)

    assert shown(bash(state, CANCELED, "the user stopped the session")) == (
        "out\n[canceled: the user stopped the session]\n[output files: /o/out]"
    )


def test_files_named_by_a_marker_are_not_named_again() -> None:
    stdout = Captured(head="a", tail="z", omitted_bytes=5, total_bytes=7, path="/o/out")
    state = operation_pb2.BashState(phase=operation_pb2.BashState.PHASE_RUNNING, process_id=7, stdout=stdout)

    assert shown(bash(state, CANCELED)).count("/o/out") == 1


def test_command_canceled_before_its_start_is_told_so() -> None:
    assert shown(bash(operation_pb2.BashState(), CANCELED)) == "[canceled]\n[the command was not started]"


def test_unknown_outcome_asks_for_a_look_before_a_repetition() -> None:
    state = operation_pb2.BashState(phase=operation_pb2.BashState.PHASE_RUNNING, stdout=OUT, is_timed_out=True)

    result = render_operations([bash(state, UNKNOWN, "the machine went down")])

    assert result.outcome == item_pb2.CALL_OUTCOME_UNKNOWN
    assert result.parts[0].text.text == (
        "out\n[outcome unknown: the machine went down. It may or may not have run to its end. "
        "Check what it did before you repeat it.]\n[output files: /o/out]"
    )


def test_failed_command_says_why_in_a_bounded_line() -> None:
    text = shown(bash(operation_pb2.BashState(), FAILED, "no bash\x1b[31m\n" + "x" * 10_000))

    assert text.startswith("[failed: no bash xxx")
    assert len(text) < 4_100


def view_image(**fields: object) -> operation_pb2.Operation:
    state = operation_pb2.ViewImageState(
        path="a.bmp",
        image=llm_pb2.BlobRef(digest="0" * 64, size_bytes=9, media_type="image/png"),
        original_media_type="image/png",
        original_width=40,
        original_height=30,
        width=40,
        height=30,
    )
    # The keywords are those of the message.
    state.MergeFrom(operation_pb2.ViewImageState(**fields))  # type: ignore[arg-type]
    return operation_pb2.Operation(
        type="view_image", status=COMPLETED, effect_class=operation_pb2.EFFECT_CLASS_PURE, view_image=state
    )


@pytest.mark.parametrize(
    ("operation", "text"),
    [
        (view_image(), "a.bmp: image/png, 40 x 30 pixels."),
        (view_image(original_media_type="image/bmp"), "a.bmp: image/png, 40 x 30 pixels. Converted from image/bmp."),
        (
            view_image(original_width=4000, original_height=3000, width=2000, height=1500),
            (
                "a.bmp: image/png, 2000 x 1500 pixels. Scaled down from 4000 x 3000 pixels (scale 0.5). "
                "Multiply coordinates in this image by 2 to get those in the file."
            ),
        ),
        (
            view_image(original_width=10_000, original_height=3, width=2000, height=1),
            (
                "a.bmp: image/png, 2000 x 1 pixels. Scaled down from 10000 x 3 pixels (scale 0.2). "
                "Multiply coordinates in this image by 5 (x) and 3 (y) to get those in the file."
            ),
        ),
    ],
)
def test_image_is_shown_by_reference_with_its_size_and_scale(operation: operation_pb2.Operation, text: str) -> None:
    state = operation.view_image
    image = llm_pb2.ImagePart(blob=state.image, media_type="image/png", width=state.width, height=state.height)

    result = render_operations([operation])

    assert result == item_pb2.CallResult(
        outcome=item_pb2.CALL_OUTCOME_COMPLETED, parts=[llm_pb2.ContentPart(image=image), text_part(text)]
    )


def test_refused_image_puts_no_image_into_the_history() -> None:
    operation = view_image()
    operation.status = FAILED
    operation.error.message = "it is an SVG drawing (text)"

    result = render_operations([operation])

    assert list(result.parts) == [text_part("a.bmp: [failed: it is an SVG drawing (text)]")]
    assert result.outcome == item_pb2.CALL_OUTCOME_FAILED


def test_skill_is_shown_verbatim() -> None:
    content = "---\nname: x\n---\n\n  Keep\tthis.\r\n"
    operation = operation_pb2.Operation(status=COMPLETED, skill_use=operation_pb2.SkillUseState(content=content))

    assert shown(operation) == content


def test_lost_result_of_a_pure_operation_may_be_repeated() -> None:
    operation = operation_pb2.Operation(
        status=UNKNOWN,
        effect_class=operation_pb2.EFFECT_CLASS_PURE,
        skill_use=operation_pb2.SkillUseState(name="x"),
    )

    assert shown(operation) == "Skill x: [outcome unknown: the result was lost. It may be repeated safely.]"


@pytest.mark.parametrize(
    ("statuses", "outcome"),
    [
        ([COMPLETED, COMPLETED], item_pb2.CALL_OUTCOME_COMPLETED),
        ([COMPLETED, CANCELED], item_pb2.CALL_OUTCOME_CANCELED),
        ([CANCELED, FAILED], item_pb2.CALL_OUTCOME_FAILED),
        ([UNKNOWN, FAILED, COMPLETED], item_pb2.CALL_OUTCOME_UNKNOWN),
    ],
)
def test_worst_operation_decides_the_outcome(
    statuses: list[operation_pb2.OperationStatus.ValueType], outcome: item_pb2.CallOutcome.ValueType
) -> None:
    assert render_operations([bash(exited(), status) for status in statuses]).outcome == outcome


@pytest.mark.parametrize("status", [COMPLETED, FAILED, CANCELED, UNKNOWN])
@pytest.mark.parametrize(
    "state",
    [
        operation_pb2.Operation(bash=operation_pb2.BashState()),
        operation_pb2.Operation(view_image=operation_pb2.ViewImageState()),
        operation_pb2.Operation(skill_use=operation_pb2.SkillUseState()),
        operation_pb2.Operation(inspect_workspace=operation_pb2.InspectWorkspaceState()),
        operation_pb2.Operation(timer=operation_pb2.TimerState()),
        operation_pb2.Operation(value=operation_pb2.ValueState(value_json="{}")),
        operation_pb2.Operation(remote_job=operation_pb2.RemoteJobState()),
        operation_pb2.Operation(),
    ],
)
def test_every_operation_shows_something_even_if_it_is_empty(
    status: operation_pb2.OperationStatus.ValueType, state: operation_pb2.Operation
) -> None:
    operation = operation_pb2.Operation(status=status)
    operation.MergeFrom(state)
    before = operation.SerializeToString(deterministic=True)

    result = render_operations([operation, operation])

    assert all(part.text.text.strip() for part in result.parts)
    assert operation.SerializeToString(deterministic=True) == before


def test_call_without_operation_shows_something() -> None:
    assert list(render_operations([]).parts) == [text_part("[no result: nothing was run]")]
