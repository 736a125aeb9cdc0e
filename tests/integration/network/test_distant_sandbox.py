"""A sandbox on another host: bad networks lose nothing and repeat nothing, and it reaches the coordinator alone."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.support.distant import (
    COORDINATOR,
    OTHER_SANDBOX,
    PORT,
    PROVIDER,
    SANDBOX,
    STORE,
    Distant,
    address_of,
    coordinator_toward,
    distant_services,
)
from tests.support.eventually import eventually
from tests.support.network import are_namespaces_permitted
from tests.support.world import Script, World, bash, result_text
from unreal_agent.coordinator.v1 import coordinator_service_pb2 as coordinator_pb2

COUNTING = (
    "echo started >> starts; n=0; until [ -e go ]; do n=$((n + 1)); echo $n | tee -a counted; sleep 0.1; done; rm go"
)
"""Counts until it is let go."""

SHORT_S, LONG_S = 6.0, 60.0


async def until_over(seconds: float) -> None:
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    await eventually(lambda: loop.time() >= end, within_s=seconds + 1)


class Tail:
    """What a watcher of the session sees of commands' output."""

    def __init__(self, world: World) -> None:
        self.heard: dict[str, bytes] = {}
        self._world = world

    def text(self) -> bytes:
        """Return what the one command that ran meanwhile has said."""
        assert len(self.heard) < 2
        return b"".join(self.heard.values())

    async def follow(self) -> None:
        request = coordinator_pb2.WatchSessionRequest(session_id=self._world.session_id, include_output=True)
        async for event in self._world.coordinator.watch_session(request):
            delta = event.output_delta
            if delta.data:
                assert delta.offset == len(self.heard.get(delta.operation_id, b"")), "a gap or a repeat"
                self.heard[delta.operation_id] = self.heard.get(delta.operation_id, b"") + delta.data


