"""The user's own file of providers and models: `unreal-agent/providers.json` below the configuration directory.

{"providers": {"acme": {"wire_format": "openai-chat", "base_url": "https://llm.acme.example/v1",
                        "key_variable": "ACME_API_KEY", "default_model": "acme-1", "quirks": {"streams": false}}},
 "models": {"acme-1": {"window_tokens": 32000, "max_output_tokens": 4000, "price": {"input": 0.5, "output": 2}}}}
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

from harness.errors import InvalidArgumentError
from harness.llm import json_text
from harness.llm.request_parts import Quirks

MAX_FILE_BYTES = 1024 * 1024

_WIRE_FORMATS = ("openai-responses", "openai-chat", "anthropic-messages")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnProvider:
    """A provider of the user's own."""

    wire_format: str
    base_url: str
    key_variable: str = ""
    """Environment variable that holds the key; empty: it needs none."""

    default_model: str = ""
    quirks: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `Quirks`, each of its member's type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UserFile:
    """What the file says."""

    providers: Mapping[str, OwnProvider] = field(default_factory=dict)
    models: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """By the beginning of a model's name, with the members of an entry of `models.json`."""


def user_file_path(environ: Mapping[str, str]) -> Path:
    """Return where the file is, or would be."""
    configured = environ.get("XDG_CONFIG_HOME", "")
    # A relative one is to be ignored, says the specification of these directories.
    base = Path(configured) if configured.startswith("/") else Path(environ.get("HOME", "~")).expanduser() / ".config"
    return base / "unreal-agent" / "providers.json"


def load_user_file(environ: Mapping[str, str]) -> UserFile:
    """Return the user's file, read once in a process; without one it is empty.

    Raises:
        InvalidArgumentError: It cannot be read; the message names the place.
    """
    return _load(user_file_path(environ))


@cache
def _load(path: Path) -> UserFile:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise _invalid(path, f"is larger than {MAX_FILE_BYTES} bytes")
        text = path.read_text(encoding="utf-8-sig")
    except (FileNotFoundError, NotADirectoryError):
        return UserFile()
    except (OSError, UnicodeDecodeError) as err:
        raise _invalid(path, f"cannot be read ({type(err).__name__})") from None
    return parse_user_file(text, path)


def parse_user_file(text: str, path: Path) -> UserFile:
    """Return what a text says; `path` stands in messages.

    Raises:
        InvalidArgumentError: It is wrong; the message names the place.
    """
    try:
        root = _members(json_text.read(text), "the file", {"providers": _any, "models": _any})
        return UserFile(
            providers={
                name: _provider(name, value) for name, value in _named(root.get("providers", {}), "providers").items()
            },
            models={name: _model(name, value) for name, value in _named(root.get("models", {}), "models").items()},
        )
    except json_text.JSONTextError as err:
        raise _invalid(path, f"is no JSON: {err}") from None
    except _WrongError as err:
        raise _invalid(path, str(err)) from None


class _WrongError(Exception):
    """Says what is wrong, and where."""


def _invalid(path: Path, wrong: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"{str(path)!r}: {wrong}", reason="LLM_PROVIDERS_INVALID")


def _provider(name: str, value: object) -> OwnProvider:
    place = f"providers.{json_text.valid_text(name[:60])}"
    if not _NAME.fullmatch(name):
        raise _WrongError(f"{place}: a name has letters, digits, '.', '_' and '-'")
    known = {"wire_format": _text, "base_url": _text, "key_variable": _text, "default_model": _text, "quirks": _any}
    members = _members(value, place, known)
    for needed in ("wire_format", "base_url"):
        if needed not in members:
            raise _WrongError(f"{place}.{needed} is missing")
    if members["wire_format"] not in _WIRE_FORMATS:
        raise _WrongError(f"{place}.wire_format must be one of {', '.join(_WIRE_FORMATS)}")
    if members.get("key_variable") and not _VARIABLE.fullmatch(str(members["key_variable"])):
        raise _WrongError(f"{place}.key_variable must name an environment variable; a key itself does not belong here")
    quirks = _members(members.get("quirks", {}), f"{place}.quirks", _QUIRKS)
    return OwnProvider(**{**members, "quirks": quirks})


def _model(name: str, value: object) -> Mapping[str, object]:
    place = f"models.{json_text.valid_text(name[:60])}"
    members = _members(value, place, _MODEL)
    if "window_tokens" not in members:
        raise _WrongError(f"{place}.window_tokens is missing")
    if "price" in members:
        price = _members(members["price"], f"{place}.price", dict.fromkeys(_PRICE, _amount))
        if not {"input", "output"} <= price.keys():
            raise _WrongError(f"{place}.price needs input and output")
    return members


def _named(value: object, place: str) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise _WrongError(f"{place} must be an object")
    return value


def _members(value: object, place: str, known: Mapping[str, Callable[[object], bool]]) -> dict[str, Any]:
    for name, member in _named(value, place).items():
        if name not in known:
            raise _WrongError(f"{place} has the unknown member {name[:60]!r}; known are {', '.join(known)}")
        if not known[name](member):
            raise _WrongError(f"{place}.{name} has the wrong type or is out of range")
    return dict(_named(value, place))


def _any(_: object) -> bool:
    return True


def _text(value: object) -> bool:
    return isinstance(value, str)


def _truth(value: object) -> bool:
    return isinstance(value, bool)


def _texts(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(one, str) for one in value.values())


def _tokens(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**53


def _amount(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= sys.float_info.max


_CHECKS: Mapping[str, Callable[[object], bool]] = {"str": _text, "bool": _truth, "Mapping[str, str]": _texts}
_QUIRKS = {member.name: _CHECKS[str(member.type)] for member in fields(Quirks)}
_PRICE = ("input", "cached_input", "cache_write", "output")
_MODEL: Mapping[str, Callable[[object], bool]] = {
    "window_tokens": _tokens,
    "max_output_tokens": _tokens,
    "price": _any,
    "reasons": _truth,
    "thinking": lambda value: value in ("adaptive", "budget", ""),
    "efforts": _texts,
}
