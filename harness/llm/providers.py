"""Providers as data on top of the wire formats, and the opening of an adapter; imports an HTTP client only for that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from harness.clock import Clock, SystemClock
from harness.errors import FailedPreconditionError, InvalidArgumentError
from harness.llm.codex_credentials import (
    CODEX,
    CODEX_BASE_URL,
    CODEX_VARIABLES,
    is_codex_address,
    read_codex_credentials,
)
from harness.llm.llm import LLMAdapter
from harness.llm.models import default_model, max_output_tokens, reasons, thinking, window_tokens
from harness.llm.request_parts import Quirks
from harness.llm.retry import RetryPolicy, Timeouts
from harness.llm.user_file import load_user_file

if TYPE_CHECKING:
    from harness.llm.dialect import Dialect

__all__ = [
    "PROVIDERS",
    "WIRE_FORMATS",
    "Provider",
    "ProviderConfig",
    "default_model",
    "dialect_of",
    "open_adapter",
    "own_providers",
    "provider_config_from_environment",
    "provider_names",
    "without_credentials",
    "window_tokens",
]

DEFAULT_PROVIDER = "openai"
WIRE_FORMATS = ("openai-responses", "openai-chat", "anthropic-messages")

PROVIDER_VARIABLE = "UNREAL_AGENT_LLM_PROVIDER"
MODEL_VARIABLE = "UNREAL_AGENT_LLM_MODEL"
KEY_VARIABLE = "UNREAL_AGENT_LLM_API_KEY"
BASE_URL_VARIABLE = "UNREAL_AGENT_LLM_BASE_URL"


@dataclass(frozen=True, slots=True, kw_only=True)
class Provider:
    """A provider as the program knows it."""

    name: str
    wire_format: str
    """One of `WIRE_FORMATS`, or "scripted"."""

    base_url: str = ""
    """Empty: has to be given."""

    key_variables: tuple[str, ...] = ()
    """Environment variables that may hold the key; `KEY_VARIABLE` goes before them."""

    needs_key: bool = True
    default_model: str = ""
    """Empty: the one that the data on models names, if any."""

    quirks: Quirks = field(default_factory=Quirks)


_NO_HIGHER_EFFORT = {"xhigh": "high", "max": "high"}

PROVIDERS: Mapping[str, Provider] = {
    provider.name: provider
    for provider in (
        Provider(
            name="openai",
            wire_format="openai-responses",
            base_url="https://api.openai.com/v1",
            key_variables=("OPENAI_API_KEY",),
            quirks=Quirks(sends_cache_key=True),
        ),
        Provider(
            name="anthropic",
            wire_format="anthropic-messages",
            base_url="https://api.anthropic.com/v1",
            key_variables=("ANTHROPIC_API_KEY",),
            quirks=Quirks(key_header="x-api-key"),
        ),
        Provider(
            name=CODEX,
            wire_format="openai-responses",
            base_url=CODEX_BASE_URL,
            key_variables=("OPENAI_CODEX_ACCESS_TOKEN",),
            # It takes no bound of the answer, and keeps a session's cache by both.
            quirks=Quirks(
                max_tokens_field="",
                sends_cache_key=True,
                cache_key_header="session_id",
                headers={"openai-beta": "responses=experimental"},
            ),
        ),
        Provider(name="openai-compatible", wire_format="openai-chat", needs_key=False),
        Provider(
            name="ollama",
            wire_format="openai-chat",
            base_url="http://localhost:11434/v1",
            needs_key=False,
            quirks=Quirks(efforts=_NO_HIGHER_EFFORT),
        ),
        Provider(
            name="openrouter",
            wire_format="openai-chat",
            base_url="https://openrouter.ai/api/v1",
            key_variables=("OPENROUTER_API_KEY",),
            quirks=Quirks(
                effort_is_object=True,
                efforts={"max": "xhigh"},
                cache_key_header="x-session-id",
                marks_cache_for="anthropic/",
            ),
        ),
        Provider(
            name="fireworks",
            wire_format="openai-chat",
            base_url="https://api.fireworks.ai/inference/v1",
            key_variables=("FIREWORKS_API_KEY",),
            quirks=Quirks(efforts=_NO_HIGHER_EFFORT, cache_key_header="x-session-affinity"),
        ),
        Provider(name="scripted", wire_format="scripted", needs_key=False),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderConfig:
    """How one provider is asked. Its repr shows no credential."""

    provider: str
    model: str = ""
    """Model for sessions that name none; empty: they must."""

    base_url: str = ""
    """Empty: the provider's own."""

    api_key: str = field(default="", repr=False)
    account_id: str = field(default="", repr=False)
    """Account of a subscription; empty: none."""

    script_path: str = ""
    """File or recording that the `scripted` provider plays."""

    record_dir: str = ""
    """Directory that keeps what is sent and answered; empty: none."""

    definition: Provider | None = field(default=None, repr=False, compare=False)
    """A provider of the user's own; None: `provider` names one that the program knows."""

    timeouts: Timeouts = field(default_factory=Timeouts)
    retries: RetryPolicy = field(default_factory=RetryPolicy)


