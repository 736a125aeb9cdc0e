from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.errors import HarnessError, InvalidArgumentError
from harness.llm.providers import PROVIDERS, open_adapter, provider_config_from_environment, provider_names
from harness.llm.user_file import parse_user_file, user_file_path
from tests.support.llm import collect, request, text_of
from tests.support.provider import scripted_provider
from tests.support.provider_replies import stream_reply, whole_stream

ACME: dict[str, Any] = {
    "wire_format": "anthropic-messages",
    "base_url": "https://llm.acme.example/v1",
    "key_variable": "ACME_API_KEY",
    "default_model": "acme-1",
    "quirks": {"key_header": "x-acme-key", "efforts": {"max": "high"}, "headers": {"x-team": "blue"}},
}
MODEL = {"window_tokens": 32_000, "max_output_tokens": 4_000, "price": {"input": 0.5, "output": 2}}


def written(directory: Path, content: object) -> dict[str, str]:
    """Write the file below a directory, and return the environment that finds it."""
    environ = {"XDG_CONFIG_HOME": str(directory), "ACME_API_KEY": "key-acme"}
    path = user_file_path(environ)
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(content))
    return environ


async def test_a_provider_of_ones_own_answers_from_a_few_lines(tmp_path: Path) -> None:
    async with scripted_provider(lambda _: stream_reply(whole_stream("anthropic-messages", "ok"))) as server:
        environ = written(tmp_path, {"providers": {"acme": {**ACME, "base_url": server.base_url}}})
        config = provider_config_from_environment("acme", environ)
        assert (config.model, config.api_key) == ("acme-1", "key-acme")
        adapter = open_adapter(config)
        _, output = await collect(adapter, request())
        await adapter.aclose()
    assert (text_of(output), output.provider) == ("ok", "acme")
    headers = server.requests[0].headers
    assert (headers["x-acme-key"], headers["x-team"], "authorization" in headers) == ("key-acme", "blue", False)


def test_it_is_listed_and_named_like_any_other(tmp_path: Path) -> None:
    environ = written(tmp_path, {"providers": {"acme": ACME}})
    assert provider_names(environ)[-1] == "acme"
    with pytest.raises(HarnessError, match="provider 'acme' needs a key: set ACME_API_KEY"):
        provider_config_from_environment("acme", {**environ, "ACME_API_KEY": ""})
    with pytest.raises(HarnessError, match="one of openai, .*, acme"):
        provider_config_from_environment("acne", environ)


def test_models_of_ones_own_have_windows_and_prices(tmp_path: Path) -> None:
    environ = written(tmp_path, {"models": {"acme-": MODEL, "gpt-4": {"window_tokens": 7}}})
    code = (
        "from harness.llm import models as m;"
        "print(m.window_tokens('acme-1'), m.max_output_tokens('acme-1'), m.price('acme-1'), m.window_tokens('gpt-4'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": ".:proto", "PATH": os.environ["PATH"], **environ},
    )
    assert done.stdout == "32000 4000 Price(input=0.5, cached_input=0.5, cache_write=0.5, output=2) 7\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is no JSON"),
        ("[]", "the file must be an object"),
        ('{"provider": {}}', "the file has the unknown member 'provider'"),
        ('{"providers": {"a b": {}}}', "providers.a b: a name has letters"),
        ('{"providers": {"a": {"wire_format": "openai-chat"}}}', "providers.a.base_url is missing"),
        ('{"providers": {"a": {"wire_format": "x", "base_url": "http://h"}}}', "must be one of openai-responses"),
        ('{"providers": {"a": {"wire_format": "openai-chat", "base_url": 7}}}', "providers.a.base_url has the wrong"),
        (
            '{"providers": {"a": {"wire_format": "openai-chat", "base_url": "http://h", "key_variable": "sk-1"}}}',
            "a key itself does not belong here",
        ),
        (
            '{"providers": {"a": {"wire_format": "openai-chat", "base_url": "http://h", "quirks": {"speed": 1}}}}',
            "providers.a.quirks has the unknown member 'speed'",
        ),
        (
            '{"providers": {"a": {"wire_format": "openai-chat", "base_url": "http://h", "quirks": {"streams": "no"}}}}',
            "providers.a.quirks.streams has the wrong type",
        ),
        ('{"models": {"m": {}}}', "models.m.window_tokens is missing"),
        ('{"models": {"m": {"window_tokens": -1}}}', "models.m.window_tokens has the wrong type or is out of range"),
        ('{"models": {"m": {"window_tokens": 9, "price": {"input": 1}}}}', "models.m.price needs input and output"),
        ('{"models": {"m": {"window_tokens": 9, "price": {"input": -1, "output": 1}}}}', "price.input has the wrong"),
    ],
)
def test_what_is_wrong_is_told_with_its_place(text: str, words: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        parse_user_file(text, Path("/config/providers.json"))
    assert words in caught.value.message
    assert caught.value.message.startswith("'/config/providers.json': ")


def test_the_directory_follows_the_specification() -> None:
    assert user_file_path({"XDG_CONFIG_HOME": "/c", "HOME": "/h"}) == Path("/c/unreal-agent/providers.json")
    assert user_file_path({"XDG_CONFIG_HOME": "c", "HOME": "/h"}) == Path("/h/.config/unreal-agent/providers.json")


def test_the_readme_shows_such_a_file_and_names_every_provider() -> None:
    readme = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"^```json\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    assert parse_user_file(shown, Path("README.md")).providers.keys() == {"acme"}
    (paragraph,) = re.findall(r"^\*\*Models\*\*.*?\n\n", readme, re.MULTILINE | re.DOTALL)
    for provider in PROVIDERS.values():
        assert f"`{provider.name}`" in paragraph or provider.name == "scripted"
        if provider.needs_key and provider.name != "openai-codex":
            assert f"`{provider.name}` (`{provider.key_variables[0]}`)" in " ".join(paragraph.split())
