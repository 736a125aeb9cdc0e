"""Every decoder of bytes from outside that needs no store, no server and no manager: one line each in `DECODERS`."""

from __future__ import annotations

import json
import random
import re
import tempfile
import zlib
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError, Message

from clients._rpc.status import from_status
from clients.cli.failures import UsageError
from clients.cli.keyboard import LineEditor
from clients.cli.request import RunRequest, parse_request
from harness.errors import FailedPreconditionError, HarnessError, InvalidArgumentError, ResourceExhaustedError
from harness.inbox import validate_input
from harness.inbox.images import recognise_image
from harness.llm import json_text
from harness.llm.anthropic_fold import MessagesFold
from harness.llm.codex_credentials import read_codex_credentials
from harness.llm.dialect import ResponseFold
from harness.llm.failures import AttemptError, error_of_response, failure_of
from harness.llm.openai_chat import ChatFold
from harness.llm.openai_responses import ResponsesFold
from harness.llm.recording import load_recording
from harness.llm.script_file import parse_script
from harness.llm.sse import SSEDecoder, SSEError
from harness.llm.user_file import parse_user_file
from harness.primitives import process_records
from harness.primitives.image_preparation import prepare_image
from harness.primitives.images import ImageRequest
from harness.primitives.output_capture import capture
from harness.primitives.skill_files import SkillFault, SkillFile, parse_skill
from harness.primitives.terminal_text import plain_text
from harness.session_store import records
from harness.tools.arguments import ArgumentSchema
from harness.tools.tools import Rejection
from services._server import config
from services._server.validation import check_fields_known
from tests.support.fuzzing import Decoder
from tests.support.mutation import (
    IMAGE_TOKENS,
    JSON_TOKENS,
    PROTOBUF_TOKENS,
    TEXT_TOKENS,
    YAML_TOKENS,
)
from unreal_agent.coordinator.v1 import coordinator_service_pb2 as coordinator_pb2
from unreal_agent.operationmanager.v1 import operation_manager_service_pb2 as manager_pb2
from unreal_agent.session.v1 import item_pb2
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2

FOLDS: Mapping[str, Callable[[], ResponseFold]] = {
    "openai-responses": lambda: ResponsesFold(1),
    "openai-chat": lambda: ChatFold(1),
    "anthropic-messages": lambda: MessagesFold(1),
}
"""How each wire format's stream becomes a response. A new one is fuzzed once it is here and has a corpus."""

NOW = datetime(2026, 3, 1, tzinfo=UTC)


# --- model providers ---


def _stream(make: Callable[[], ResponseFold]) -> Callable[[bytes], None]:
    def decode(data: bytes) -> None:
        whole = _folded(make(), [data])
        cuts = random.Random(zlib.crc32(data))
        edges = sorted(cuts.randrange(len(data) + 1) for _ in range(6))
        pieces = [data[start:end] for start, end in zip([0, *edges], [*edges, len(data)], strict=True)]
        assert _folded(make(), pieces) == whole, "the same bytes in other chunks gave another answer"

    return decode


def _whole_answer(make: Callable[[], ResponseFold]) -> Callable[[bytes], None]:
    def decode(data: bytes) -> None:
        fold = make()
        fold.feed_whole(data.decode(errors="replace"))
        assert fold.is_whole
        fold.output().SerializeToString()

    return decode


def _folded(fold: ResponseFold, pieces: list[bytes]) -> tuple[list[object], bytes | None, str]:
    """Return what a stream gives: deltas, the response where it is whole, the fault where there is one."""
    decoder = SSEDecoder()
    deltas: list[object] = []
    fault = ""
    try:
        for piece in pieces:
            for event in decoder.feed(piece):
                deltas += fold.feed(event)
        decoder.finish()
    except (SSEError, AttemptError) as error:
        fault = str(error)
        assert len(fault) < 5_000
    usage = fold.usage()
    if usage is not None:
        usage.SerializeToString()
    output = fold.output().SerializeToString(deterministic=True) if fold.is_whole else None
    return deltas, output, fault


def _error_answer(data: bytes) -> None:
    """Read an answer that is no stream: "STATUS NAME: VALUE", an empty line, the body."""
    head, _, body = data.partition(b"\n\n")
    status, *lines = head.decode("latin-1").split("\n")
    headers = dict(line.partition(": ")[::2] for line in lines)
    code = 400 + zlib.crc32(status.encode()) % 200 if not re.fullmatch(r"[1-5]\d\d", status) else int(status)
    fault = error_of_response(code, headers, body, NOW)
    assert fault.retry_after_s is None or 0 <= fault.retry_after_s < float("inf")
    failure = failure_of(fault, provider="acme", key_variable="KEY", secrets=("sk-secret",))
    failure.SerializeToString()
    assert len(failure.message) < 5_000
    assert "sk-secret" not in failure.message


