"""Workspaces go in and out whole, and nothing goes anywhere else."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from harness.errors import FailedPreconditionError, HarnessError, InvalidArgumentError
from harness.operations.workspace_transfer import PIECE_BYTES, download, upload
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.operationmanager.v1 import operation_manager_service_pb2 as manager_pb2

Entry = manager_pb2.WorkspaceEntry


def file(path: str, content: bytes, mode: int = 0o644) -> Entry:
    digest = hashlib.sha256(content).hexdigest()
    return Entry(path=path, mode=mode, file=llm_pb2.BlobRef(digest=digest, size_bytes=len(content)))


def chunks(content: bytes) -> list[manager_pb2.WorkspaceChunk]:
    digest = hashlib.sha256(content).hexdigest()
    return [
        manager_pb2.WorkspaceChunk(digest=digest, offset=offset, data=content[offset : offset + PIECE_BYTES])
        for offset in range(0, len(content), PIECE_BYTES)
    ]


async def send(
    workspace: Path, *requests: manager_pb2.UploadWorkspaceRequest
) -> list[manager_pb2.UploadWorkspaceResponse]:
    async def sending() -> AsyncIterator[manager_pb2.UploadWorkspaceRequest]:
        for number, request in enumerate(requests):
            if number == 0:
                request.workspace = str(workspace)
            yield request

    return [response async for response in upload(sending())]


def entries(*listed: Entry) -> manager_pb2.UploadWorkspaceRequest:
    return manager_pb2.UploadWorkspaceRequest(entries=listed)


def contents(content: bytes) -> list[manager_pb2.UploadWorkspaceRequest]:
    return [manager_pb2.UploadWorkspaceRequest(chunk=chunk) for chunk in chunks(content)]


def picture(directory: Path) -> dict[str, tuple[int, object]]:
    """Everything below a directory: type and mode, content or target."""
    seen: dict[str, tuple[int, object]] = {}
    for path in sorted(directory.rglob("*")):
        mode = path.lstat().st_mode
        what: object = None
        if stat.S_ISLNK(mode):
            what = os.readlink(path)
        elif stat.S_ISREG(mode):
            what = path.read_bytes()
        seen[str(path.relative_to(directory))] = (mode, what)
    return seen


async def test_what_is_downloaded_and_uploaded_again_is_the_same(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "deep" / "er").mkdir(parents=True)
    (source / "empty dir").mkdir(mode=0o700)
    (source / "empty").touch()
    big = os.urandom(PIECE_BYTES + 5)
    (source / "deep" / "er" / "big").write_bytes(big)
    (source / "same").write_bytes(big)
    (source / "run.sh").write_bytes(b"#!/bin/sh\n")
    (source / "run.sh").chmod(0o755)
    (source / "secret").write_bytes(b"s")
    (source / "secret").chmod(0o600)
    (source / "dangling").symlink_to("/nowhere/at all")
    os.mkfifo(source / "fifo")
    responses = [r async for r in download(manager_pb2.DownloadWorkspaceRequest(workspace=str(source)))]
    digests = [response.chunk.digest for response in responses if response.HasField("chunk")]
    assert len(digests) == len(set(digests)) + 1, "the large content comes once, in two pieces"
    requests = [manager_pb2.UploadWorkspaceRequest(entries=r.entries) for r in responses if r.entries]
    requests += [manager_pb2.UploadWorkspaceRequest(chunk=r.chunk) for r in responses if r.HasField("chunk")]
    target = tmp_path / "target"
    progress = await send(target, *requests)
    (source / "fifo").unlink()
    assert picture(target) == picture(source)
    assert progress[-1].completed_entries == len(picture(source))


async def test_repeated_upload_asks_only_for_what_is_missing(tmp_path: Path) -> None:
    first, second = b"first", b"second"
    request = entries(file("a", first), file("b", second), file("c", second))
    responses = await send(tmp_path / "w", request, *contents(first))
    assert responses[0].missing_digests == [hashlib.sha256(c).hexdigest() for c in (first, second)]
    assert responses[-1].completed_entries == 1
    again = entries(file("a", first), file("b", second), file("c", second))
    responses = await send(tmp_path / "w", again, *contents(second))
    assert responses[0].missing_digests == [hashlib.sha256(second).hexdigest()]
    assert {path.name: path.read_bytes() for path in (tmp_path / "w").iterdir()} == {
        "a": first,
        "b": second,
        "c": second,
    }


async def test_known_contents_are_not_sent_again_and_one_directory_can_be_asked_for(tmp_path: Path) -> None:
    (tmp_path / "w" / "below").mkdir(parents=True)
    (tmp_path / "w" / "above").write_bytes(b"above")
    (tmp_path / "w" / "below" / "a").write_bytes(b"a")
    request = manager_pb2.DownloadWorkspaceRequest(
        workspace=str(tmp_path / "w"), path="below", known_digests=[hashlib.sha256(b"a").hexdigest()]
    )
    responses = [response async for response in download(request)]
    assert [[entry.path for entry in response.entries] for response in responses] == [["below/a"]]


@pytest.mark.parametrize("path", ["/etc/x", "../x", "a/../../x", "", "a//b", "./a", "a/.", "a\0b", "a" * 5000])
async def test_path_that_leaves_the_workspace_is_refused(tmp_path: Path, path: str) -> None:
    with pytest.raises(InvalidArgumentError) as refusal:
        await send(tmp_path / "w", entries(file(path, b"x")), *contents(b"x"))
    assert refusal.value.reason == "INVALID_PATH"


async def test_no_link_leads_out_of_the_workspace(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "f").write_bytes(b"untouched")
    link = Entry(path="link", symlink_target=str(outside))
    with pytest.raises(FailedPreconditionError) as refusal:
        await send(tmp_path / "w", entries(link, file("link/f", b"x")), *contents(b"x"))
    assert refusal.value.reason == "PATH_LEAVES_WORKSPACE"
    # A link in the place of a file is replaced, not followed.
    to_file = Entry(path="g", symlink_target=str(outside / "f"))
    await send(tmp_path / "w", entries(to_file, file("g", b"x")), *contents(b"x"))
    assert (outside / "f").read_bytes() == b"untouched"
    assert (tmp_path / "w" / "g").read_bytes() == b"x"
    request = manager_pb2.DownloadWorkspaceRequest(workspace=str(tmp_path / "w"), path="link")
    with pytest.raises(FailedPreconditionError):
        [response async for response in download(request)]


async def test_set_user_id_is_not_carried(tmp_path: Path) -> None:
    await send(tmp_path / "w", entries(file("f", b"x", mode=0o4755)), *contents(b"x"))
    assert stat.S_IMODE((tmp_path / "w" / "f").stat().st_mode) == 0o755


@pytest.mark.parametrize("fault", ["digest", "offset", "kind"])
async def test_broken_upload_leaves_no_file(tmp_path: Path, fault: str) -> None:
    requests = [entries(file("f", b"xy")), *contents(b"xy")]
    if fault == "digest":
        requests[1].chunk.data = b"zz"
    elif fault == "offset":
        requests[1].chunk.offset = 1
    else:
        requests = [entries(Entry(path="f"))]
    with pytest.raises(HarnessError):
        await send(tmp_path / "w", *requests)
    assert list((tmp_path / "w").iterdir()) == []


async def test_abandoned_upload_leaves_no_piece(tmp_path: Path) -> None:
    content = b"x" * (PIECE_BYTES + 1)
    await send(tmp_path / "w", entries(file("f", content)), contents(content)[0])
    assert list((tmp_path / "w").iterdir()) == []


@pytest.mark.parametrize("workspace", ["relative", "", "/a\0b"])
async def test_workspace_must_be_absolute(workspace: str) -> None:
    with pytest.raises(InvalidArgumentError):
        [response async for response in download(manager_pb2.DownloadWorkspaceRequest(workspace=workspace))]


async def test_missing_workspace_can_not_be_downloaded(tmp_path: Path) -> None:
    request = manager_pb2.DownloadWorkspaceRequest(workspace=str(tmp_path / "none"))
    with pytest.raises(FailedPreconditionError) as refusal:
        [response async for response in download(request)]
    assert refusal.value.reason == "WORKSPACE_UNAVAILABLE"
