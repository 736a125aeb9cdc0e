"""What is known of models by name: their windows and defaults, read from `models.json` beside this module."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import NotRequired, TypedDict


class _Model(TypedDict):
    window_tokens: int
    reasons: NotRequired[bool]


class _Models(TypedDict):
    default_models: Mapping[str, str]
    models: Mapping[str, _Model]


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
