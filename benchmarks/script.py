"""The script that every pipeline plays: one call, then a word, for each input."""

from __future__ import annotations

from harness.llm.scripted import ScriptedAdapter
from tests.support.world import Script, scripted


def script_of(turns: int) -> Script:
    """Return a script for `turns` inputs and one to warm up."""
    call = {"tool_calls": [{"name": "Bash", "arguments": {"command": "true"}}]}
    return [call, {"text": "done"}] * (turns + 1)


def scripted_turns(turns: int) -> ScriptedAdapter:
    """Return an adapter that plays it."""
    return scripted(script_of(turns))
