"""Settings of a service come from flags and environment, and a bad one is named at the start."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from services._server.config import ConfigError, read_settings, server_options, server_settings

OPTIONS = server_options(default_listen="unix:{state_dir}/x.sock")


def read(*arguments: str, **environ: str) -> Mapping[str, Any]:
    return read_settings("program", "What it does.", OPTIONS, arguments, environ)


def test_without_settings_it_listens_in_the_state_directory() -> None:
    values = read(XDG_STATE_HOME="/state")
    assert values["state_dir"] == Path("/state/unreal-agent")
    assert server_settings(values).addresses == ("unix:/state/unreal-agent/x.sock",)
    assert server_settings(values).tls is None


def test_help_shows_where_state_lies_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read("--help", XDG_STATE_HOME="/50%s")
    # Lines break at hyphens too.
    assert "(default:/50%s/unreal-agent)" in "".join(capsys.readouterr().out.split())


def test_a_flag_wins_over_its_variable() -> None:
    variables = {"UNREAL_AGENT_STATE_DIR": "/env", "UNREAL_AGENT_LISTEN": "127.0.0.1:1, unix:/a/b"}
    values = read(**variables)
    assert (values["state_dir"], values["listen"]) == (Path("/env"), ("127.0.0.1:1", "unix:/a/b"))
    values = read("--state-dir", "/flag", "--listen", "[::1]:0", "--listen", "localhost:5", **variables)
    assert (values["state_dir"], values["listen"]) == (Path("/flag"), ("[::1]:0", "localhost:5"))


def test_a_switch_needs_no_value() -> None:
    assert read("--insecure")["insecure"] is True
    assert read(UNREAL_AGENT_INSECURE="true")["insecure"] is True
    assert read()["insecure"] is False


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--listen", "8080"),
        ("--listen", "host:99999"),
        ("--listen", "unix:relative"),
        ("--listen", f"unix:/{'x' * 107}"),
        ("--listen", "::1:80"),
        ("--drain-grace-seconds", "soon"),
        ("--drain-grace-seconds", "-1"),
        ("--drain-grace-seconds", "nan"),
        ("--drain-grace-seconds", "inf"),
        ("--max-bytes-in-hand", "0"),
        ("--max-bytes-in-hand", "12 parsecs"),
        ("--max-bytes-in-hand", "-5MiB"),
        ("--metrics", "nowhere"),
        ("--log-level", "chatty"),
        ("--insecure", "perhaps"),
        ("--state-dir", ""),
    ],
)
def test_a_bad_value_is_named_with_where_it_came_from(flag: str, value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(f"{flag}={value}")
    assert str(caught.value).startswith(f"{flag} must ")
    assert repr(value) in str(caught.value)
    variable = "UNREAL_AGENT_" + flag.removeprefix("--").replace("-", "_").upper()
    if value:
        with pytest.raises(ConfigError, match=f"^{variable} must "):
            read(**{variable: value})


@pytest.mark.parametrize(
    "arguments",
    [("--tls-certificate", "/c.pem"), ("--tls-key", "/k.pem"), ("--tls-client-ca", "/ca.pem")],
)
def test_half_of_a_certificate_is_refused(arguments: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=arguments[0]):
        server_settings(read(*arguments))


def test_sizes_have_units() -> None:
    assert [read("--max-bytes-in-hand", text)["max_bytes_in_hand"] for text in ("7", "2KiB", "3 MiB", "1GiB")] == [
        7,
        2048,
        3 * 1024**2,
        1024**3,
    ]