def provider_config_from_environment(name: str, environ: Mapping[str, str]) -> ProviderConfig:
    """Return the configuration of a provider.

    `UNREAL_AGENT_LLM_MODEL`, `_API_KEY` and `_BASE_URL` belong to the provider that `UNREAL_AGENT_LLM_PROVIDER` names
    (or, if it names none, to the one asked for): one provider's key is never sent to another.

    Args:
        name: Provider; empty: the one that the environment names, else `openai`.
        environ: Environment variables.

    Raises:
        InvalidArgumentError: The provider is unknown, or the base URL or the key cannot be used.
        FailedPreconditionError: The key or the base URL is missing.
    """
    chosen = environ.get(PROVIDER_VARIABLE, "").strip()
    own = own_providers(environ)
    provider = _known(name or chosen or DEFAULT_PROVIDER, own)
    is_meant = not chosen or chosen == provider.name
    generic = {variable: environ.get(variable, "").strip() if is_meant else "" for variable in _GENERIC}
    variables = (KEY_VARIABLE, *provider.key_variables) if is_meant else provider.key_variables
    api_key = next((key for variable in variables if (key := environ.get(variable, "").strip())), "")
    account_id = ""
    if provider.name == CODEX:
        api_key, account_id = read_codex_credentials(environ)
    config = ProviderConfig(
        provider=provider.name,
        model=generic[MODEL_VARIABLE] or provider.default_model or default_model(provider.name),
        base_url=generic[BASE_URL_VARIABLE] or provider.base_url,
        api_key="" if provider.wire_format == "scripted" else api_key,
        account_id=account_id,
        definition=own.get(provider.name),
    )
    _check(config, provider)
    return config


def open_adapter(config: ProviderConfig, *, clock: Clock | None = None) -> LLMAdapter:
    """Return an adapter, which the caller closes. Nothing is sent.

    Raises:
        InvalidArgumentError: The provider is unknown, or the base URL, the key or the script cannot be used.
        FailedPreconditionError: The key, the base URL or the script is missing.
    """
    provider = config.definition or _known(config.provider, {})
    _check(config, provider)
    clock = clock or SystemClock()
    if provider.wire_format == "scripted":
        return _open_scripted(config, clock)
    from harness.llm.http_stream import Endpoint, HttpAdapter
    from harness.llm.recording import Recorder

    quirks = provider.quirks
    endpoint = Endpoint(
        provider=provider.name,
        base_url=(config.base_url or provider.base_url).rstrip("/"),
        api_key=config.api_key,
        key_variable=_key_variable(provider),
        key_header=quirks.key_header,
        cache_key_header=quirks.cache_key_header,
        streams=quirks.streams,
        headers=quirks.headers,
        secret_headers={"chatgpt-account-id": config.account_id} if config.account_id else {},
    )
    return HttpAdapter(
        dialect=dialect_of(provider.wire_format, quirks),
        endpoint=endpoint,
        clock=clock,
        timeouts=config.timeouts,
        retries=config.retries,
        recorder=Recorder(Path(config.record_dir)) if config.record_dir else None,
    )


def dialect_of(wire_format: str, quirks: Quirks) -> Dialect:
    """Return a wire format, as a provider speaks it."""
    match wire_format:
        case "openai-responses":
            from harness.llm.openai_responses import ResponsesDialect

            return ResponsesDialect(quirks, reasons)
        case "openai-chat":
            from harness.llm.openai_chat import ChatDialect

            return ChatDialect(quirks)
        case _:
            from harness.llm.anthropic_messages import MessagesDialect

            return MessagesDialect(quirks, thinking=thinking, max_output_tokens=max_output_tokens)


