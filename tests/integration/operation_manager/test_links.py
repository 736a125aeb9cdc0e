"""What a link to an operation manager carries, and what is told when it breaks."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from clients.operation_manager import DialledLink, ProxyOperationManager
from harness.coordinator.manager_link import ManagerLink
from harness.errors import (
    HarnessError,
    InvalidArgumentError,
    PermissionDeniedError,
    ResourceExhaustedError,
    UnauthenticatedError,
    UnavailableError,
)
from harness.operations import OperationManager, is_terminal
from harness.operations.local_manager import PAGE_BYTES, LocalOperationManager
from harness.operations.manager_settings import LocalManagerSettings
from harness.primitives.streams import closing
from services._server.identity import Caller, CallFacts, CertifiedCaller
from services._server.server import Server, ServerSettings, serve
from services.operation_manager.servicer import manager_service
from tests.support.eventually import eventually
from tests.support.links import CuttingLink
from tests.support.manager_service import LOCAL, served_manager
from tests.support.operations import OWNER, acknowledging, adding, bash, cancelling, end_of, other, read_all, run
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.operation.v1 import operation_pb2
from unreal_agent.operationmanager.v1 import operation_manager_service_pb2 as manager_pb2

STDOUT = operation_pb2.OUTPUT_STREAM_STDOUT
MIB = 1024 * 1024


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    (tmp_path / "workspace").mkdir()
    return tmp_path / "workspace"


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[tuple[Server, ProxyOperationManager]]:
    async with served_manager(tmp_path / "state", LocalManagerSettings(grace_s=0.3)) as served:
        yield served


@pytest.fixture
def server(served: tuple[Server, ProxyOperationManager]) -> Server:
    return served[0]


@pytest.fixture
def proxy(served: tuple[Server, ProxyOperationManager]) -> ProxyOperationManager:
    return served[1]


async def drain(responses: AsyncIterator[object]) -> None:
    async for _ in responses:
        pass


# --- breaks ---


async def test_manager_that_is_not_there_is_unavailable_after_some_patience(tmp_path: Path) -> None:
    link = DialledLink(f"unix:{tmp_path}/nobody.sock", connect_patience_s=0.2)
    async with ProxyOperationManager(link) as proxy:
        with pytest.raises(UnavailableError) as refusal:
            await drain(proxy.watch_operations(manager_pb2.WatchOperationsRequest()))
    assert refusal.value.reason == "CONNECTION_LOST"
    assert "No such file" in refusal.value.message


async def test_closing_ends_what_is_open_and_may_be_repeated(server: Server) -> None:
    proxy = ProxyOperationManager(DialledLink(server.addresses[0]))
    has_begun = asyncio.Event()

    async def watch() -> str:
        with pytest.raises(UnavailableError) as ended:
            async for _ in proxy.watch_operations(manager_pb2.WatchOperationsRequest()):
                has_begun.set()
        return ended.value.reason

    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(watch())
        await has_begun.wait()
        await proxy.aclose()
        await proxy.aclose()
    with pytest.raises(UnavailableError) as refused:
        await proxy.get_server_info(manager_pb2.GetServerInfoRequest())
    assert (watching.result(), refused.value.reason) == ("CLIENT_CLOSED", "CLIENT_CLOSED")


async def test_watch_of_a_manager_that_hangs_ends(server: Server) -> None:
    async with ProxyOperationManager(DialledLink(server.addresses[0]), silence_s=0.2) as proxy:
        with pytest.raises(UnavailableError) as ended:
            await drain(proxy.watch_operations(manager_pb2.WatchOperationsRequest()))
    assert ended.value.reason == "MANAGER_SILENT"


def reading(offset: int = 0, limit_bytes: int = 0, tail_bytes: int = 0) -> manager_pb2.ReadOutputRequest:
    return manager_pb2.ReadOutputRequest(stream=STDOUT, offset=offset, limit_bytes=limit_bytes, tail_bytes=tail_bytes)


@pytest.mark.parametrize(
    ("request_", "cuts"),
    [
        (reading(), [1, 0, 2]),
        (reading(offset=7), [0, 1, 1]),
        (reading(limit_bytes=700_000), [1]),
        (reading(limit_bytes=700_000), [2]),
        (reading(tail_bytes=-1_100_000), [2, 0, 1]),
    ],
    ids=["whole", "from an offset", "with a limit", "only the word that it ends is lost", "the end"],
)
async def test_reader_goes_on_at_the_byte_where_a_link_broke(
    server: Server, workspace: Path, request_: manager_pb2.ReadOutputRequest, cuts: list[int]
) -> None:
    link = CuttingLink(DialledLink(server.addresses[0]))
    async with ProxyOperationManager(link) as proxy:
        ended = await run(proxy, bash("seq 1 250000"), workspace)
        link.cuts = cuts
        request_.operation_id = ended.operation_id
        data, pieces = await read_all(proxy, request_)
    whole = "".join(f"{number}\n" for number in range(1, 250_001)).encode()
    begin = len(whole) + request_.tail_bytes if request_.tail_bytes else request_.offset
    end = begin + request_.limit_bytes if request_.limit_bytes else len(whole)
    assert data == whole[begin:end]
    assert [piece.offset for piece in pieces[1:]] == [piece.offset + len(piece.data) for piece in pieces[:-1]]
    assert (pieces[-1].is_end, pieces[-1].offset) == (True, end)


async def test_output_that_is_gone_is_not_asked_for_again(server: Server) -> None:
    link = CuttingLink(DialledLink(server.addresses[0]))
    async with ProxyOperationManager(link) as proxy:
        with pytest.raises(HarnessError) as refusal:
            await read_all(proxy, manager_pb2.ReadOutputRequest(operation_id="nobody", stream=STDOUT))
    assert (refusal.value.reason, len(link.requests)) == ("OPERATION_NOT_FOUND", 1)


async def test_coordinators_link_outlives_whatever_the_manager_answers(tmp_path: Path) -> None:
    refusals: list[HarnessError] = [
        UnauthenticatedError("no token", reason="TOKEN_MISSING"),
        PermissionDeniedError("not for you", reason="NOT_PERMITTED"),
        ResourceExhaustedError("the disk is full", reason="DISK_FULL"),
        HarnessError("a bug", reason="INTERNAL"),
    ]

    async def identify(_: CallFacts) -> Caller:
        if refusals:
            raise refusals.pop(0)
        return CertifiedCaller(())

    async with (
        LocalOperationManager.open(tmp_path / "state", name="local") as manager,
        serve(ServerSettings(addresses=LOCAL), [manager_service(manager)], identify=identify) as server,
        ProxyOperationManager(DialledLink(server.addresses[0])) as proxy,
    ):
        link = ManagerLink("local", proxy, owner=OWNER, deliver=lambda *_: None, drop_session=lambda _: None)
        async with asyncio.TaskGroup() as tasks:
            runner = tasks.create_task(link.run())
            await eventually(lambda: link.instance_id)
            runner.cancel()
    assert (link.instance_id, refusals) == (manager.instance_id, [])


# --- sizes ---


async def test_largest_state_of_a_command_is_carried(proxy: ProxyOperationManager, workspace: Path) -> None:
    # A character of four bytes, as many as a command may ask for, on both streams.
    command = "head -c 4000000 /dev/zero | sed 's/\\x00/\\xf0\\x9f\\x98\\x80/g' | tee /dev/stderr"
    ended = await run(proxy, bash(command, max_output_chars=1_000_000), workspace)
    got = await proxy.get_operation(manager_pb2.GetOperationRequest(operation_id=ended.operation_id))
    assert (got.operation, ended.ByteSize() > 7 * MIB) == (ended, True)


async def test_page_of_large_states_ends_early(proxy: ProxyOperationManager, workspace: Path) -> None:
    large = f'"{"x" * (MIB - 2)}"'
    operations = [other("value", operation_pb2.ValueState(value_json=large)) for _ in range(18)]
    added = await proxy.add_operations(adding(operations, workspace))
    first = await proxy.list_operations(manager_pb2.ListOperationsRequest())
    second = await proxy.list_operations(manager_pb2.ListOperationsRequest(page_token=first.next_page_token))
    listed = [one.operation_id for page in (first, second) for one in page.operations]
    assert listed == [one.operation_id for one in added.results]
    assert first.ByteSize() < PAGE_BYTES + 2 * MIB
    assert (len(first.operations), second.next_page_token) == (16, "")


async def test_add_too_large_for_one_message_is_carried_in_parts_and_in_order(tmp_path: Path, workspace: Path) -> None:
    operations = []
    for number in range(4):
        # What is refused is not journalled: only its size matters here.
        refused = bash("#" * (13 * MIB))
        refused.type_version = 99
        operations += [refused, bash(f"echo {number} >> order")]
    async with served_manager(tmp_path / "state", LocalManagerSettings(concurrency=1)) as (_, proxy):
        response = await proxy.add_operations(adding(operations, workspace))
        assert [result.operation_id for result in response.results] == [one.operation_id for one in operations]
        await end_of(proxy, operations[-1].operation_id)
    assert (workspace / "order").read_text().split() == list("0123")


async def test_watcher_that_does_not_read_holds_up_nobody_and_sees_every_end(
    server: Server, proxy: ProxyOperationManager, workspace: Path
) -> None:
    operations = [bash("seq 1 60000", max_output_chars=300_000) for _ in range(24)]
    seen: dict[str, operation_pb2.Operation] = {}
    async with (
        ProxyOperationManager(DialledLink(server.addresses[0])) as slow,
        closing(slow.watch_operations(manager_pb2.WatchOperationsRequest())) as watch,
    ):
        assert (await anext(watch)).HasField("hello")
        await proxy.add_operations(adding(operations, workspace))
        ended = {one.operation_id: await end_of(proxy, one.operation_id) for one in operations}
        position = 0
        async for event in watch:
            assert event.update.position > position
            position = event.update.position
            if is_terminal(event.update.operation):
                seen[event.update.operation.operation_id] = event.update.operation
            if len(seen) == len(operations):
                break
    assert seen == ended


# --- files ---


def entry(path: str, content: bytes) -> manager_pb2.WorkspaceEntry:
    ref = llm_pb2.BlobRef(digest=hashlib.sha256(content).hexdigest(), size_bytes=len(content))
    return manager_pb2.WorkspaceEntry(path=path, mode=0o640, file=ref)


async def upload(manager: OperationManager, workspace: Path, files: dict[str, bytes]) -> int:
    async def requests() -> AsyncIterator[manager_pb2.UploadWorkspaceRequest]:
        entries = [entry(path, content) for path, content in files.items()]
        yield manager_pb2.UploadWorkspaceRequest(workspace=str(workspace), entries=entries)
        for one, content in zip(entries, files.values(), strict=True):
            for offset in range(0, len(content), MIB // 2):
                chunk = manager_pb2.WorkspaceChunk(
                    digest=one.file.digest, offset=offset, data=content[offset : offset + MIB // 2]
                )
                yield manager_pb2.UploadWorkspaceRequest(chunk=chunk)

    answers = [answer async for answer in manager.upload_workspace(requests())]
    return answers[-1].completed_entries


async def test_files_go_into_a_workspace_and_come_back(proxy: ProxyOperationManager, workspace: Path) -> None:
    files = {"deep/er/large": os.urandom(5 * MIB), "small": b"x"}
    assert await upload(proxy, workspace, files) == 2
    got: dict[str, bytes] = {}
    digests: dict[str, str] = {}
    async for part in proxy.download_workspace(manager_pb2.DownloadWorkspaceRequest(workspace=str(workspace))):
        digests.update({one.file.digest: one.path for one in part.entries if one.HasField("file")})
        if part.HasField("chunk"):
            path = digests[part.chunk.digest]
            got[path] = got.get(path, b"") + part.chunk.data
    assert got == files


async def test_upload_that_leaves_the_workspace_is_refused(proxy: ProxyOperationManager, workspace: Path) -> None:
    with pytest.raises(InvalidArgumentError) as refusal:
        await upload(proxy, workspace, {"../escape": b"x"})
    assert refusal.value.reason == "INVALID_PATH"


async def test_failure_of_the_uploaders_own_source_is_the_uploaders(
    proxy: ProxyOperationManager, workspace: Path
) -> None:
    is_closed = asyncio.Event()

    async def requests() -> AsyncIterator[manager_pb2.UploadWorkspaceRequest]:
        try:
            yield manager_pb2.UploadWorkspaceRequest(workspace=str(workspace), entries=[entry("file", b"content")])
            raise OSError("the disk is gone")
        finally:
            is_closed.set()

    with pytest.raises(OSError, match="the disk is gone"):
        await drain(proxy.upload_workspace(requests()))
    assert is_closed.is_set()
    await eventually(lambda: os.listdir(workspace) == [])


async def test_source_of_an_upload_that_was_refused_is_closed(proxy: ProxyOperationManager, workspace: Path) -> None:
    is_closed = asyncio.Event()

    async def requests() -> AsyncIterator[manager_pb2.UploadWorkspaceRequest]:
        try:
            yield manager_pb2.UploadWorkspaceRequest(workspace="relative")
            await asyncio.Event().wait()
        finally:
            is_closed.set()

    with pytest.raises(InvalidArgumentError) as refusal:
        await drain(proxy.upload_workspace(requests()))
    assert (refusal.value.reason, is_closed.is_set()) == ("INVALID_WORKSPACE", True)


# --- releases ---

UNKNOWN_FIELD = b"\xa2\x3f\x03new"  # field 1012, a string


async def test_operation_of_a_later_release_is_refused_alone(proxy: ProxyOperationManager, workspace: Path) -> None:
    later, known = bash("true"), bash("true")
    later.MergeFromString(UNKNOWN_FIELD)
    response = await proxy.add_operations(adding([later, known], workspace))
    assert [one.refusal.reason for one in response.results] == ["UNKNOWN_FIELDS", ""]
    await end_of(proxy, known.operation_id)


async def test_request_of_a_later_release_that_changes_something_is_refused(
    proxy: ProxyOperationManager, workspace: Path
) -> None:
    value = other("value", operation_pb2.ValueState(value_json="1"))
    add, cancel, acknowledge = adding([value], workspace), cancelling("any"), acknowledging(value)
    for request in (add, cancel, acknowledge):
        request.MergeFromString(UNKNOWN_FIELD)
    reasons = []
    for call in (proxy.add_operations(add), proxy.cancel_operation(cancel), proxy.acknowledge_updates(acknowledge)):
        with pytest.raises(InvalidArgumentError) as refusal:
            await call
        reasons.append(refusal.value.reason)
    assert reasons == ["UNKNOWN_FIELDS"] * 3
    assert not (await proxy.list_operations(manager_pb2.ListOperationsRequest())).operations
