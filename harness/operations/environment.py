"""The environment of commands: an allow-list, so that no key of the manager's reaches a model's command. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import urlsplit

ALLOWED = frozenset({"PATH", "HOME", "LANG", "LANGUAGE", "TZ", "USER", "LOGNAME", "SHELL", "TMPDIR"})
PROXIES = frozenset({"HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "FTP_PROXY"})

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_LOCALE = re.compile(r"LC_[A-Z]+")


def command_environment(environment: Mapping[str, str], extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of commands.

    Args:
        environment: The manager's own; only allowed variables are taken, proxies only without credentials.
        extra: Variables that the operator adds or replaces.
    """
    chosen = {"PATH": DEFAULT_PATH}
    for name, value in environment.items():
        is_allowed = name in ALLOWED or _LOCALE.fullmatch(name) is not None
        if is_allowed or (name.upper() in PROXIES and not _has_credentials(value)):
            chosen[name] = value
    return {**chosen, "TERM": "dumb", **(extra or {})}


def _has_credentials(proxy: str) -> bool:
    if "@" not in proxy:
        return False
    try:
        return bool(urlsplit(proxy if "://" in proxy else f"//{proxy}").netloc.rpartition("@")[0])
    except ValueError:
        return True