def _json_text(data: bytes) -> None:
    text = data.decode(errors="replace")
    try:
        value = json_text.read(text)
    except json_text.JSONTextError:
        return
    if isinstance(value, dict):
        for name in value:
            exact = json_text.member(text, name)
            assert exact is not None and json_text.read(exact) == value[name] or value[name] != value[name]
    if isinstance(value, list):
        assert len(json_text.elements(text)) == len(value)


def _script(data: bytes) -> None:
    for entry in parse_script(data.decode(errors="replace")).responses:
        for call in entry.tool_calls:
            call.SerializeToString()


def _recording(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "000000.json").write_bytes(data)
        load_recording(Path(directory))


def _credentials(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "auth.json")
        path.write_bytes(data)
        path.chmod(0o600)
        token, account = read_codex_credentials({"OPENAI_CODEX_AUTH_FILE": str(path)})
        assert token and account.isascii()


# --- what a workspace holds ---


def _skill(data: bytes) -> None:
    read = parse_skill(data)
    match read:
        case SkillFile():
            assert re.fullmatch(r"[A-Za-z0-9_-]{1,64}", read.name)
            assert 0 < len(read.description) <= 1024
            (read.description + read.content).encode()
            faults = list(read.repairs)
        case SkillFault():
            faults = [read]
    for fault in faults:
        assert fault.reason and "\n" not in fault.reason
        assert 0 <= fault.line <= len(re.split(rb"\r\n|\r|\n|\xc2\x85|\xe2\x80[\xa8\xa9]", data)) + 1
        fault.reason.encode()


def _image(data: bytes) -> None:
    recognise_image(data)
    request = ImageRequest(workspace="/w", path="picture", max_width=64, max_height=64)
    prepared = prepare_image(data, request)
    assert 0 < len(prepared.content) <= request.max_bytes
    assert prepared.facts.width <= 64 and prepared.facts.height <= 64


# --- what commands leave ---


def _process_records(data: bytes) -> None:
    """Read one file as each of the records of a command's directory, as `processes` and `process_outcome` do."""
    with tempfile.TemporaryDirectory() as directory:
        for name in (process_records.CLAIM, process_records.STARTED, process_records.EXIT, process_records.ENDED_BY):
            Path(directory, name).write_bytes(data)
        started = process_records.read_started(directory)
        assert started is None or started.pid >= 0
        exited = process_records.read_exit(directory)
        assert exited is None or 0 <= exited.exit_code <= 999
        process_records.read_ending(directory).encode()
        claim = process_records.read_claim(directory)
        assert claim is not None
        claim.is_of_this_world()
        assert (type(claim.pid), type(claim.start_ticks), type(claim.is_supervisor)) == (int, int, bool)


def _output(data: bytes) -> None:
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        for limit in (0, 7, 1_000):
            captured = capture(file.name, limit, None)
            captured.SerializeToString()
            assert captured.total_bytes == len(data)
            assert len(captured.head) + len(captured.tail) <= limit
    plain_text(data.decode(errors="replace")).encode()


# --- what the model asks for ---

_SCHEMA = ArgumentSchema(
    "Probe",
    json.dumps(
        {
            "type": "object",
            "properties": {
                "command": {"type": "string", "minLength": 1, "pattern": r"\S"},
                "timeout_seconds": {"type": "integer", "minimum": 1, "maximum": 86400},
                "ratio": {"type": ["number", "null"]},
                "lines": {"type": "array", "items": {"type": "string"}},
                "mode": {"enum": ["a", "b"]},
                "more": {"type": "object"},
            },
            "required": ["command"],
            "additionalProperties": False,
        }
    ),
)


def _arguments(data: bytes) -> None:
    read = _SCHEMA.parse(data.decode("utf-8", "replace"))
    if isinstance(read, Rejection):
        assert read.message.startswith("Probe was not run")
        assert len(read.message.encode()) < 10_000
        return
    assert isinstance(read["command"], str) and read["command"].strip()
    assert isinstance(read.get("timeout_seconds", 1), int)
    json.dumps(read, allow_nan=False, ensure_ascii=False).encode()


# --- what people and servers say ---


def _cli_request(data: bytes) -> None:
    read = parse_request(data.decode(errors="surrogateescape"), "stdin", None)
    assert isinstance(read, RunRequest)
    for message in read.messages:
        message.content.encode()


