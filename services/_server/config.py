"""Settings of a service, read once from flags and environment; a bad value ends the start and is named.

A flag wins over its variable: `--drain-grace-seconds` is `UNREAL_AGENT_DRAIN_GRACE_SECONDS`.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from clients._rpc.channel import check_address
from clients._rpc.tls import ClientTls
from clients.cli.state_dir import state_directory
from harness.errors import HarnessError
from services._server.server import ServerSettings, ServerTls
from services._server.validation import MIB

VARIABLE_PREFIX: Final = "UNREAL_AGENT_"

EXIT_USAGE: Final = 2

_SIZE = re.compile(r"(\d{1,15})\s*(|B|KiB|MiB|GiB)")
_UNITS: Final = {"": 1, "B": 1, "KiB": 1024, "MiB": MIB, "GiB": 1024 * MIB}


class ConfigError(Exception):
    """Raised for a setting that can't be used; the text names it, its value and what would be right."""


class ValueProblem(ValueError):  # noqa: N818  # it becomes a ConfigError, which says where the value came from
    """Raised by a parser; the text says what is expected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting of a service."""

    flag: str
    """For example "--drain-grace-seconds"; also names the variable."""

    parse: Callable[[str], Any]
    """Returns the value, or raises ValueProblem."""

    default: str | None
    """As it would be typed; None: not set, and the value is None. May name settings before it: "{state_dir}/x.sock"."""

    help: str
    is_repeated: bool = False
    """May be given several times; in the variable separated by commas. The value is a tuple."""

    metavar: str = "VALUE"

    @property
    def key(self) -> str:
        """Its name in the values, for example "drain_grace_seconds"."""
        return self.flag.removeprefix("--").replace("-", "_")

    @property
    def variable(self) -> str:
        """Its environment variable."""
        return VARIABLE_PREFIX + self.key.upper()


def parse_text(text: str) -> str:
    """Return any text but an empty one."""
    if not text.strip():
        raise ValueProblem("must not be empty")
    return text


def parse_path(text: str) -> Path:
    """Return an absolute path."""
    return Path(parse_text(text)).expanduser().absolute()


def parse_address(text: str) -> str:
    """Return an address that a server can listen on or a client can dial."""
    try:
        check_address(text)
    except HarnessError as err:
        raise ValueProblem("must be host:port or unix:/absolute/path (at most 107 bytes)") from err
    return text


