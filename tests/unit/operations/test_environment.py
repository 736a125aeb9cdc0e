"""What of the manager's environment a command sees."""

from __future__ import annotations

import pytest

from harness.operations.environment import DEFAULT_PATH, command_environment


def test_only_what_is_listed_passes() -> None:
    environment = {
        "PATH": "/bin",
        "HOME": "/home/x",
        "LC_ALL": "C",
        "LC_x": "no",
        "TERM": "xterm",
        "BASH_ENV": "/evil",
        "ANTHROPIC_API_KEY": "key",
        "UNREAL_AGENT_TOKEN": "key",
        "LD_PRELOAD": "no",
    }
    assert command_environment(environment) == {"PATH": "/bin", "HOME": "/home/x", "LC_ALL": "C", "TERM": "dumb"}


@pytest.mark.parametrize(
    "proxy, passes",
    [
        ("http://proxy:8080", True),
        ("proxy:8080", True),
        ("http://user:secret@proxy:8080", False),
        ("user:secret@proxy:8080", False),
        ("http://token@proxy", False),
        ("http://[bad@", False),
    ],
)
@pytest.mark.parametrize("name", ["https_proxy", "HTTP_PROXY", "ALL_PROXY"])
def test_proxy_passes_without_credentials(name: str, proxy: str, passes: bool) -> None:
    assert (command_environment({name: proxy}).get(name) == proxy) is passes


def test_operator_adds_and_a_path_there_always_is() -> None:
    assert command_environment({}, {"CI": "1"}) == {"PATH": DEFAULT_PATH, "TERM": "dumb", "CI": "1"}