def _settings(data: bytes) -> None:
    """Read a service's flags and variables: lines "name value"."""
    options = config.server_options(default_listen="127.0.0.1:0")
    environ = {"HOME": "/nowhere"}
    for line in data.decode("latin-1").split("\n"):
        name, _, value = line.partition(" ")
        if name in {option.variable for option in options} and "\0" not in value:
            environ[name] = value
    config.server_settings(config.read_settings("probe", "", options, [], environ))


def _keys(data: bytes) -> None:
    editor = LineEditor()
    for line in editor.feed(data.decode(errors="replace")):
        line.encode()


def _status(data: bytes) -> None:
    from google.rpc import status_pb2

    try:
        status = status_pb2.Status.FromString(data)
    except DecodeError:
        return
    error = from_status(status)
    assert error.reason
    assert error.retry_after_s is None or abs(error.retry_after_s) < 1e12


# --- messages ---


def _message(message_type: type[Message], check: Callable[[Any], object]) -> Callable[[bytes], None]:
    def decode(data: bytes) -> None:
        try:
            message = message_type.FromString(data)
        except DecodeError:
            return
        check(message)

    return decode


def _input(message: item_pb2.Input) -> None:
    check_fields_known(message)
    validate_input(message)


_RECORD_ERRORS = (HarnessError,)
_FILE_ERRORS = (FailedPreconditionError, InvalidArgumentError)

DECODERS: tuple[Decoder, ...] = (
    *(
        Decoder(name=f"stream-{name}", decode=_stream(make), tokens=(*JSON_TOKENS, *TEXT_TOKENS, b"data: ", b"event: "))
        for name, make in FOLDS.items()
    ),
    *(
        Decoder(name=f"answer-{name}", decode=_whole_answer(make), errors=(AttemptError,), tokens=JSON_TOKENS)
        for name, make in FOLDS.items()
    ),
    Decoder(name="recording", decode=_recording, errors=_FILE_ERRORS, tokens=JSON_TOKENS),
    Decoder(name="credentials", decode=_credentials, errors=_FILE_ERRORS, tokens=JSON_TOKENS),
    Decoder(
        name="providers",
        decode=lambda data: parse_user_file(data.decode(errors="replace"), Path("providers.json")),
        errors=(InvalidArgumentError,),
        tokens=JSON_TOKENS,
    ),
    Decoder(name="error-answer", decode=_error_answer, tokens=(*JSON_TOKENS, *TEXT_TOKENS)),
    Decoder(name="json-text", decode=_json_text, tokens=JSON_TOKENS),
    Decoder(name="script", decode=_script, errors=(InvalidArgumentError,), tokens=YAML_TOKENS),
    Decoder(name="skill", decode=_skill, tokens=YAML_TOKENS),
    Decoder(
        name="image",
        decode=_image,
        errors=(FailedPreconditionError, ResourceExhaustedError),
        tokens=IMAGE_TOKENS,
        max_cpu_s=3.0,
    ),
    Decoder(
        name="process-records",
        decode=_process_records,
        errors=(ValueError,),
        tokens=(*JSON_TOKENS, *TEXT_TOKENS),
    ),
    Decoder(name="output", decode=_output, tokens=TEXT_TOKENS),
    Decoder(name="tool-arguments", decode=_arguments, tokens=JSON_TOKENS),
    Decoder(name="run-request", decode=_cli_request, errors=(UsageError,), tokens=JSON_TOKENS),
    Decoder(name="settings", decode=_settings, errors=(config.ConfigError,), tokens=(*TEXT_TOKENS, b"\nUNREAL_AGENT_")),
    Decoder(name="keys", decode=_keys, tokens=(*TEXT_TOKENS, b"\x1b[200~", b"\x1b[201~", b"\x7f", b"\x15", b"\x17")),
    Decoder(name="status", decode=_status, tokens=PROTOBUF_TOKENS),
    Decoder(
        name="item",
        decode=lambda data: records.decode_item(data, "item 7"),
        errors=_RECORD_ERRORS,
        tokens=PROTOBUF_TOKENS,
    ),
    Decoder(
        name="operation",
        decode=lambda data: records.decode_operation(data, "operation 'a'"),
        errors=_RECORD_ERRORS,
        tokens=PROTOBUF_TOKENS,
    ),
    Decoder(name="input", decode=_message(item_pb2.Input, _input), errors=_RECORD_ERRORS, tokens=PROTOBUF_TOKENS),
    *(
        Decoder(
            name=f"request-{name}",
            decode=_message(message_type, check_fields_known),
            errors=(InvalidArgumentError,),
            tokens=PROTOBUF_TOKENS,
        )
        for name, message_type in {
            "submit": coordinator_pb2.SubmitInputRequest,
            "commit": store_pb2.CommitRequest,
            "add": manager_pb2.AddOperationsRequest,
        }.items()
    ),
)