async def run_through_a_cut(distant: Distant, world: World, *, toward: str | None, seconds: float) -> None:
    """Let a command count, cut the cable, let it end: in the cut where one direction is left, behind it else."""
    (distant.workspace / "counted").unlink(missing_ok=True)
    (distant.workspace / "starts").unlink(missing_ok=True)
    before = len(await world.results())
    tail = Tail(world)
    cable = distant.cables[SANDBOX]

    def counted() -> list[str]:
        path = distant.workspace / "counted"
        return path.read_text().split() if path.exists() else []

    async with asyncio.TaskGroup() as tasks:
        following = tasks.create_task(tail.follow())
        await world.say("count")
        await eventually(lambda: len(counted()) > 3 and b"3" in tail.text(), within_s=20)
        cable.cut(toward=toward)
        at_cut = len(counted())
        if toward is not None:
            (distant.workspace / "go").touch()
            await eventually(lambda: not (distant.workspace / "go").exists())
        await until_over(seconds)
        if toward is None:
            assert len(counted()) - at_cut > seconds, "the command stood still"
        assert len(await world.results()) == before + (toward == SANDBOX)
        cable.mend()
        if toward is None:
            (distant.workspace / "go").touch()
        await world.until_rest(within_s=40)
        results = list((await world.results()).values())
        assert len(results) == before + 1
        assert result_text(results[-1]).split()[: len(counted())] == counted()
        await eventually(lambda: tail.text().decode().split() == counted(), within_s=20)
        following.cancel()
    assert counted() == [str(n + 1) for n in range(len(counted()))]
    assert (distant.workspace / "starts").read_text() == "started\n"
    await eventually(lambda: distant.remembered() == 0, within_s=40)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("attached", "seconds"),
    [
        pytest.param(True, SHORT_S, id="attached"),
        pytest.param(False, SHORT_S, id="dialled", marks=pytest.mark.long),
        pytest.param(True, LONG_S, id="attached-a-minute", marks=pytest.mark.long),
        pytest.param(False, LONG_S, id="dialled-a-minute", marks=pytest.mark.long),
    ],
)
async def test_a_cut_loses_and_repeats_nothing(tmp_path: Path, attached: bool, seconds: float) -> None:
    # The command and the tail of its output; its last update; the acknowledgement of that.
    places = {None: seconds, COORDINATOR: seconds, SANDBOX: seconds}
    if seconds == SHORT_S:
        places |= {COORDINATOR: 1.0, SANDBOX: 1.0}
    script: Script = [part for _ in places for part in ({"tool_calls": [bash(COUNTING)]}, {"text": "It counted."})]
    async with distant_services(tmp_path, script, attached=attached) as distant:
        world = distant.world()
        await world.create()
        for toward, cut_s in places.items():
            await run_through_a_cut(distant, world, toward=toward, seconds=cut_s)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("attached", "lines"),
    [
        pytest.param(True, 100, id="attached"),
        pytest.param(False, 100, id="dialled", marks=pytest.mark.long),
        pytest.param(True, 20_000, id="attached-much", marks=pytest.mark.long),
        pytest.param(False, 20_000, id="dialled-much", marks=pytest.mark.long),
    ],
)
async def test_loss_and_delay_slow_the_work_and_nothing_else(tmp_path: Path, attached: bool, lines: int) -> None:
    commands_count = 1 if lines < 1000 else 3
    commands = [bash(f"echo started >> starts-{n}; seq {lines}") for n in range(commands_count)]
    script: Script = [{"tool_calls": commands}, {"text": "It counted."}]
    flags = {COORDINATOR: ("--grace-seconds", "60")}
    async with distant_services(tmp_path, script, attached=attached, flags=flags) as distant:
        world = distant.world()
        await world.create()
        cable = distant.cables[SANDBOX]
        cable.loss, cable.delay_s = 0.2, 0.15  # a packet and its answer take 300 ms together
        tail = Tail(world)
        async with asyncio.TaskGroup() as tasks:
            following = tasks.create_task(tail.follow())
            await world.run("count", within_s=200)
            following.cancel()
        for result in (await world.results()).values():
            said = result_text(result).split()
            assert said[:20] == [str(n + 1) for n in range(20)]
            assert str(lines) in said
        assert [(distant.workspace / f"starts-{n}").read_text() for n in range(commands_count)] == [
            "started\n"
        ] * commands_count
        assert cable.lost > 0
        await eventually(lambda: distant.remembered() == 0, within_s=60)


@pytest.mark.parametrize("attached", [False, pytest.param(True, marks=pytest.mark.long)], ids=["dialled", "attached"])
async def test_the_sandbox_reaches_the_coordinator_alone(tmp_path: Path, attached: bool) -> None:
    script: Script = [{"tool_calls": [bash("echo hello")]}, {"expect": "hello", "text": "done"}]
    async with distant_services(tmp_path, script, attached=attached) as distant:
        world = distant.world()
        await world.create()
        await world.run("go")
        assert [result_text(one).strip() for one in (await world.results()).values()] == ["hello"]
        if not are_namespaces_permitted():
            # What is said of networks here, test_deployment_files.py holds of the compose file all the same.
            return
        distant.hosts[PROVIDER].listen(address_of(PROVIDER), PORT)
        distant.hosts[OTHER_SANDBOX].listen(address_of(OTHER_SANDBOX), PORT)
        others = (STORE, PROVIDER, OTHER_SANDBOX)
        coordinator, sandbox, other = (distant.hosts[name] for name in (COORDINATOR, SANDBOX, OTHER_SANDBOX))
        from_coordinator = (coordinator.reaches(address_of(name), PORT, within_s=5) for name in others)
        assert await asyncio.gather(*from_coordinator) == [True, True, True]
        assert await sandbox.reaches(coordinator_toward(SANDBOX), PORT, within_s=5)
        refused = [sandbox.reaches(address_of(name), PORT) for name in others]
        refused += [sandbox.reaches(coordinator_toward(STORE), PORT), other.reaches(address_of(SANDBOX), PORT)]
        assert await asyncio.gather(*refused) == [False] * len(refused)