def provider_names(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return every provider's name, the user's own last.

    Raises:
        InvalidArgumentError: The user's file cannot be read.
    """
    return (*PROVIDERS, *own_providers(environ))


def without_credentials(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the variables that may hold a provider's key."""
    try:
        own = own_providers(environ)
    except InvalidArgumentError:
        own = {}  # whoever asks a provider says so
    holding = {KEY_VARIABLE, *CODEX_VARIABLES}
    holding.update(variable for one in (*PROVIDERS.values(), *own.values()) for variable in one.key_variables)
    return {name: value for name, value in environ.items() if name not in holding}


def own_providers(environ: Mapping[str, str]) -> Mapping[str, Provider]:
    """Return the providers of the user's own, by name.

    Raises:
        InvalidArgumentError: The user's file cannot be read.
    """
    return {
        name: Provider(
            name=name,
            wire_format=one.wire_format,
            base_url=one.base_url,
            key_variables=(one.key_variable,) if one.key_variable else (),
            needs_key=bool(one.key_variable),
            default_model=one.default_model,
            quirks=Quirks(**one.quirks),
        )
        for name, one in load_user_file(environ).providers.items()
        if name not in PROVIDERS
    }


_GENERIC = (MODEL_VARIABLE, KEY_VARIABLE, BASE_URL_VARIABLE)


def _open_scripted(config: ProviderConfig, clock: Clock) -> LLMAdapter:
    from harness.llm.script_file import load_script
    from harness.llm.scripted import ScriptedAdapter

    if not config.script_path:
        raise FailedPreconditionError(
            "provider 'scripted' plays a script: name its file with --script FILE", reason="LLM_SCRIPT_MISSING"
        )
    return ScriptedAdapter(load_script(Path(config.script_path)), clock=clock)


def _known(name: str, own: Mapping[str, Provider]) -> Provider:
    provider = PROVIDERS.get(name) or own.get(name)
    if provider is None:
        known = ", ".join((*PROVIDERS, *own))
        raise InvalidArgumentError(
            f"provider {name!r} is unknown: set {PROVIDER_VARIABLE} or --provider to one of {known}",
            reason="LLM_PROVIDER_UNKNOWN",
        )
    return provider


def _key_variable(provider: Provider) -> str:
    return provider.key_variables[0] if provider.key_variables else KEY_VARIABLE


def _check(config: ProviderConfig, provider: Provider) -> None:
    if provider.wire_format == "scripted":
        return
    base_url = config.base_url or provider.base_url
    if not base_url:
        raise FailedPreconditionError(
            f"provider {provider.name!r} has no address: set {BASE_URL_VARIABLE}, for example to http://localhost:8000/v1",
            reason="LLM_BASE_URL_MISSING",
        )
    _check_base_url(base_url)
    if provider.name == CODEX and not is_codex_address(base_url):
        raise InvalidArgumentError(
            f"a subscription's token is sent to {CODEX_BASE_URL} or to this machine only: unset {BASE_URL_VARIABLE}",
            reason="LLM_BASE_URL_INVALID",
        )
    variable = _key_variable(provider)
    if provider.needs_key and not config.api_key:
        raise FailedPreconditionError(
            f"provider {provider.name!r} needs a key: set {variable}, or try --provider scripted, which needs none",
            reason="LLM_KEY_MISSING",
        )
    if not all("!" <= character <= "~" for character in config.api_key):
        raise InvalidArgumentError(
            f"the key of provider {provider.name!r} holds a character that no key has: set {variable} again",
            reason="LLM_KEY_INVALID",
        )


def _check_base_url(base_url: str) -> None:
    """Refuse an address that could not be used, or that would carry a credential; the message shows neither."""
    try:
        address = urlsplit(base_url)
        is_usable = address.scheme in ("http", "https") and bool(address.hostname) and (address.port or 1) > 0
        is_plain = "@" not in address.netloc and not address.query and not address.fragment
    except ValueError:
        is_usable = is_plain = False
    is_printable = all("!" <= character <= "~" for character in base_url)
    ends_with_path = base_url.rstrip("/").endswith(("/chat/completions", "/responses", "/messages"))
    if is_usable and is_plain and is_printable and not ends_with_path:
        return
    if ends_with_path:
        wrong = "ends with an endpoint: leave that off, the program adds it"
    elif is_usable:
        wrong = (
            "holds a user, a query, a fragment or an unprintable character: give the plain address, and the key apart"
        )
    else:
        wrong = "is no http or https address: give one such as https://host/v1"
    raise InvalidArgumentError(f"the base URL in {BASE_URL_VARIABLE} {wrong}", reason="LLM_BASE_URL_INVALID")
