"""Recordings: what was sent to a provider and what it answered, kept without credentials, and read again as a script.

One directory per session, one file per recorded outcome: `000000.json` for the first response or failure of the
history, `compaction-000000.json` for the first compaction. So a request that is asked again after a crash takes the
place of the first one, and the `scripted` provider finds each answer where the history stands.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any

from google.protobuf import json_format

from harness.errors import FailedPreconditionError, InvalidArgumentError
from harness.llm import json_text
from harness.llm.failures import without_secret_shapes
from harness.llm.llm import LLMRequest
from harness.llm.script import MAX_SCRIPT_BYTES, Script, ScriptEntry
from unreal_agent.llm.v1 import llm_pb2

VERSION = 1

_FILE = re.compile(r"(compaction-)?(\d{6,9})\.json")
_KEPT_HEADERS = re.compile(
    r"accept|content-type|content-encoding|user-agent|anthropic-version|anthropic-beta|openai-(?!organization).*"
    r"|retry-after.*|(x-|anthropic-)?ratelimit.*|request-id|x-request-id|x-generation-id|cf-ray|date"
)
"""All others may hold a credential, a cookie or an account."""


class Exchange:
    """One HTTP request and its answer, as far as it came."""

    def __init__(self, *, url: str, headers: Mapping[str, str], body: bytes) -> None:
        """Keep the request."""
        self.url = url
        self.headers = headers
        self.body = body
        self.status = 0
        self.answer_headers: Mapping[str, str] = {}
        self.answer = bytearray()

    def answered(self, status: int, headers: Mapping[str, str]) -> None:
        """Keep an answer's head."""
        self.status, self.answer_headers = status, headers

    async def kept(self, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Pass an answer's body on, and keep it."""
        async for chunk in chunks:
            self.answer += chunk
            yield chunk


class Recorder:
    """Writes recordings below one directory, which it makes."""

    def __init__(self, directory: Path) -> None:
        """Name the directory.

        Raises:
            FailedPreconditionError: It cannot be made.
        """
        self._directory = directory
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as err:
            raise FailedPreconditionError(
                f"recordings cannot be kept in {str(directory)!r} ({err.strerror}): name another directory",
                reason="LLM_RECORDING_UNWRITABLE",
            ) from err

    async def keep(
        self,
        request: LLMRequest,
        exchanges: Sequence[Exchange],
        outcome: llm_pb2.ModelOutput | llm_pb2.Failure,
        secrets: Sequence[str],
    ) -> None:
        """Write one request with its outcome; the file is there whole or not at all.

        Raises:
            FailedPreconditionError: It cannot be written.
        """
        text = _without(json_text.write(_record(request, exchanges, outcome, secrets)), secrets)
        prefix, number = ("compaction-", request.recorded_compactions) if request.is_compaction else ("", None)
        name = f"{prefix}{request.recorded_outcomes if number is None else number:06d}.json"
        try:
            await asyncio.to_thread(_write, self._directory / request.session_id, name, text)
        except OSError as err:
            raise FailedPreconditionError(
                f"recording {name!r} cannot be written to {str(self._directory)!r} ({err.strerror})",
                reason="LLM_RECORDING_UNWRITABLE",
            ) from err


def load_recording(directory: Path) -> Script:
    """Return the recording of a session as a script.

    Args:
        directory: A session's directory, or one that holds that of a single session.

    Raises:
        FailedPreconditionError: There is no recording, or there are several, or a file of it is missing.
        InvalidArgumentError: A file is no recording.
    """
    files = _files(directory)
    if not files:
        sessions = sorted(below.name for below in directory.iterdir() if below.is_dir() and _files(below))
        if len(sessions) != 1:
            found = f"the recordings of {len(sessions)} sessions: name one of its directories" if sessions else "none"
            raise FailedPreconditionError(
                f"{str(directory)!r} should hold a recording, but holds {found}", reason="LLM_SCRIPT_MISSING"
            )
        directory = directory / sessions[0]
        files = _files(directory)
    return Script(
        responses=_entries(directory, files.get("", {})), compactions=_entries(directory, files.get("compaction-", {}))
    )


def _record(
    request: LLMRequest,
    exchanges: Sequence[Exchange],
    outcome: llm_pb2.ModelOutput | llm_pb2.Failure,
    secrets: Sequence[str],
) -> dict[str, object]:
    # A model that says a secret says it in pieces, which no search finds: such an answer is kept as its outcome alone.
    said = str(outcome)
    is_said = any(secret in said for secret in secrets if secret)
    kind = "output" if isinstance(outcome, llm_pb2.ModelOutput) else "failure"
    return {
        "version": VERSION,
        "session_id": request.session_id,
        "turn_id": request.turn_id,
        kind: json_format.MessageToDict(outcome, preserving_proto_field_name=True),
        "exchanges": [
            {
                "request": {"url": one.url, "headers": _headers(one.headers), "body": one.body.decode()},
                "response": {
                    "status": one.status,
                    "headers": _headers(one.answer_headers),
                    "body": "***" if is_said else _answer(one),
                },
            }
            for one in exchanges
        ],
    }


def _answer(exchange: Exchange) -> str:
    """Return an answer's body; that of an error without what looks like a key, which providers show in part."""
    text = bytes(exchange.answer).decode(errors="replace")
    return text if exchange.status == HTTPStatus.OK else without_secret_shapes(text)


def _headers(headers: Mapping[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items() if _KEPT_HEADERS.fullmatch(name.lower())}


def _without(text: str, secrets: Sequence[str]) -> str:
    for secret in secrets:
        if secret:
            # As JSON writes it, and as JSON inside JSON does.
            once = json_text.write(secret)[1:-1]
            text = text.replace(json_text.write(once)[1:-1], "***").replace(once, "***")
    return text


def _write(directory: Path, name: str, text: str) -> None:
    directory.mkdir(mode=0o700, exist_ok=True)
    draft = directory / f".{name}.{os.getpid()}"
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(draft, directory / name)


def _files(directory: Path) -> dict[str, dict[int, Path]]:
    """Return a session's files by kind and number."""
    found: dict[str, dict[int, Path]] = {}
    for path in directory.iterdir():
        name = _FILE.fullmatch(path.name)
        if name is not None:
            found.setdefault(name.group(1) or "", {})[int(name.group(2))] = path
    return found


def _entries(directory: Path, files: Mapping[int, Path]) -> tuple[ScriptEntry, ...]:
    for number in range(len(files)):
        if number not in files:
            raise FailedPreconditionError(
                f"the recording in {str(directory)!r} lacks number {number}: it began in the midst of a session",
                reason="LLM_SCRIPT_MISSING",
            )
    return tuple(_entry(files[number]) for number in range(len(files)))


def _entry(path: Path) -> ScriptEntry:
    try:
        if path.stat().st_size > MAX_SCRIPT_BYTES:
            raise ValueError("is too large")
        value: dict[str, Any] | None = json_text.read_object(path.read_text(encoding="utf-8"))
        if value is None or value.get("version") != VERSION:
            raise ValueError(f"is no recording of version {VERSION}")
        # Half a surrogate pair, which JSON can write, makes protobuf fail with an error of the interpreter's.
        json_text.write(value).encode()
        if "output" in value:
            return ScriptEntry(place=path.name, output=json_format.ParseDict(value["output"], llm_pb2.ModelOutput()))
        return ScriptEntry(place=path.name, failure=json_format.ParseDict(value["failure"], llm_pb2.Failure()))
    except (OSError, ValueError, KeyError, TypeError, json_format.ParseError) as err:
        raise InvalidArgumentError(
            f"recording {str(path)!r} cannot be played: {str(err)[:300]}", reason="LLM_SCRIPT_INVALID"
        ) from err
