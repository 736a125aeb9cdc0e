"""What is known of models by name: their windows, prices and defaults, read from `models.json` beside this module."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import NotRequired, TypedDict

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


class _Models(TypedDict):
    default_models: Mapping[str, str]
    models: Mapping[str, _Model]


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
    return content


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
