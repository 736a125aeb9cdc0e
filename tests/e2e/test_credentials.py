"""Credentials stay where they are needed: a marked key is searched for in everything that a job leaves or starts."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path

import psutil
import pytest

from tests.support.cli import Cli
from tests.support.eventually import eventually
from tests.support.provider import RecordedRequest, Reply, error_reply, scripted_provider
from tests.support.provider_replies import stream_reply, whole_stream

PROVIDERS = {
    "openai-responses": ("openai", "OPENAI_API_KEY", "authorization"),
    "openai-chat": ("openrouter", "OPENROUTER_API_KEY", "authorization"),
    "anthropic-messages": ("anthropic", "ANTHROPIC_API_KEY", "x-api-key"),
}
MARKER = "marked-4f1d2c7e9b"
OTHER_MARKER = "marked-other-provider"
PARTS = ("services.coordinator", "services.operation_manager", "services.session_store", "launcher")


def holding(directory: Path, marker: str) -> list[Path]:
    """Return the files below a directory that hold a marker."""
    return [path for path in directory.rglob("*") if path.is_file() and marker.encode() in path.read_bytes()]


@pytest.mark.parametrize(
    "wire_format",
    # The adapters' own tests look for the key in every format; here one is enough in a short run.
    [
        "anthropic-messages",
        pytest.param("openai-chat", marks=pytest.mark.long),
        pytest.param("openai-responses", marks=pytest.mark.long),
    ],
)
async def test_a_key_is_in_nothing_that_a_job_leaves_or_starts(wire_format: str, tmp_path: Path) -> None:
    provider, variable, header = PROVIDERS[wire_format]
    waits = {
        "command": "env; tr '\\0' ' ' < /proc/$PPID/environ; echo here > here; until [ -e go ]; do sleep 0.05; done"
    }
    calls = [("c1", "Bash", json.dumps(waits))]

    def reply(request: RecordedRequest) -> Reply:
        leaked = {"error": {"message": f"Incorrect API key {request.headers[header]}", "code": MARKER}}
        replies = [
            stream_reply(whole_stream(wire_format, "", calls)),
            error_reply(429, leaked, {"retry-after-ms": "10"}),
            error_reply(401, leaked),
        ]
        return replies[len(server.requests) - 1]

    async with scripted_provider(reply) as server:
        cli = Cli(
            tmp_path,
            {
                variable: MARKER,
                "UNREAL_AGENT_LLM_PROVIDER": provider,
                "UNREAL_AGENT_LLM_BASE_URL": server.base_url,
                "FIREWORKS_API_KEY": OTHER_MARKER,
            },
        )
        options = ("--session", "s1", "--model", "m-1", "--record", str(tmp_path / "recording"), "--output", "jsonl")
        process = cli.start("run", "-p", "go", *options)
        try:

            async def is_running() -> bool:
                return (cli.workspace / "here").exists()

            await eventually(is_running, within_s=15)
            shown = []
            for child in psutil.Process(process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):  # a child of the command's loop, by now
                    shown.append(f"{child.cmdline()} {child.environ()}")
            (cli.workspace / "go").touch()
            stdout, stderr = await asyncio.to_thread(process.communicate)
        finally:
            process.kill()
            process.wait()
    assert process.returncode == 1
    assert len(server.requests) == 3
    assert all(MARKER in request.headers[header] for request in server.requests)
    listed = cli.run("operations", "list", "s1", "--output", "jsonl")
    history = cli.run("sessions", "show", "s1", "--output", "jsonl")
    assert (listed.code, history.code) == (0, 0)
    assert "ERROR_CLASS_AUTHENTICATION" in history.stdout
    everything = " ".join((*shown, stdout.decode(), stderr.decode(), listed.stdout, history.stdout))
    assert len(shown) >= 2
    for marker in (MARKER, OTHER_MARKER):
        assert marker not in everything
        assert holding(tmp_path, marker) == []
    assert holding(tmp_path / "recording", "exchanges")


async def test_of_the_services_the_coordinator_alone_holds_keys(tmp_path: Path) -> None:
    cli = Cli(tmp_path, {"OPENAI_API_KEY": MARKER, "UNREAL_AGENT_LLM_API_KEY": MARKER})
    process = cli.start("serve", "all")
    holders: dict[str, bool] = {}

    async def are_running() -> bool:
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                words = [Path(word).stem if "/" in word else word for word in child.cmdline()]
                name = next((name for name in PARTS if name in words), "other")
                holders[name] = holders.get(name, False) or MARKER in str(child.environ())
        return holders.keys() >= set(PARTS)

    try:
        await eventually(are_running, within_s=20)
    finally:
        process.terminate()
        await asyncio.to_thread(process.communicate)
    holders.pop("other", None)  # between fork and exec
    assert holders == {name: name == "services.coordinator" for name in PARTS}


async def test_a_recorded_job_is_played_again_without_key_and_network(tmp_path: Path) -> None:
    replies = [
        stream_reply(whole_stream("openai-responses", "Looking.", [("c1", "Bash", '{"command":"echo one"}')])),
        stream_reply(whole_stream("openai-responses", "It says one.")),
    ]
    recording = str(tmp_path / "recording")
    async with scripted_provider(replies) as server:
        cli = Cli(tmp_path, {"OPENAI_API_KEY": MARKER, "UNREAL_AGENT_LLM_BASE_URL": server.base_url})
        first = await asyncio.to_thread(cli.run, "run", "-p", "go", "--session", "s1", "--record", recording)
    assert (first.code, first.stderr) == (0, "")
    again = Cli(tmp_path)
    second = again.run("run", "-p", "go", "--session", "s2", "--script", recording)
    assert (second.code, second.stderr) == (0, "")

    def said(text: str) -> list[str]:
        return [line.strip() for line in text.splitlines() if line.strip()][1:-2]

    assert [line for line in said(second.stdout) if "$ echo" not in line] == [
        line for line in said(first.stdout) if "$ echo" not in line
    ]
    assert "It says one." in second.stdout


def test_recording_a_servers_job_here_is_refused_with_the_way_to_do_it(tmp_path: Path) -> None:
    done = Cli(tmp_path).run("run", "-p", "go", "--server", "127.0.0.1:9", "--record", "r")
    assert done.code == 2
    assert "Start the server with --record" in done.stderr
