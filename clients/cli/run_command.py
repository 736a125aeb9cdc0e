"""`unreal-agent run`: the options, and the request that they make. Light; the work is in `run_job`."""

from __future__ import annotations

import os
import stat
import sys
from dataclasses import replace

import click

from clients.cli.failures import UsageError
from clients.cli.isolation import KINDS, IsolationOptions
from clients.cli.options import output_option, place_options
from clients.cli.place import Place
from clients.cli.request import (
    EFFORTS,
    RunRequest,
    parse_request,
    prompt_request,
    read_request_file,
    with_options,
)


@click.command(short_help="Do a job, or go on with one.")
@click.argument("request_file", metavar="[REQUEST.json]", required=False)
@click.option("-p", "--prompt", metavar="PROMPT", help="What to do.")
@click.option("--session", "session_id", metavar="ID", help="Go on with this session; with a prompt, begins it if new.")
@click.option("--workspace", metavar="DIR", help="Directory to work in. Default: this one.")
@click.option("--provider", metavar="NAME", help="Model provider. Default: $UNREAL_AGENT_LLM_PROVIDER, else openai.")
@click.option("--model", metavar="NAME", help="Model. Default: the provider's.")
@click.option("--effort", type=click.Choice(EFFORTS), help="Reasoning effort. Default: the provider's.")
@click.option(
    "--script", metavar="FILE|DIR", help="Play this script, or recording, in the place of a model; no key, no network."
)
@click.option("--record", metavar="DIR", help="Keep what the model is sent and answers there, without credentials.")
@click.option("--tools", metavar="NAMES", help="Tools to offer, for example Bash,ViewImage. Default: all.")
@click.option("--manager", metavar="NAME", help="Operation manager to run commands. Default: the server's only one.")
@click.option("--max-turns", type=click.IntRange(min=1), metavar="N", help="Stop after so many turns.")
@click.option("--input-id", metavar="ID", help="ID of the prompt; the same again is done once. Default: a new one.")
@click.option(
    "--isolation",
    type=click.Choice(KINDS),
    help="Of commands that run here. Default: $UNREAL_AGENT_ISOLATION, else none.",
)
@click.option("--isolation-network", is_flag=True, default=None, help="With bubblewrap: commands get the network.")
@output_option("text", "jsonl")
@place_options
def run(
    request_file: str | None,
    prompt: str | None,
    session_id: str | None,
    workspace: str | None,
    provider: str | None,
    model: str | None,
    effort: str | None,
    script: str | None,
    record: str | None,
    tools: str | None,
    manager: str | None,
    max_turns: int | None,
    input_id: str | None,
    isolation: str | None,
    isolation_network: bool | None,
    output: str,
    place: Place,
) -> int:
    """Do the job that PROMPT, REQUEST.json or JSON on standard input says (exactly one of them).

    With --session and none of them, goes on with what that session left unfinished.

    \b
    A request: {"prompt": "…"} or {"messages": [{"content": "…", "message_id": "…"}]}, and any of
    system_prompt, model, provider, session_id, effort, tools, max_turns, workspace, manager.

    While it runs on a terminal, a line typed is sent to the agent at once. Ctrl-C stops the job; a second Ctrl-C leaves
    at once. Either way, and after a crash too, `run --session ID` goes on.

    Exit codes: 0 finished, 1 failed, 2 wrong usage, 130 interrupted.
    """  # noqa: D301 - click reads the backspace as "do not fill the next paragraph"
    request = _read_request(request_file, prompt, input_id, has_session=session_id is not None)
    request = with_options(
        request,
        session_id=session_id,
        workspace=workspace,
        provider=provider,
        model=model,
        effort=effort,
        tools=_tool_names(tools),
        manager=manager,
        max_turns=max_turns,
    )
    if not request.messages and request.session_id is None:
        raise UsageError("there is nothing to do", "Give a prompt with -p, a request file, or --session ID.")
    if script is not None and request.provider not in (None, "scripted"):
        raise UsageError(f"--script is for the provider scripted (--provider {request.provider})", "Leave one out.")
    if record is not None and (script is not None or request.provider == "scripted"):
        raise UsageError("--record keeps what a model answers, and a script is none", "Leave --record or --script out.")
    if record is not None and place.server:
        raise UsageError("--record is for jobs that run here", "Start the server with --record instead.")
    options = IsolationOptions(kind=isolation, has_network=isolation_network)
    if options.is_given and place.server:
        raise UsageError(
            "--isolation is for jobs that run here", "Start the server's operation manager with it instead."
        )
    from clients.cli.run_job import RunJob, run_job

    place = replace(place, run_options=options.words)
    job = RunJob(
        request=request, script=script, record=record, place=place, is_jsonl=output == "jsonl", isolation=options
    )
    return run_job(job)


def _read_request(path: str | None, prompt: str | None, input_id: str | None, *, has_session: bool) -> RunRequest:
    if path is not None and prompt is not None:
        raise UsageError("both -p and a request file are given", "Give one of them.")
    if prompt is not None:
        return prompt_request(prompt, input_id)
    if path is not None and path != "-":
        return read_request_file(path, input_id)
    text = _read_standard_input(is_wanted=path == "-")
    if text.strip():
        return parse_request(text, "standard input", input_id)
    if path == "-":
        raise UsageError("standard input is empty", 'Write for example {"prompt": "…"} to it.')
    if input_id is not None and has_session:
        raise UsageError("--input-id is given without a prompt", "Give a prompt with -p.")
    return RunRequest()


def _read_standard_input(*, is_wanted: bool) -> str:
    """Return what is piped in; nothing where standard input is a terminal, closed or /dev/null."""
    if sys.stdin is None:
        return ""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError):
        return ""
    if stat.S_ISCHR(mode) and not is_wanted:
        return ""
    data = sys.stdin.buffer.read()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError("the request is not UTF-8 (standard input)") from error


def _tool_names(tools: str | None) -> tuple[str, ...] | None:
    if tools is None:
        return None
    names = tuple(name.strip() for name in tools.split(",") if name.strip())
    if not names:
        raise UsageError(f"--tools names no tool ({tools!r})", "Write for example Bash,ViewImage.")
    return names
