"""Fields that this release does not know are found wherever they are."""

from __future__ import annotations

import pytest
from google.protobuf.message import Message

from harness.primitives.messages import find_unknown_field
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.operation.v1 import operation_pb2
from unreal_agent.session.v1 import item_pb2

LATER_FIELD = b"\xf8\x07\x01"


def message() -> item_pb2.Item:
    part = llm_pb2.ContentPart(text=llm_pb2.TextPart(text="hi"))
    return item_pb2.Item(
        input=item_pb2.Input(input_id="i", metadata={"k": "v"}, content=item_pb2.Content(parts=[part, part]))
    )


def test_known_fields_are_no_finding() -> None:
    assert find_unknown_field(message()) is None


@pytest.mark.parametrize(
    "path", ["", "input.", "input.content.", "input.content.parts[1].", "input.content.parts[0].text."]
)
def test_path_names_the_place(path: str) -> None:
    item = message()
    places: dict[str, Message] = {
        "": item,
        "input.": item.input,
        "input.content.": item.input.content,
        "input.content.parts[1].": item.input.content.parts[1],
        "input.content.parts[0].text.": item.input.content.parts[0].text,
    }
    places[path].MergeFromString(LATER_FIELD)

    assert find_unknown_field(item) == f"{path}127"


def test_well_known_types_are_searched_too() -> None:
    operation = operation_pb2.Operation()
    operation.limits.timeout.MergeFromString(LATER_FIELD)

    assert find_unknown_field(operation) == "limits.timeout.127"
