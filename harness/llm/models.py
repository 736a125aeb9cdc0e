"""What is known of models by name: windows, prices and defaults, from `models.json` and the user's own file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import NotRequired, TypedDict, cast

from harness.llm.user_file import load_user_file
from unreal_agent.llm.v1 import llm_pb2


class _Price(TypedDict):
    """US dollars for a million tokens."""

    input: float
    cached_input: NotRequired[float]
    cache_write: NotRequired[float]
    output: float


class _Model(TypedDict):
    window_tokens: int
    max_output_tokens: NotRequired[int]
    price: NotRequired[_Price]
    reasons: NotRequired[bool]
    thinking: NotRequired[str]
    efforts: NotRequired[Mapping[str, str]]


class _Models(TypedDict):
    default_models: Mapping[str, str]
    models: Mapping[str, _Model]


@dataclass(frozen=True, slots=True, kw_only=True)
class Thinking:
    """How a model of the Messages format is asked to think."""

    kind: str = ""
    """"adaptive": by effort; "budget": by a number of tokens; empty: not at all, or by itself."""

    efforts: Mapping[str, str] = field(default_factory=dict)
    """Our effort to the model's, where it lacks one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """What a model's tokens cost, in millionths of a US dollar each."""

    input: float
    cached_input: float
    cache_write: float
    output: float

    def cost_micros(self, usage: llm_pb2.Usage) -> float:
        """Return what an amount costs, in millionths of a US dollar."""
        plain = max(0, usage.input_tokens - usage.cached_input_tokens - usage.cache_write_tokens)
        return (
            plain * self.input
            + usage.cached_input_tokens * self.cached_input
            + usage.cache_write_tokens * self.cache_write
            + usage.output_tokens * self.output
        )


@cache
def _known() -> _Models:
    content: _Models = json.loads(resources.files("harness.llm").joinpath("models.json").read_text(encoding="utf-8"))
    # The file was checked when it was read: each of its models has the members of `_Model`.
    own = cast("Mapping[str, _Model]", load_user_file(os.environ).models)
    return _Models(default_models=content["default_models"], models={**content["models"], **own})


def window_tokens(model: str) -> int:
    """Return the tokens that a model's context may hold; 0 where that is not known.

    A name with a tag (`llama3:8b`) is a local server's: its window is what that server was told, unknown here.
    """
    found = _find(model)
    return 0 if found is None else found["window_tokens"]


def max_output_tokens(model: str) -> int:
    """Return the tokens of a model's longest answer; 0 where that is not known."""
    found = _find(model)
    return 0 if found is None else found.get("max_output_tokens", 0)


def price(model: str) -> Price | None:
    """Return what a model costs; None where that is not known."""
    found = _find(model)
    listed = None if found is None else found.get("price")
    if listed is None:
        return None
    return Price(
        input=listed["input"],
        cached_input=listed.get("cached_input", listed["input"]),
        cache_write=listed.get("cache_write", listed["input"]),
        output=listed["output"],
    )


def reasons(model: str) -> bool:
    """Tell whether a model takes reasoning settings; an unknown one is taken to."""
    found = _find(model)
    return found is None or found.get("reasons", True)


def thinking(model: str) -> Thinking:
    """Return how a model is asked to think; an unknown one is not."""
    found = _find(model)
    return Thinking() if found is None else Thinking(kind=found.get("thinking", ""), efforts=found.get("efforts", {}))


def default_model(provider: str) -> str:
    """Return the model that a provider is asked for where none is named; empty where there is none."""
    return _known()["default_models"].get(provider, "")


def _find(model: str) -> _Model | None:
    """Return the entry whose name is the longest beginning of the model's, without the maker's prefix."""
    if ":" in model and "/" not in model:
        return None
    name = model.rpartition("/")[2].lower()
    models = _known()["models"]
    longest = max((prefix for prefix in models if name.startswith(prefix)), key=len, default=None)
    return None if longest is None else models[longest]
