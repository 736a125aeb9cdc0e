"""Fields that this release does not know are found wherever they are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from google.protobuf.message import Message

from harness.primitives.messages import find_messages, find_unknown_field, find_unset_choice
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.operation.v1 import operation_pb2
from unreal_agent.session.v1 import item_pb2, session_pb2

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


def test_every_choice_that_is_made_is_no_finding() -> None:
    item = message()
    item.input.kind = item_pb2.INPUT_KIND_EXTERNAL
    assert find_unset_choice(item) is None


@pytest.mark.parametrize(
    ("path", "spoil"),
    [
        ("item", lambda item: item.ClearField("input")),
        ("input.payload", lambda item: item.input.ClearField("content")),
        ("input.content.parts[1].part", lambda item: item.input.content.parts[1].Clear()),
        ("input.content.parts[0].text.body", lambda item: item.input.content.parts[0].text.Clear()),
        ("input.kind", lambda item: item.input.MergeFromString(b"\x18\x63")),
    ],
)
def test_unset_choice_and_unknown_enum_value_are_found(path: str, spoil: Callable[[item_pb2.Item], None]) -> None:
    item = message()
    spoil(item)
    assert find_unset_choice(item) == path


def test_optional_field_is_no_choice() -> None:
    assert find_unset_choice(session_pb2.SettingsPatch()) is None


def test_messages_of_a_type_are_found_wherever_they_are() -> None:
    blobs = [llm_pb2.BlobRef(digest=str(number)) for number in range(3)]
    item = message()
    item.input.content.parts.add().image.blob.CopyFrom(blobs[0])
    item.input.content.parts.add().text.blob.CopyFrom(blobs[1])
    assert list(find_messages(item, llm_pb2.BlobRef.DESCRIPTOR)) == blobs[:2]
    assert list(find_messages(blobs[2], llm_pb2.BlobRef.DESCRIPTOR)) == [blobs[2]]
    assert list(find_messages(operation_pb2.Operation(), item_pb2.Item.DESCRIPTOR)) == []
