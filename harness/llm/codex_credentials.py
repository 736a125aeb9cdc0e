"""The credentials of a Codex subscription, as its own program keeps them. Reads only: no log-in, no refreshing."""

from __future__ import annotations

import base64
import binascii
import os
import stat
import time
from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from harness.errors import FailedPreconditionError, InvalidArgumentError
from harness.llm import json_text, wire

CODEX = "openai-codex"
CODEX_BASE_URL = "https://chatgpt.com/backend-api/codex"
CODEX_VARIABLES = ("OPENAI_CODEX_ACCESS_TOKEN", "OPENAI_CODEX_ACCOUNT_ID")
MAX_FILE_BYTES = 1024 * 1024

_LATEST_S = 2**53

_LOG_IN = "log in with `codex login`"


def read_codex_credentials(environ: Mapping[str, str]) -> tuple[str, str]:
    """Return access token and account of a subscription.

    Both from OPENAI_CODEX_ACCESS_TOKEN and OPENAI_CODEX_ACCOUNT_ID, else from the file that OPENAI_CODEX_AUTH_FILE
    names, else from `auth.json` in $CODEX_HOME or ~/.codex.

    Raises:
        FailedPreconditionError: They are missing or expired.
        InvalidArgumentError: They are no subscription's, or lie where others can read them.
    """
    token = environ.get(CODEX_VARIABLES[0], "").strip()
    account = environ.get(CODEX_VARIABLES[1], "").strip()
    if token or account:
        if not token or not account:
            raise FailedPreconditionError(
                "a subscription needs both OPENAI_CODEX_ACCESS_TOKEN and OPENAI_CODEX_ACCOUNT_ID: set them together",
                reason="LLM_KEY_MISSING",
            )
    else:
        token, account = _from_file(_auth_file(environ))
    if token.startswith("sk-"):
        raise InvalidArgumentError(
            f"provider {CODEX!r} takes a subscription's token, not an API key: use the provider 'openai' for that",
            reason="LLM_KEY_INVALID",
        )
    if not all("!" <= character <= "~" for character in account):
        raise InvalidArgumentError(
            "the account of the subscription holds a character that none has", reason="LLM_KEY_INVALID"
        )
    expiry_s = _expiry_s(token)
    if expiry_s is not None and expiry_s <= time.time():
        raise FailedPreconditionError(f"the subscription's token has expired: {_LOG_IN}", reason="LLM_KEY_EXPIRED")
    return token, account


def is_codex_address(base_url: str) -> bool:
    """Tell whether a subscription's token may be sent to an address: the official one, or this machine."""
    address = urlsplit(base_url)
    if address.hostname == "chatgpt.com":
        return address.scheme == "https"
    try:
        return address.hostname == "localhost" or ip_address(address.hostname or "").is_loopback
    except ValueError:
        return False


def _auth_file(environ: Mapping[str, str]) -> Path:
    named = environ.get("OPENAI_CODEX_AUTH_FILE", "").strip()
    if named:
        return Path(named)
    home = environ.get("CODEX_HOME", "").strip()
    return (Path(home) if home else Path(environ.get("HOME", "~")).expanduser() / ".codex") / "auth.json"


def _from_file(path: Path) -> tuple[str, str]:
    root = json_text.read_object(_text(path))
    if root is None:
        raise InvalidArgumentError(f"credentials {str(path)!r} are no JSON object: {_LOG_IN}", reason="LLM_KEY_INVALID")
    tokens = wire.mapping(root.get("tokens"))
    mode = root.get("auth_mode")
    if mode != "chatgpt" and (mode is not None or root.get("OPENAI_API_KEY")):
        raise InvalidArgumentError(
            f"credentials {str(path)!r} are an API key's, not a subscription's: {_LOG_IN}", reason="LLM_KEY_INVALID"
        )
    token, account = wire.text(tokens.get("access_token")).strip(), wire.text(tokens.get("account_id")).strip()
    if not token or not account:
        raise FailedPreconditionError(
            f"credentials {str(path)!r} hold no access token with its account: {_LOG_IN}", reason="LLM_KEY_MISSING"
        )
    return token, account


def _text(path: Path) -> str:
    try:
        # Opened first and looked at then: what is judged is what is read. A pipe must not hold the opening.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as err:
        raise FailedPreconditionError(
            f"provider {CODEX!r} needs a subscription's credentials, but {str(path)!r} cannot be read "
            f"({err.strerror}): {_LOG_IN}, or set OPENAI_CODEX_AUTH_FILE",
            reason="LLM_KEY_MISSING",
        ) from None
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_FILE_BYTES:
            raise InvalidArgumentError(
                f"credentials {str(path)!r} are no regular file of at most 1 MiB", reason="LLM_KEY_INVALID"
            )
        if status.st_mode & 0o077:
            raise InvalidArgumentError(
                f"credentials {str(path)!r} can be read by others: chmod 600 it", reason="LLM_KEY_INVALID"
            )
        return file.read(MAX_FILE_BYTES).decode(errors="replace")


def _expiry_s(token: str) -> float | None:
    """Return the time that a JSON Web Token names as its end, in seconds since 1970; None where there is none."""
    parts = token.split(".")
    if len(parts) != 3:
        return None
    try:
        claims = base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)).decode(errors="replace")
    except (binascii.Error, ValueError):
        return None
    expiry = (json_text.read_object(claims) or {}).get("exp")
    if isinstance(expiry, bool) or not isinstance(expiry, int | float):
        return None
    # An integer of JSON may be larger than any float.
    return float(min(expiry, _LATEST_S))
