from __future__ import annotations

import subprocess
import sys

import pytest

from harness.errors import FailedPreconditionError, HarnessError, InvalidArgumentError
from harness.llm.http_stream import HttpAdapter
from harness.llm.providers import (
    PROVIDERS,
    ProviderConfig,
    default_model,
    open_adapter,
    provider_config_from_environment,
    window_tokens,
    without_credentials,
)


def test_the_default_provider_takes_its_own_key() -> None:
    config = provider_config_from_environment("", {"OPENAI_API_KEY": " sk-1 "})
    assert config == ProviderConfig(
        provider="openai", model="gpt-6-astra", base_url="https://api.openai.com/v1", api_key="sk-1"
    )


def test_generic_variables_go_before_the_providers_own() -> None:
    environ = {
        "UNREAL_AGENT_LLM_PROVIDER": "openrouter",
        "UNREAL_AGENT_LLM_MODEL": "anthropic/claude-opus-5",
        "UNREAL_AGENT_LLM_API_KEY": "key-generic",
        "UNREAL_AGENT_LLM_BASE_URL": "http://127.0.0.1:9/v1/",
        "OPENROUTER_API_KEY": "key-own",
        "OPENAI_API_KEY": "key-openai",
    }
    assert provider_config_from_environment("", environ) == ProviderConfig(
        provider="openrouter", model="anthropic/claude-opus-5", base_url="http://127.0.0.1:9/v1/", api_key="key-generic"
    )
    other = provider_config_from_environment("openai", environ)
    assert (other.api_key, other.base_url, other.model) == ("key-openai", "https://api.openai.com/v1", "gpt-6-astra")


def test_one_providers_key_is_not_sent_to_another() -> None:
    environ = {"UNREAL_AGENT_LLM_PROVIDER": "openai", "UNREAL_AGENT_LLM_API_KEY": "key-generic"}
    with pytest.raises(FailedPreconditionError, match="set FIREWORKS_API_KEY"):
        provider_config_from_environment("fireworks", environ)


@pytest.mark.parametrize(
    ("name", "environ", "error", "words"),
    [
        ("", {}, FailedPreconditionError, "provider 'openai' needs a key: set OPENAI_API_KEY"),
        ("claude", {}, InvalidArgumentError, "provider 'claude' is unknown: set UNREAL_AGENT_LLM_PROVIDER"),
        ("openai-compatible", {}, FailedPreconditionError, "set UNREAL_AGENT_LLM_BASE_URL, for example to http://"),
        ("ollama", {"UNREAL_AGENT_LLM_BASE_URL": "localhost:11434"}, InvalidArgumentError, "is no http or https"),
        ("ollama", {"UNREAL_AGENT_LLM_BASE_URL": "http://"}, InvalidArgumentError, "is no http or https"),
        ("ollama", {"UNREAL_AGENT_LLM_BASE_URL": "http://h:x/v1"}, InvalidArgumentError, "is no http or https"),
        ("ollama", {"UNREAL_AGENT_LLM_BASE_URL": "http://u:secret@h/v1"}, InvalidArgumentError, "holds a user"),
        ("ollama", {"UNREAL_AGENT_LLM_BASE_URL": "http://h/v1?key=secret"}, InvalidArgumentError, "holds a user"),
        (
            "ollama",
            {"UNREAL_AGENT_LLM_BASE_URL": "http://h/v1/chat/completions"},
            InvalidArgumentError,
            "leave that off",
        ),
        ("openai", {"OPENAI_API_KEY": "secret\nkey"}, InvalidArgumentError, "set OPENAI_API_KEY again"),
        ("openai", {"OPENAI_API_KEY": "secretö"}, InvalidArgumentError, "set OPENAI_API_KEY again"),
    ],
)
def test_what_is_missing_or_wrong_is_said_in_one_line_without_secrets(
    name: str, environ: dict[str, str], error: type[HarnessError], words: str
) -> None:
    with pytest.raises(error) as caught:
        provider_config_from_environment(name, environ)
    assert words in caught.value.message
    assert "secret" not in caught.value.message
    assert "\n" not in caught.value.message


def test_the_scripted_provider_needs_its_file() -> None:
    config = provider_config_from_environment("scripted", {"UNREAL_AGENT_LLM_API_KEY": "k"})
    assert config == ProviderConfig(provider="scripted", model="scripted")
    with pytest.raises(FailedPreconditionError, match="--script FILE"):
        open_adapter(config)


@pytest.mark.parametrize("name", [name for name in PROVIDERS if name != "scripted"])
async def test_every_http_provider_opens(name: str) -> None:
    adapter = open_adapter(ProviderConfig(provider=name, base_url="http://127.0.0.1:9/v1", api_key="key-1"))
    assert isinstance(adapter, HttpAdapter)
    await adapter.aclose()
    await adapter.aclose()


def test_an_environment_for_others_holds_no_key() -> None:
    kept = {"PATH": "/bin", "HOME": "/nowhere", "UNREAL_AGENT_LLM_MODEL": "m"}
    keys = [variable for provider in PROVIDERS.values() for variable in provider.key_variables]
    keys += ["UNREAL_AGENT_LLM_API_KEY", "OPENAI_CODEX_ACCOUNT_ID"]
    assert without_credentials({**kept, **dict.fromkeys(keys, "secret")}) == kept


def test_no_repr_shows_the_key() -> None:
    config = ProviderConfig(provider="openai", api_key="key-secret")
    assert "key-secret" not in repr(config)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("gpt-6-astra", 1_050_000),
        ("openai/gpt-6-astra", 1_050_000),
        ("gpt-5.6-luna-2026", 400_000),
        ("gpt-4o-mini", 128_000),
        ("accounts/fireworks/models/kimi-k2-thinking", 262_144),
        ("anthropic/claude-opus-5-5:beta", 1_000_000),
        ("qwen3-coder:30b", 0),
        ("unheard-of", 0),
        ("", 0),
    ],
)
def test_windows_are_found_by_the_longest_name(model: str, expected: int) -> None:
    assert window_tokens(model) == expected


def test_a_provider_without_a_default_model_says_so() -> None:
    assert (default_model("scripted"), default_model("ollama"), default_model("nobody")) == ("scripted", "", "")


def test_neither_the_contract_nor_the_scripted_provider_imports_an_http_client() -> None:
    code = (
        "import sys, harness.llm, harness.llm.providers, harness.llm.scripted, harness.llm.script_file;"
        "print(sorted({'httpx', 'anyio', 'yaml'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": ".:proto"}
    )
    assert done.stdout == "[]\n"
