"""The model: answers an input with three commands at once, everything else with a word; at the socket, like a provider.

It has no state: what it says follows from the request alone, so that a request that is made again gets the same answer.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter

from tests.support.provider import Pause, RecordedRequest, Reply
from tests.support.provider_replies import chat_stream, stream_reply
from tests.support.request_rules import broken_chat_rules

EFFECTS_FILE = "effects"
CALLS = 3

_TASK = re.compile(r"task:([\w/-]+)")
_SAID = re.compile(r"said:([\w-]+)")


def task_text(session_id: str, input_id: str) -> str:
    """Return the text of an input."""
    return f"task:{session_id}/{input_id}"


def tasks_in(text: str) -> Counter[str]:
    """Return how often each input is in a text."""
    return Counter(_TASK.findall(text))


def results_in(text: str) -> Counter[str]:
    """Return how often each operation's result is in a text."""
    return Counter(_SAID.findall(text))


def command(seconds: float) -> str:
    """Return a command whose effects can be counted."""
    note = '"$UNREAL_AGENT_OPERATION" >>' + EFFECTS_FILE
    return f'echo begin {note}; sleep {seconds}; echo end {note}; echo "said:$UNREAL_AGENT_OPERATION"'


class ScriptedModel:
    """Answers requests, and keeps what it saw that nobody may see."""

    def __init__(self) -> None:
        """Begin with nothing wrong."""
        self.requests = 0
        self.violations: list[str] = []

    def reply(self, request: RecordedRequest) -> Reply:
        """Answer one request."""
        self.requests += 1
        body = request.json
        self.violations += broken_chat_rules(body)
        messages = body["messages"]
        shown = json.dumps([message for message in messages if message["role"] != "assistant"])
        repeated = [key for key, count in (tasks_in(shown) + results_in(shown)).items() if count > 1]
        if repeated:
            self.violations.append(f"the model was shown twice: {repeated}")
        answers = sum(message["role"] == "assistant" for message in messages)
        fresh = messages[max((at for at, one in enumerate(messages) if one["role"] == "assistant"), default=0) :]
        asks = any(message["role"] == "user" and tasks_in(json.dumps(message)) for message in fresh)
        chance = random.Random(answers)
        calls = [self._call(f"call-{answers}-{number}", chance) for number in range(CALLS)] if asks else []
        stream = chat_stream("Working." if calls else "Done.", calls)
        reply = stream_reply(stream)
        return Reply(headers=reply.headers, before_headers=[Pause(chance.uniform(0, 0.05))], steps=reply.steps)

    @staticmethod
    def _call(call_id: str, chance: random.Random) -> tuple[str, str, str]:
        seconds = chance.choice([0, 0.02, 0.1, 0.2, 0.5])
        return (call_id, "Bash", json.dumps({"command": command(seconds)}))
