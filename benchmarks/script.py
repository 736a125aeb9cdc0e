"""The script that every pipeline plays: one call, then a word, for each input."""

from __future__ import annotations

import json

from harness.clock import SystemClock
from harness.llm.script_file import parse_script
from harness.llm.scripted import ScriptedAdapter


def script_text(turns: int) -> str:
    """Return a script for `turns` inputs and one to warm up."""
    call = {"tool_calls": [{"name": "Bash", "arguments": {"command": "true"}}]}
    return json.dumps({"responses": [call, {"text": "done"}] * (turns + 1)})


def scripted_turns(turns: int) -> ScriptedAdapter:
    """Return an adapter that plays it."""
    return ScriptedAdapter(parse_script(script_text(turns)), clock=SystemClock())
