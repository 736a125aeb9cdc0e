"""Whether a session goes round in circles: the same calls with the same arguments and results, again and again. Pure.

A round is one response with all its calls. Rounds may differ within a circle of up to three.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, replace
from typing import Final

from pyrsistent import PMap, pmap

from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.session.v1 import item_pb2

LONGEST_CIRCLE: Final = 3
MAX_ROUNDS: Final = 300
"""Rounds that are remembered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """What is remembered of the latest rounds; a value, made by `apply`."""

    rounds: tuple[bytes, ...] = ()
    """Fingerprints of rounds whose calls all ended before the next one; starts anew with each user's input."""

    calls: tuple[str, ...] = ()
    """Calls of the latest round."""

    ended: PMap[str, bytes] = field(default_factory=pmap)
    """Fingerprint by call ID, of those of the latest round that have ended."""

    is_told: bool = False
    """The model was told of the circle that it is in."""

    def with_response(self, call_ids: tuple[str, ...]) -> Stall:
        """Return it with a new round."""
        return Stall(rounds=self.whole_rounds(), calls=call_ids, is_told=self.is_told and self.repetitions() > 1)

    def with_result(self, call: llm_pb2.ToolCall, result: item_pb2.CallResult) -> Stall:
        """Return it with a call's end."""
        if call.call_id not in self.calls:
            return self
        return replace(self, ended=self.ended.set(call.call_id, _fingerprint(call, result)))

    def whole_rounds(self) -> tuple[bytes, ...]:
        """Return the rounds, the latest included where all its calls have ended; none where it was something else."""
        if not self.calls or len(self.ended) < len(self.calls):
            return ()
        latest = hashlib.sha256(b"".join(self.ended[call_id] for call_id in self.calls)).digest()
        return (*self.rounds, latest)[-MAX_ROUNDS:]

    def repetitions(self) -> int:
        """Return how often the latest circle was gone round in a row; 1 where nothing repeats."""
        rounds = self.whole_rounds()
        return max((_repetitions(rounds, length) for length in range(1, LONGEST_CIRCLE + 1)), default=1)


def _repetitions(rounds: tuple[bytes, ...], length: int) -> int:
    matching = 0
    for index in range(len(rounds) - 1, length - 1, -1):
        if rounds[index] != rounds[index - length]:
            break
        matching += 1
    return 1 + matching // length


def _fingerprint(call: llm_pb2.ToolCall, result: item_pb2.CallResult) -> bytes:
    shown = b"".join(part.SerializeToString(deterministic=True) for part in result.parts)
    try:
        arguments = json.dumps(json.loads(call.arguments_json), sort_keys=True)
    except (ValueError, RecursionError):
        arguments = call.arguments_json
    head = json.dumps([call.name, arguments, int(result.outcome)]).encode()
    return hashlib.sha256(head + shown).digest()
