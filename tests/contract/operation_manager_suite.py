"""What every operation manager must do, local or remote. A subclass says how one is opened over a state directory."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
from PIL import Image

from harness.errors import (
    ConflictError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    OutOfRangeError,
)
from harness.operations.manager_settings import LocalManagerSettings
from harness.operations.operations import OperationManager
from tests.support.eventually import eventually
from tests.support.operations import (
    OWNER,
    SESSION,
    acknowledging,
    adding,
    bash,
    cancelling,
    carriers,
    end_of,
    other,
    read_all,
    run,
    running,
    states,
)
from unreal_agent.operation.v1 import operation_pb2
from unreal_agent.operationmanager.v1 import operation_manager_service_pb2 as manager_pb2

READY = operation_pb2.OPERATION_STATUS_READY
AWAITING = operation_pb2.OPERATION_STATUS_AWAITING
CANCELING = operation_pb2.OPERATION_STATUS_CANCELING
COMPLETED = operation_pb2.OPERATION_STATUS_COMPLETED
FAILED = operation_pb2.OPERATION_STATUS_FAILED
CANCELED = operation_pb2.OPERATION_STATUS_CANCELED

QUICK = LocalManagerSettings(grace_s=0.3, keepalive_s=0.2)


class OperationManagerSuite:
    """The contract."""

    def open(
        self, state_directory: Path, settings: LocalManagerSettings = QUICK
    ) -> AbstractAsyncContextManager[OperationManager]:
        """Open a manager; what ran before goes on."""
        raise NotImplementedError

    @pytest.fixture
    async def manager(self, tmp_path: Path) -> AsyncIterator[OperationManager]:
        async with self.open(tmp_path / "state") as manager:
            yield manager

    @pytest.fixture
    def workspace(self, tmp_path: Path) -> Path:
        (tmp_path / "workspace").mkdir()
        return tmp_path / "workspace"

    # --- adding ---

    async def test_steps_of_a_command_are_sent_in_order_and_none_after_the_end(
        self, manager: OperationManager, workspace: Path
    ) -> None:
        operation = bash("echo hello; sleep 0.2")
        await manager.add_operations(adding([operation], workspace))
        seen = await states(manager, operation.operation_id)
        steps = [state.step for state in seen]
        assert steps == sorted(set(steps))
        assert [state.status for state in seen][-1] == COMPLETED
        assert seen[-1].bash.stdout.head == "hello\n"
        assert seen[-1].HasField("start_time") and seen[-1].HasField("end_time")

    async def test_repeated_add_starts_nothing_before_and_after_the_end_and_the_acknowledgement(
        self, manager: OperationManager, workspace: Path
    ) -> None:
        operation = bash("echo x >> count")
        request = adding([operation, operation], workspace)
        await asyncio.gather(manager.add_operations(request), manager.add_operations(request))
        ended = await end_of(manager, operation.operation_id)
        again = await manager.add_operations(request)
        assert again.results[0].operation == ended
        await manager.acknowledge_updates(acknowledging(ended))
        answered = (await manager.add_operations(request)).results[0].operation
        assert (answered.status, answered.step) == (COMPLETED, ended.step)
        assert answered.WhichOneof("state") is None
        assert (workspace / "count").read_text() == "x\n"

    async def test_refusal_of_one_does_not_concern_the_others(self, manager: OperationManager, workspace: Path) -> None:
        good, unknown, over, invalid, odd = bash("true"), bash("true"), bash("true"), bash(" "), bash("true")
        unknown.type_version = 99
        over.status = COMPLETED
        odd.operation_id = "../escape"
        response = await manager.add_operations(adding([unknown, over, invalid, odd, good], workspace))
        assert [result.refusal.reason for result in response.results] == [
            "UNSUPPORTED_OPERATION_VERSION",
            "TERMINAL_OPERATION",
            "INVALID_OPERATION",
            "INVALID_OPERATION",
            "",
        ]
        assert (await end_of(manager, good.operation_id)).status == COMPLETED

    async def test_other_instance_is_refused(self, manager: OperationManager, workspace: Path) -> None:
        request = adding([bash("true")], workspace)
        request.instance_id = "another"
        with pytest.raises(FailedPreconditionError) as refusal:
            await manager.add_operations(request)
        info = await manager.get_server_info(manager_pb2.GetServerInfoRequest())
        assert refusal.value.reason == "WRONG_INSTANCE"
        assert refusal.value.metadata == {"instance_id": info.info.instance_id}

    async def test_lower_epoch_is_refused_also_after_a_restart(self, tmp_path: Path, workspace: Path) -> None:
        async with self.open(tmp_path / "state") as manager:
            await manager.add_operations(adding([bash("true")], workspace, epoch=7))
            with pytest.raises(ConflictError) as refusal:
                await manager.cancel_operation(cancelling("any", epoch=6))
            assert refusal.value.reason == "STALE_EPOCH"
        async with self.open(tmp_path / "state") as manager:
            with pytest.raises(ConflictError) as refusal:
                await manager.add_operations(adding([bash("true")], workspace, epoch=6))
            assert refusal.value.reason == "STALE_EPOCH"
            await manager.add_operations(adding([bash("true")], workspace, epoch=7))

    async def test_refused_cancel_raises_no_epoch(self, tmp_path: Path, workspace: Path) -> None:
        async with self.open(tmp_path / "state") as manager:
            ended = await run(manager, bash("true"), workspace)
            for _ in range(2):
                request = cancelling(ended.operation_id, epoch=9)
                request.fence.session_id = "session-2"
                with pytest.raises(InvalidArgumentError) as refusal:
                    await manager.cancel_operation(request)
                assert refusal.value.reason == "FENCE_MISMATCH"
                # A tombstone belongs to its session as well.
                await manager.acknowledge_updates(acknowledging(ended))
            await manager.add_operations(adding([bash("true", session_id="session-2")], workspace, epoch=1))

    async def test_highest_of_two_fences_of_a_session_holds(self, tmp_path: Path, workspace: Path) -> None:
        async with self.open(tmp_path / "state") as manager:
            request = adding([bash("true")], workspace, epoch=7)
            request.fences.add(session_id=SESSION, epoch=5)
            await manager.add_operations(request)
        async with self.open(tmp_path / "state") as manager:
            with pytest.raises(ConflictError):
                await manager.cancel_operation(cancelling("any", epoch=6))

    async def test_numbers_beyond_the_journal_are_refused_and_end_nothing(
        self, manager: OperationManager, workspace: Path
    ) -> None:
        for step in (0, 2**64 - 1):
            operation = bash("true")
            operation.step = step
            response = await manager.add_operations(adding([operation], workspace))
            assert response.results[0].refusal.reason == "INVALID_OPERATION"
        with pytest.raises(InvalidArgumentError):
            await manager.add_operations(adding([bash("true")], workspace, epoch=2**64 - 1))
        with pytest.raises(InvalidArgumentError):
            await manager.cancel_operation(cancelling("any", epoch=2**63))
        assert (await run(manager, bash("true"), workspace)).status == COMPLETED

    async def test_acknowledgement_of_a_state_to_come_hides_none(
        self, manager: OperationManager, workspace: Path
    ) -> None:
        operation = bash("read line < pipe")
        os.mkfifo(workspace / "pipe")
        await manager.add_operations(adding([operation], workspace))
        state = await running(manager, operation.operation_id)
        state.step = 2**64 - 1
        await manager.acknowledge_updates(acknowledging(state))
        await asyncio.to_thread((workspace / "pipe").write_text, "go\n")
        assert (await end_of(manager, operation.operation_id)).status == COMPLETED
        assert await states(manager, operation.operation_id) != []

    async def test_what_is_buried_answers_as_a_tombstone_at_once(
        self, manager: OperationManager, workspace: Path
    ) -> None:
        ended = await run(manager, bash("true"), workspace)
        await manager.acknowledge_updates(acknowledging(ended))
        request = manager_pb2.GetOperationRequest(operation_id=ended.operation_id)
        answers = [
            (await manager.get_operation(request)).operation,
            (await manager.cancel_operation(cancelling(ended.operation_id))).operation,
        ]
        assert [(answer.status, answer.WhichOneof("state")) for answer in answers] == [(COMPLETED, None)] * 2

    async def test_missing_fence_is_refused(self, manager: OperationManager, workspace: Path) -> None:
        request = adding([bash("true")], workspace)
        del request.fences[:]
        with pytest.raises(InvalidArgumentError):
            await manager.add_operations(request)

    async def test_operations_of_one_session_start_in_order(self, tmp_path: Path, workspace: Path) -> None:
        settings = LocalManagerSettings(concurrency=1)
        async with self.open(tmp_path / "state", settings) as manager:
            operations = [bash(f"echo {number} >> order") for number in range(6)]
            await manager.add_operations(adding(operations, workspace))
            await end_of(manager, operations[-1].operation_id)
        assert (workspace / "order").read_text().split() == list("012345")

    async def test_bound_is_kept_and_fair_between_sessions(self, tmp_path: Path, workspace: Path) -> None:
        settings = LocalManagerSettings(concurrency=2)
        async with self.open(tmp_path / "state", settings) as manager:
            many = [bash("echo many >> order; sleep 0.05", session_id="many") for _ in range(8)]
            one = bash("echo one >> order", session_id="one")
            await manager.add_operations(adding([*many, one], workspace))
            await end_of(manager, many[-1].operation_id)
        order = (workspace / "order").read_text().split()
        assert len(order) == 9
        assert order.index("one") <= 3

    # --- cancelling ---

    async def test_cancelled_command_is_gone_before_it_is_reported(
        self, manager: OperationManager, workspace: Path
    ) -> None:
        operation = bash("(sleep 1; touch late) & trap 'echo bye' TERM; touch ready; sleep 60")
        await manager.add_operations(adding([operation], workspace))
        await eventually((workspace / "ready").exists)
        for _ in range(2):
            await manager.cancel_operation(cancelling(operation.operation_id))
        ended = await end_of(manager, operation.operation_id)
        assert carriers(operation.operation_id) == []
        assert (ended.status, ended.error.reason, ended.error.message) == (CANCELED, "CANCELED", "stop it")
        assert ended.bash.stdout.head == "bye\n"
        assert not (workspace / "late").exists()

    async def test_cancelled_before_its_turn_never_starts(self, tmp_path: Path, workspace: Path) -> None:
        async with self.open(tmp_path / "state", LocalManagerSettings(concurrency=1, grace_s=0.3)) as manager:
            first, second = bash("sleep 60"), bash("touch started")
            await manager.add_operations(adding([first, second], workspace))
            response = await manager.cancel_operation(cancelling(second.operation_id))
            assert response.operation.status == CANCELED
            await manager.cancel_operation(cancelling(first.operation_id))
            await end_of(manager, first.operation_id)
        assert not (workspace / "started").exists()

    async def test_cancelled_while_it_is_being_started_is_over_or_never_was(
        self, manager: OperationManager, workspace: Path
    ) -> None:
        operation = bash("sleep 60")
        await manager.add_operations(adding([operation], workspace))
        await manager.cancel_operation(cancelling(operation.operation_id))
        assert (await end_of(manager, operation.operation_id)).status == CANCELED
        assert carriers(operation.operation_id) == []

    async def test_cancelled_before_it_is_added_never_starts(self, tmp_path: Path, workspace: Path) -> None:
        operation = bash("touch started")
        async with self.open(tmp_path / "state") as manager:
            response = await manager.cancel_operation(cancelling(operation.operation_id))
            assert not response.HasField("operation")
        async with self.open(tmp_path / "state") as manager:
            added = (await manager.add_operations(adding([operation], workspace))).results[0].operation
            assert (added.status, added.step) == (CANCELED, operation.step + 1)
            assert await states(manager, operation.operation_id) == [added]
            await manager.acknowledge_updates(acknowledging(added))
        assert not (workspace / "started").exists()

    async def test_cancelling_what_is_over_changes_nothing(self, manager: OperationManager, workspace: Path) -> None:
        ended = await run(manager, bash("true"), workspace)
        assert (await manager.cancel_operation(cancelling(ended.operation_id))).operation == ended

    @pytest.mark.parametrize("way", ["cancel", "acknowledge"])
    async def test_discarded_command_is_ended_and_its_end_not_sent(
        self, manager: OperationManager, workspace: Path, way: str
    ) -> None:
        operation = bash("sleep 60")
        await manager.add_operations(adding([operation], workspace))
        state = await running(manager, operation.operation_id)
        if way == "cancel":
            await manager.cancel_operation(cancelling(operation.operation_id, discard=True))
        else:
            request = acknowledging(state)
            request.acknowledgements[0].discarded = True
            await manager.acknowledge_updates(request)

        async def is_buried() -> bool:
            listed = await manager.list_operations(manager_pb2.ListOperationsRequest())
            return not listed.operations and not carriers(operation.operation_id)

        await eventually(is_buried, within_s=10)
        answered = (await manager.add_operations(adding([operation], workspace))).results[0].operation
        assert (answered.status, answered.WhichOneof("state")) == (CANCELED, None)

    # --- watching ---

    async def test_watch_begins_with_hello_and_keeps_alive(self, manager: OperationManager) -> None:
        stream = manager.watch_operations(manager_pb2.WatchOperationsRequest())
        kinds = [(await anext(stream)).WhichOneof("event") for _ in range(3)]
        assert kinds == ["hello", "keepalive", "keepalive"]

    async def test_unacknowledged_end_is_sent_again_after_a_restart(self, tmp_path: Path, workspace: Path) -> None:
        async with self.open(tmp_path / "state") as manager:
            ended = await run(manager, bash("echo kept"), workspace)
        async with self.open(tmp_path / "state") as manager:
            assert await states(manager, ended.operation_id) == [ended]
            await manager.acknowledge_updates(acknowledging(ended))
            stream = manager.watch_operations(manager_pb2.WatchOperationsRequest())
            assert [(await anext(stream)).WhichOneof("event") for _ in range(2)] == ["hello", "keepalive"]

    async def test_acknowledgement_of_an_older_state_keeps_the_end(
        self, manager: OperationManager, workspace: Path
    ) -> None:
        ended = await run(manager, bash("true"), workspace)
        older = operation_pb2.Operation(operation_id=ended.operation_id, step=ended.step - 1)
        await manager.acknowledge_updates(acknowledging(older))
        assert await states(manager, ended.operation_id) == [ended]

    async def test_watcher_sees_only_its_own_sessions(self, manager: OperationManager, workspace: Path) -> None:
        mine, other = bash("true", session_id="mine"), bash("true", session_id="other")
        await manager.add_operations(adding([mine], workspace, owner=OWNER))
        await manager.add_operations(adding([other], workspace, owner="coordinator-2"))
        await end_of(manager, mine.operation_id)
        await end_of(manager, other.operation_id)
        seen = set()
        async for response in manager.watch_operations(manager_pb2.WatchOperationsRequest(owner=OWNER)):
            if response.HasField("update"):
                seen.add(response.update.operation.session_id)
            if response.HasField("keepalive"):
                break
        assert seen == {"mine"}

    async def test_watching_from_the_answers_position_misses_nothing(
        self, manager: OperationManager, workspace: Path
    ) -> None:
        operation = bash("sleep 0.1; echo late")
        response = await manager.add_operations(adding([operation], workspace))
        seen = await states(manager, operation.operation_id, after_position=response.position)
        assert seen[-1].bash.stdout.head == "late\n"

    # --- reading ---

    async def test_unknown_operation_is_not_found(self, manager: OperationManager) -> None:
        with pytest.raises(NotFoundError) as refusal:
            await manager.get_operation(manager_pb2.GetOperationRequest(operation_id="nobody"))
        assert refusal.value.reason == "OPERATION_NOT_FOUND"

    async def test_list_is_paged_in_the_order_of_acceptance(self, manager: OperationManager, workspace: Path) -> None:
        operations = [bash("true", session_id=f"s{number % 2}") for number in range(5)]
        for operation in operations:
            await run(manager, operation, workspace)
        listed: list[str] = []
        token = ""
        while True:
            request = manager_pb2.ListOperationsRequest(page_size=2, page_token=token)
            page = await manager.list_operations(request)
            listed += [operation.operation_id for operation in page.operations]
            token = page.next_page_token
            if not token:
                break
        assert listed == [operation.operation_id for operation in operations]
        one = await manager.list_operations(manager_pb2.ListOperationsRequest(session_id="s1"))
        assert [operation.operation_id for operation in one.operations] == [listed[1], listed[3]]

    async def test_output_is_read_from_offsets_and_from_the_end(
        self, manager: OperationManager, workspace: Path
    ) -> None:
        ended = await run(manager, bash("printf 0123456789; echo bad >&2"), workspace)

        def reading(offset: int = 0, limit_bytes: int = 0, tail_bytes: int = 0) -> manager_pb2.ReadOutputRequest:
            return manager_pb2.ReadOutputRequest(
                operation_id=ended.operation_id,
                stream=operation_pb2.OUTPUT_STREAM_STDOUT,
                offset=offset,
                limit_bytes=limit_bytes,
                tail_bytes=tail_bytes,
            )

        assert (await read_all(manager, reading()))[0] == b"0123456789"
        assert (await read_all(manager, reading(offset=4, limit_bytes=3)))[0] == b"456"
        data, responses = await read_all(manager, reading(tail_bytes=-3))
        assert (data, responses[0].offset, responses[-1].is_end) == (b"789", 7, True)
        stderr = reading()
        stderr.stream = operation_pb2.OUTPUT_STREAM_STDERR
        assert (await read_all(manager, stderr))[0] == b"bad\n"
        with pytest.raises(OutOfRangeError):
            await read_all(manager, reading(offset=11))

    async def test_followed_output_ends_with_the_command(self, manager: OperationManager, workspace: Path) -> None:
        operation = bash("for i in 1 2 3 4; do echo $i; sleep 0.1; done")
        await manager.add_operations(adding([operation], workspace))
        request = manager_pb2.ReadOutputRequest(
            operation_id=operation.operation_id, stream=operation_pb2.OUTPUT_STREAM_STDOUT, follow=True
        )
        data, responses = await read_all(manager, request)
        assert data == b"1\n2\n3\n4\n"
        assert responses[-1].is_end and responses[-1].offset == 8

    async def test_output_outlives_the_acknowledgement(self, manager: OperationManager, workspace: Path) -> None:
        ended = await run(manager, bash("echo kept"), workspace)
        await manager.acknowledge_updates(acknowledging(ended))
        request = manager_pb2.ReadOutputRequest(
            operation_id=ended.operation_id, stream=operation_pb2.OUTPUT_STREAM_STDOUT
        )
        assert (await read_all(manager, request))[0] == b"kept\n"

    # --- living on ---

    async def test_command_runs_on_through_a_restart_and_is_the_same_process(
        self, tmp_path: Path, workspace: Path
    ) -> None:
        operation = bash("for i in $(seq 20); do echo $i; sleep 0.05; done; echo $$")
        async with self.open(tmp_path / "state") as manager:
            await manager.add_operations(adding([operation], workspace))
            before = await running(manager, operation.operation_id)
        async with self.open(tmp_path / "state") as manager:
            ended = await end_of(manager, operation.operation_id)
        expected = "".join(f"{number}\n" for number in range(1, 21)) + f"{before.bash.process_id}\n"
        assert (ended.status, ended.bash.stdout.head) == (COMPLETED, expected)
        assert ended.bash.process_id == before.bash.process_id

    async def test_closing_ends_watches_and_cancels_nothing(self, tmp_path: Path, workspace: Path) -> None:
        operation = bash("sleep 0.5; echo done")
        async with self.open(tmp_path / "state") as manager:
            await manager.add_operations(adding([operation], workspace))
            await running(manager, operation.operation_id)
            await manager.aclose()
            await manager.aclose()
        async with self.open(tmp_path / "state") as manager:
            assert (await end_of(manager, operation.operation_id)).bash.stdout.head == "done\n"

    async def test_instance_stays_through_a_restart(self, tmp_path: Path) -> None:
        instances = set()
        for _ in range(2):
            async with self.open(tmp_path / "state") as manager:
                info = await manager.get_server_info(manager_pb2.GetServerInfoRequest())
                instances.add(info.info.instance_id)
                assert "bash/1" in info.operation_types
        assert len(instances) == 1 and instances != {""}

    async def test_unknown_session_lists_nothing(self, manager: OperationManager) -> None:
        listed = await manager.list_operations(manager_pb2.ListOperationsRequest(session_id=SESSION))
        assert list(listed.operations) == []

    # --- other types ---

    async def test_attachment_comes_before_the_update_that_names_it_also_after_a_restart(
        self, tmp_path: Path, workspace: Path
    ) -> None:
        image = Image.effect_noise((900, 900), 90)
        image.save(workspace / "noise.png")
        operation = other("view_image", operation_pb2.ViewImageState(path="noise.png"))
        for number in range(2):
            async with self.open(tmp_path / "state") as manager:
                if number == 0:
                    await manager.add_operations(adding([operation], workspace))
                data = b""
                async for response in manager.watch_operations(manager_pb2.WatchOperationsRequest()):
                    assert len(response.attachment.data) <= 512 * 1024
                    data += response.attachment.data
                    ended = response.update.operation
                    if ended.status == COMPLETED:
                        break
                digest = ended.view_image.image.digest
                assert hashlib.sha256(data).hexdigest() == digest
                assert len(data) == ended.view_image.image.size_bytes > 512 * 1024
                request = manager_pb2.ReadOutputRequest(operation_id=ended.operation_id, attachment_digest=digest)
                assert (await read_all(manager, request))[0] == data

    async def test_every_type_runs(self, manager: OperationManager, workspace: Path) -> None:
        timer = operation_pb2.TimerState()
        timer.fire_time.GetCurrentTime()
        timer.fire_time.seconds += 1
        operations = [
            other("value", operation_pb2.ValueState(value_json="[1]")),
            other("timer", timer),
            other("inspect_workspace", operation_pb2.InspectWorkspaceState()),
        ]
        await manager.add_operations(adding(operations, workspace))
        ended = [await end_of(manager, operation.operation_id) for operation in operations]
        assert [state.status for state in ended] == [COMPLETED] * 3
        assert ended[1].end_time.ToNanoseconds() >= timer.fire_time.ToNanoseconds()
        assert ended[2].inspect_workspace.is_writable

    async def test_timers_do_not_hold_up_commands(self, tmp_path: Path, workspace: Path) -> None:
        async with self.open(tmp_path / "state", LocalManagerSettings(concurrency=1)) as manager:
            timer = operation_pb2.TimerState()
            timer.fire_time.GetCurrentTime()
            timer.fire_time.seconds += 3600
            timers = [other("timer", timer) for _ in range(3)]
            await manager.add_operations(adding(timers, workspace))
            assert (await run(manager, bash("true"), workspace)).status == COMPLETED
        async with self.open(tmp_path / "state", LocalManagerSettings(concurrency=1)) as manager:
            assert (await run(manager, bash("true"), workspace)).status == COMPLETED
            await manager.cancel_operation(cancelling(timers[0].operation_id))
            assert (await end_of(manager, timers[0].operation_id)).status == CANCELED

    async def test_failure_of_one_is_its_own(self, manager: OperationManager, workspace: Path) -> None:
        missing = other("view_image", operation_pb2.ViewImageState(path="none.png"))
        assert (await run(manager, missing, workspace)).status == FAILED
        assert (await run(manager, bash("true"), workspace)).status == COMPLETED
