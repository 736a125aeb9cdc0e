from __future__ import annotations

import base64
import json
import os
import time
from pathlib import Path

import pytest

from harness.errors import FailedPreconditionError, HarnessError, InvalidArgumentError
from harness.llm.providers import ProviderConfig, open_adapter, provider_config_from_environment
from tests.support.llm import collect, request
from tests.support.provider import scripted_provider
from tests.support.provider_replies import stream_reply, whole_stream

ACCOUNT = "account-1"


def token(expires_in_s: float = 3600) -> str:
    claims = json.dumps({"exp": int(time.time() + expires_in_s)}).encode()
    return f"head.{base64.urlsafe_b64encode(claims).decode().rstrip('=')}.signature"


def auth_file(directory: Path, *, mode: int = 0o600, **members: object) -> Path:
    path = directory / "auth.json"
    tokens = {"access_token": token(), "account_id": ACCOUNT, "refresh_token": "r"}
    path.write_text(json.dumps({"auth_mode": "chatgpt", "OPENAI_API_KEY": None, "tokens": tokens, **members}))
    path.chmod(mode)
    return path


@pytest.mark.parametrize("variable", ["OPENAI_CODEX_AUTH_FILE", "CODEX_HOME", "HOME"])
def test_the_subscriptions_file_is_found(tmp_path: Path, variable: str) -> None:
    (tmp_path / ".codex").mkdir()
    path = auth_file(tmp_path / ".codex")
    value = {"OPENAI_CODEX_AUTH_FILE": path, "CODEX_HOME": path.parent, "HOME": tmp_path}[variable]
    config = provider_config_from_environment("openai-codex", {"HOME": "/nowhere", variable: str(value)})
    assert (config.base_url, config.account_id) == ("https://chatgpt.com/backend-api/codex", ACCOUNT)
    assert config.api_key.startswith("head.")
    assert config.api_key not in repr(config)
    assert ACCOUNT not in repr(config)


async def test_it_is_asked_as_its_own_program_asks(tmp_path: Path) -> None:
    async with scripted_provider(lambda _: stream_reply(whole_stream("openai-responses", "ok"))) as server:
        environ = {
            "OPENAI_CODEX_AUTH_FILE": str(auth_file(tmp_path)),
            "UNREAL_AGENT_LLM_PROVIDER": "openai-codex",
            "UNREAL_AGENT_LLM_BASE_URL": server.base_url,
        }
        config = provider_config_from_environment("", environ)
        adapter = open_adapter(config)
        await collect(adapter, request(max_output_tokens=99))
        await adapter.aclose()
    (sent,) = server.requests
    assert sent.headers["authorization"] == f"Bearer {config.api_key}"
    assert (sent.headers["chatgpt-account-id"], sent.headers["session_id"]) == (ACCOUNT, "cache-1")
    assert sent.json.keys() & {"max_output_tokens"} == set()
    assert (sent.json["store"], sent.json["stream"], sent.json["prompt_cache_key"]) == (False, True, "cache-1")


def test_variables_go_before_the_file() -> None:
    environ = {"OPENAI_CODEX_ACCESS_TOKEN": token(), "OPENAI_CODEX_ACCOUNT_ID": "other"}
    config = provider_config_from_environment("openai-codex", environ)
    assert (config.api_key, config.account_id) == (environ["OPENAI_CODEX_ACCESS_TOKEN"], "other")


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"mode": 0o644}, InvalidArgumentError, "can be read by others: chmod 600"),
        ({"auth_mode": "apikey"}, InvalidArgumentError, "an API key's"),
        ({"auth_mode": None, "OPENAI_API_KEY": "sk-secret"}, InvalidArgumentError, "an API key's"),
        ({"tokens": {"access_token": "sk-secret", "account_id": "a"}}, InvalidArgumentError, "not an API key"),
        ({"tokens": {}}, FailedPreconditionError, "hold no access token"),
        ({"tokens": {"access_token": token(-5), "account_id": "a"}}, FailedPreconditionError, "has expired"),
        ({"tokens": {"access_token": "t", "account_id": "a\nb"}}, InvalidArgumentError, "a character that none has"),
        ({"padding": "x" * 2**20}, InvalidArgumentError, "at most 1 MiB"),
    ],
)
def test_unfit_credentials_are_refused_without_being_shown(
    tmp_path: Path, change: dict[str, object], error: type[HarnessError], words: str
) -> None:
    path = auth_file(tmp_path, **change)  # type: ignore[arg-type]  # a mode among the members
    with pytest.raises(error) as caught:
        provider_config_from_environment("openai-codex", {"OPENAI_CODEX_AUTH_FILE": str(path)})
    assert words in caught.value.message
    assert "secret" not in caught.value.message


def test_a_pipe_or_nothing_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name, words in (("pipe", "no regular file"), ("nothing", "codex login")):
        with pytest.raises(HarnessError, match=words):
            provider_config_from_environment("openai-codex", {"OPENAI_CODEX_AUTH_FILE": str(tmp_path / name)})


@pytest.mark.parametrize("base_url", ["https://llm.example/v1", "http://chatgpt.com/backend-api/codex"])
def test_the_token_is_sent_to_nobody_else(base_url: str) -> None:
    with pytest.raises(InvalidArgumentError, match="or to this machine only"):
        open_adapter(ProviderConfig(provider="openai-codex", base_url=base_url, api_key=token(), account_id=ACCOUNT))