def parse_seconds(text: str) -> float:
    """Return a positive number of seconds."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= 86_400 * 365:
        raise ValueProblem("must be a positive number of seconds")
    return seconds


def parse_count(text: str) -> int:
    """Return a positive integer."""
    if not (text.isascii() and text.isdigit() and len(text) < 16 and int(text) > 0):
        raise ValueProblem("must be a positive whole number")
    return int(text)


def parse_size(text: str) -> int:
    """Return a positive number of bytes; "256 MiB" and the like are understood."""
    match = _SIZE.fullmatch(text.strip())
    size_bytes = int(match[1]) * _UNITS[match[2]] if match else 0
    if size_bytes <= 0:
        raise ValueProblem("must be a positive size such as 1048576, 512KiB, 256MiB or 10GiB")
    return size_bytes


def parse_switch(text: str) -> bool:
    """Return whether something is on."""
    if text.lower() not in ("true", "false", "1", "0"):
        raise ValueProblem("must be true or false")
    return text.lower() in ("true", "1")


def one_of(*choices: str) -> Callable[[str], str]:
    """Return a parser of a choice."""

    def parse(text: str) -> str:
        if text not in choices:
            raise ValueProblem(f"must be one of {', '.join(choices)}")
        return text

    return parse


def server_options(*, default_listen: str) -> tuple[Setting, ...]:
    """Return the settings that every service has; `default_listen` is a default as `Setting` describes it."""
    return (
        Setting(
            flag="--state-dir",
            parse=parse_path,
            default="{default_state_dir}",
            metavar="DIRECTORY",
            help="where state and sockets lie",
        ),
        Setting(
            flag="--listen",
            parse=parse_address,
            default=default_listen,
            is_repeated=True,
            metavar="ADDRESS",
            help="host:port or unix:/path to listen on; may be repeated",
        ),
        Setting(flag="--tls-certificate", parse=parse_path, default=None, metavar="FILE", help="own certificate (PEM)"),
        Setting(flag="--tls-key", parse=parse_path, default=None, metavar="FILE", help="key of the certificate (PEM)"),
        Setting(
            flag="--tls-client-ca",
            parse=parse_path,
            default=None,
            metavar="FILE",
            help="authorities that callers' certificates must come from (PEM)",
        ),
        Setting(
            flag="--allow-client",
            parse=parse_text,
            default=None,
            is_repeated=True,
            metavar="NAME",
            help="let in only callers whose certificate holds this name; may be repeated. Else all of --tls-client-ca",
        ),
        Setting(
            flag="--tls-ca",
            parse=parse_path,
            default=None,
            metavar="FILE",
            help="authorities of the servers that it dials (PEM); with it every host:port is dialled by TLS, and shown"
            " the own certificate",
        ),
        Setting(
            flag="--insecure",
            parse=parse_switch,
            default="false",
            help="listen beyond this machine without TLS and authentication: whoever reaches the port may do anything",
        ),
        Setting(
            flag="--drain-grace-seconds",
            parse=parse_seconds,
            default="20",
            metavar="SECONDS",
            help="what calls in hand may take after SIGTERM",
        ),
        Setting(
            flag="--max-bytes-in-hand",
            parse=parse_size,
            default="256MiB",
            metavar="SIZE",
            help="requests being worked on, together; beyond it callers are told to wait",
        ),
        Setting(
            flag="--metrics",
            parse=parse_address,
            default=None,
            metavar="ADDRESS",
            help="loopback host:port that serves plain-text metrics; without it there are none",
        ),
        Setting(
            flag="--log-level",
            parse=one_of("debug", "info", "warning", "error"),
            default="info",
            metavar="LEVEL",
            help="debug, info, warning or error",
        ),
    )


def read_settings(
    program: str, description: str, options: Sequence[Setting], arguments: Sequence[str], environ: Mapping[str, str]
) -> Mapping[str, Any]:
    """Return the value of each setting by its key.

    `--help` and an unknown flag end the process, as argparse does.

    Raises:
        ConfigError: A value can't be used.
    """
    parser = argparse.ArgumentParser(
        prog=program,
        description=description,
        epilog=f"Each flag is also a variable: {VARIABLE_PREFIX}LISTEN and so on.",
    )
    names = {"default_state_dir": state_directory(None, environ).path}
    for option in options:
        default = (option.default or "").replace("{default_state_dir}", str(names["default_state_dir"]))
        # argparse fills in what follows a percent sign.
        shown = f" (default: {default.replace('%', '%%')})" if default else ""
        arguments_of_kind: dict[str, Any] = {"metavar": option.metavar}
        if option.parse is parse_switch:
            arguments_of_kind = {"nargs": "?", "const": "true", "metavar": "true|false"}
        elif option.is_repeated:
            arguments_of_kind["action"] = "append"
        parser.add_argument(option.flag, dest=option.key, help=option.help + shown, **arguments_of_kind)
    given = vars(parser.parse_args(arguments))
    values: dict[str, Any] = {}
    for option in options:
        values[option.key] = _value_of(option, given[option.key], environ, names | values)
    return values


def server_settings(values: Mapping[str, Any]) -> ServerSettings:
    """Return how to serve, from the settings of `server_options`.

    Raises:
        ConfigError: A certificate without its key, or the reverse.
    """
    certificate, key, client_ca = values["tls_certificate"], values["tls_key"], values["tls_client_ca"]
    if (certificate is None) != (key is None):
        raise ConfigError("--tls-certificate and --tls-key go together: one of them is missing")
    if client_ca is not None and certificate is None:
        raise ConfigError("--tls-client-ca needs --tls-certificate and --tls-key")
    if values["allow_client"] and client_ca is None:
        raise ConfigError("--allow-client needs --tls-client-ca: without it callers show no certificate")
    return ServerSettings(
        addresses=values["listen"],
        tls=ServerTls(certificate_path=certificate, key_path=key, client_ca_path=client_ca) if certificate else None,
        is_insecure_allowed=values["insecure"],
        drain_grace_s=values["drain_grace_seconds"],
        max_bytes_in_hand=values["max_bytes_in_hand"],
    )


def client_tls(values: Mapping[str, Any]) -> ClientTls | None:
    """Return how the service dials others, from the settings of `server_options`; None: in plain text."""
    if values["tls_ca"] is None:
        return None
    return ClientTls(ca_path=values["tls_ca"], certificate_path=values["tls_certificate"], key_path=values["tls_key"])


def _value_of(
    option: Setting, given: str | list[str] | None, environ: Mapping[str, str], names: Mapping[str, Any]
) -> Any:
    if given is not None:
        source, texts = option.flag, given if isinstance(given, list) else [given]
    elif environ.get(option.variable):
        source, text = option.variable, environ[option.variable]
        texts = [part.strip() for part in text.split(",")] if option.is_repeated else [text]
    elif option.default is None:
        return () if option.is_repeated else None
    else:
        default = option.default.format_map(names)
        source, texts = option.flag, default.split(",") if option.is_repeated else [default]
    parsed = tuple(_parsed(option, source, text) for text in texts)
    return parsed if option.is_repeated else parsed[0]


def _parsed(option: Setting, source: str, text: str) -> Any:
    try:
        return option.parse(text)
    except ValueProblem as err:
        _refuse(source, text, str(err))


def _refuse(source: str, text: str, problem: str) -> NoReturn:
    shown = text if len(text) <= 200 else f"{text[:200]}…"
    raise ConfigError(f"{source} {problem}, got {shown!r}")
