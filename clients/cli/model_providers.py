"""The model providers that options and environment set up, and the script that a session remembers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from clients.cli.failures import CommandError
from harness.llm import LLMAdapter
from harness.llm.providers import ProviderConfig, open_adapter, provider_config_from_environment
from unreal_agent.session.v1 import session_pb2

SCRIPT_LABEL = "script"
"""Label of a session whose provider is scripted: the script's absolute path, so that a resume needs no option."""


class Providers:
    """The providers that options and environment set up."""

    def __init__(self, environ: Mapping[str, str], *, script: str | None = None, record: str | None = None) -> None:
        """Read `environ` for keys and addresses.

        Args:
            environ: Environment variables.
            script: File, or directory of a recording, that the provider `scripted` plays.
            record: Directory that keeps what is sent to other providers and what they answer.
        """
        self._environ = environ
        self.script = _absolute(script)
        self._record_dir = _absolute(record)

    def config(self, name: str | None) -> ProviderConfig:
        """Return a provider's configuration; None: that which a new session gets.

        Raises:
            HarnessError: It is unknown, or its key, address or script is missing or wrong.
        """
        if name is None:
            name = "scripted" if self.script else ""
        config = provider_config_from_environment(name, self._environ)
        config = replace(config, script_path=self.script, record_dir=self._record_dir)
        if config.provider == "scripted":
            open_adapter(config)  # reads the script; nothing is open afterwards
        return config

    def open(self, name: str) -> LLMAdapter:
        """Return a provider's adapter, which the caller closes."""
        return open_adapter(self.config(name))

    def check(self, settings: session_pb2.SessionSettings) -> None:
        """Raise where the provider of a session can't be asked; take up the script that the session remembers."""
        if settings.provider == "scripted" and not self.script:
            self.script = settings.labels.get(SCRIPT_LABEL, "")
        self.config(settings.provider)


def _absolute(path: str | None) -> str:
    return str(Path(path).expanduser().absolute()) if path is not None else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewSession:
    """Provider and model of a new session."""

    provider: str
    model: str


def choose_model(providers: Providers, provider: str | None, model: str | None) -> NewSession:
    """Return provider and model of a new session, checked as far as they can be without asking anybody.

    Raises:
        CommandError: No model is named, and the provider has none by default.
        HarnessError: The provider can't be asked.
    """
    config = providers.config(provider)
    chosen = model or config.model
    if not chosen:
        raise CommandError(
            f"provider {config.provider!r} has no model by default",
            "Name one with --model, or set UNREAL_AGENT_LLM_MODEL.",
        )
    return NewSession(provider=config.provider, model=chosen)
