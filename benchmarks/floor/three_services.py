"""One tool turn with nothing but its calls, over three bare gRPC servers: unary calls over TCP, one row per commit.

`python -m benchmarks.floor.three_services ROLE …` runs one of them; `ThreeServicesFloor` starts and calls all three.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import grpc

from benchmarks.floor.group_commit import GroupCommitWriter
from benchmarks.floor.one_process import ROW, ask, run_true
from benchmarks.script import scripted_turns

OPTIONS = (("grpc.so_reuseport", 0), ("grpc.enable_http_proxy", 0))
METHOD = "/floor.Floor/Call"

Handler = Callable[[bytes], Awaitable[bytes]]
Call = grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]


class ThreeServicesFloor:
    """A client of the bare pipeline."""

    def __init__(self, channel: grpc.aio.Channel, pids: Mapping[str, int]) -> None:
        """Call the bare coordinator behind `channel`."""
        self._call: Call = channel.unary_unary(METHOD)
        self.pids = pids
        """The process of each server."""

    async def turn(self, session: int, number: int) -> None:
        """Run one tool turn to its end."""
        await self._call(b"%d %d" % (session, number))

    @staticmethod
    @asynccontextmanager
    async def open(turns: int) -> AsyncIterator[ThreeServicesFloor]:
        """Start the three servers, and end them with the block."""
        async with AsyncExitStack() as stack:
            directory = stack.enter_context(tempfile.TemporaryDirectory())
            store, store_pid = await stack.enter_async_context(_server("store", directory))
            manager, manager_pid = await stack.enter_async_context(_server("manager"))
            coordinator, pid = await stack.enter_async_context(_server("coordinator", store, manager, str(turns)))
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(coordinator, options=OPTIONS))
            pids = {"coordinator": pid, "session-store": store_pid, "operation-manager": manager_pid}
            yield ThreeServicesFloor(channel, pids)


@asynccontextmanager
async def _server(*arguments: str) -> AsyncIterator[tuple[str, int]]:
    """Run a server; give its address and its process."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", __name__, *arguments, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        yield (await process.stdout.readline()).decode().strip(), process.pid
    finally:
        process.kill()
        await process.wait()


async def _serve(handler: Handler) -> None:
    """Serve one method on a free port, print the address, and go on until standard input ends."""

    async def call(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        return await handler(request)

    server = grpc.aio.server(options=OPTIONS)
    handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {"Call": grpc.unary_unary_rpc_method_handler(call)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("floor.Floor", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()


async def _store(directory: str) -> None:
    writer = GroupCommitWriter(Path(directory) / "floor.sqlite")

    async def commit(row: bytes) -> bytes:
        await writer.write((row,))
        return b""

    await _serve(commit)


async def _manager() -> None:
    async def run(_: bytes) -> bytes:
        await run_true()
        return b""

    await _serve(run)


async def _coordinator(store: str, manager: str, turns: str) -> None:
    adapter = scripted_turns(int(turns))
    async with (
        grpc.aio.insecure_channel(store, options=OPTIONS) as store_channel,
        grpc.aio.insecure_channel(manager, options=OPTIONS) as manager_channel,
    ):
        commit: Call = store_channel.unary_unary(METHOD)
        run: Call = manager_channel.unary_unary(METHOD)

        async def turn(request: bytes) -> bytes:
            session, number = map(int, request.split())
            await commit(ROW[0])
            await ask(adapter, session, 2 * number)
            await commit(ROW[0])
            await run(b"true")
            await commit(ROW[0])
            await ask(adapter, session, 2 * number + 1)
            await commit(ROW[0])
            return b""

        await _serve(turn)


if __name__ == "__main__":
    roles: dict[str, Callable[..., Awaitable[None]]] = {
        "store": _store,
        "manager": _manager,
        "coordinator": _coordinator,
    }
    asyncio.run(roles[sys.argv[1]](*sys.argv[2:]))  # type: ignore[arg-type]  # the roles are coroutine functions
