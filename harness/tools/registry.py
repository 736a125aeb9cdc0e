"""The tools that a host has, and the way from a model's call to the right one. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence

from harness.errors import InvalidArgumentError
from harness.tools.bash import BashTranslator
from harness.tools.rendering import render_operations
from harness.tools.skill_use import SkillUseTranslator
from harness.tools.tools import Rejection, ToolTranslator
from harness.tools.view_image import ViewImageTranslator
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.operation.v1 import operation_pb2
from unreal_agent.session.v1 import item_pb2

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
# What gateways put between their own prefix and a tool's name: functions.Bash, default_api:Bash, mcp__x__Bash.
_PREFIX_END = re.compile(r"[.:/]|__")
_MAX_SHOWN_CHARS = 80


class ToolRegistry:
    """A fixed set of tools, in the host's order."""

    def __init__(self, translators: Sequence[ToolTranslator]) -> None:
        """Take the host's tools.

        Raises:
            ValueError: Two tools have the same name, or a definition is one that a provider would refuse.
        """
        self._translators: dict[str, ToolTranslator] = {}
        for translator in translators:
            definition = translator.definition
            name = definition.name
            if not _NAME.fullmatch(name):
                raise ValueError(f"a tool's name must be 1 to 64 letters, digits, '_' and '-', got {name!r}")
            if name in self._translators:
                raise ValueError(f"there are two tools named {name!r}")
            if not isinstance(json.loads(definition.parameters_json), dict):
                raise ValueError(f"the parameters of tool {name!r} must be a JSON object")
            self._translators[name] = translator

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tools, in the host's order."""
        return tuple(self._translators)

    def check(self, names: Sequence[str]) -> None:
        """Refuse names of tools that the host does not have.

        Raises:
            InvalidArgumentError: UNKNOWN_TOOL; names the unknown ones and those that exist.
        """
        unknown = [name for name in names if name not in self._translators]
        if unknown:
            shown = ", ".join(repr(name[:_MAX_SHOWN_CHARS]) for name in unknown)
            existing = ", ".join(self._translators) or "none"
            raise InvalidArgumentError(
                f"this host has no tool named {shown}; its tools: {existing}",
                reason="UNKNOWN_TOOL",
                metadata={"unknown": shown, "tools": existing},
            )

    def offered(
        self, enabled: Sequence[str], inspection: operation_pb2.InspectWorkspaceState
    ) -> tuple[llm_pb2.ToolDefinition, ...]:
        """Return the tools of a session in the host's order: those enabled (empty: all) that suit the workspace.

        A name that the host no longer has is passed over: the session goes on without the tool.
        """
        return tuple(
            translator.definition
            for name, translator in self._translators.items()
            if (not enabled or name in enabled) and translator.is_offered(inspection)
        )

    def translate(
        self, call: llm_pb2.ToolCall, offered_names: Collection[str]
    ) -> tuple[operation_pb2.Operation, ...] | Rejection:
        """Return a call's operations, at least one, or what to tell the model instead.

        A name that is not exactly that of an offered tool is never guessed at: the answer names those that exist.
        """
        translator = self._translators.get(call.name)
        if translator is None or call.name not in offered_names:
            return Rejection(message=self._unknown_tool(call.name, offered_names))
        translated = translator.translate(call)
        if isinstance(translated, Rejection):
            return translated
        if not translated:
            raise ValueError(f"tool {call.name!r} turned a call into no operation")
        return tuple(translated)

    def _unknown_tool(self, name: str, offered_names: Collection[str]) -> str:
        available = [known for known in self._translators if known in offered_names]
        shown = json.dumps(name[:_MAX_SHOWN_CHARS])
        message = f"There is no tool named {shown}; nothing was run. "
        if not available:
            return f"{message}No tools are available in this session."
        bare = _PREFIX_END.split(name)[-1].strip()
        meant = next((known for known in available if known.lower() == bare.lower()), None)
        hint = f' If you meant "{meant}", call it by exactly that name, without prefix.' if meant else ""
        return f"{message}Available tools: {', '.join(available)}.{hint}"

    def render(self, call: llm_pb2.ToolCall, operations: Sequence[operation_pb2.Operation]) -> item_pb2.CallResult:
        """Return a call's final result; by the operations alone where the host no longer has the tool."""
        translator = self._translators.get(call.name)
        return translator.render(call, operations) if translator else render_operations(operations)


def default_registry() -> ToolRegistry:
    """Return the tools that every host has."""
    return ToolRegistry((BashTranslator(), ViewImageTranslator(), SkillUseTranslator()))
