"""Settings of a session before they are recorded: defaults filled in, names checked. Pure but for opening adapters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from harness.coordinator.state import SessionState
from harness.errors import InvalidArgumentError
from harness.llm import LLMAdapter, models
from harness.llm.models import default_model
from harness.tools.registry import ToolRegistry
from unreal_agent.session.v1 import session_pb2

_TEXT_FIELDS = ("provider", "effort", "system_prompt", "manager_name", "workspace", "fallback_provider")
EFFORTS = frozenset({"", "low", "medium", "high", "xhigh", "max"})


def with_defaults(
    requested: session_pb2.SessionSettings, defaults: session_pb2.SessionSettings, managers: Sequence[str]
) -> session_pb2.SessionSettings:
    """Return settings whose empty fields are filled; the only manager is the default one."""
    settings = session_pb2.SessionSettings()
    settings.CopyFrom(requested)
    for name in _TEXT_FIELDS:
        if not getattr(settings, name):
            setattr(settings, name, getattr(defaults, name))
    if not settings.model:
        # The default model is one of the default provider's: another provider does not know it.
        is_default = settings.provider == defaults.provider
        settings.model = (defaults.model if is_default else "") or default_model(settings.provider)
    if not settings.manager_name and len(managers) == 1:
        settings.manager_name = managers[0]
    if not settings.enabled_tools:
        settings.enabled_tools.extend(defaults.enabled_tools)
    if not settings.HasField("limits") and defaults.HasField("limits"):
        settings.limits.CopyFrom(defaults.limits)
    return settings


def asked_model(state: SessionState) -> tuple[str, str]:
    """Return the provider and the model that the next turn asks: the fallback's while the first one fails."""
    settings = state.settings
    if state.fallback_from is None:
        return settings.provider, settings.model
    return fallback_model(settings)


def fallback_model(settings: session_pb2.SessionSettings) -> tuple[str, str]:
    """Return provider and model of the fallback, which must be set."""
    provider, _, model = settings.fallback_provider.partition("/")
    return provider, model or default_model(provider) or settings.model


def check_settings(
    settings: session_pb2.SessionSettings,
    tools: ToolRegistry,
    managers: Sequence[str],
    open_adapter: Callable[[str], LLMAdapter],
    price: Callable[[str], object | None] = models.price,
) -> None:
    """Refuse settings that no turn could be made with.

    Raises:
        InvalidArgumentError: A name is unknown, or a value is not allowed; the message says which exist.
        FailedPreconditionError: The provider is known but not set up.
    """
    tools.check(settings.enabled_tools)
    _check_effort(settings.effort)
    if not settings.manager_name and managers:
        raise InvalidArgumentError(
            f"several operation managers are there, and none is named: {', '.join(managers)}",
            reason="MANAGER_REQUIRED",
        )
    if settings.manager_name not in managers:
        raise InvalidArgumentError(
            f"unknown operation manager {settings.manager_name!r}; there are: {', '.join(managers) or 'none'}",
            reason="UNKNOWN_MANAGER",
        )
    if not settings.provider:
        raise InvalidArgumentError("no provider is named and there is no default", reason="UNKNOWN_PROVIDER")
    open_adapter(settings.provider)
    if not settings.model:
        raise InvalidArgumentError(
            f"no model is named, and provider {settings.provider!r} has none by default", reason="MODEL_REQUIRED"
        )
    check_fallback(settings)
    if settings.fallback_provider:
        open_adapter(settings.fallback_provider.partition("/")[0])
    check_prices(settings, price)
    if not settings.workspace:
        raise InvalidArgumentError("no workspace is named and there is no default", reason="WORKSPACE_REQUIRED")


def check_patch(
    patch: session_pb2.SettingsPatch, tools: ToolRegistry, open_adapter: Callable[[str], LLMAdapter]
) -> None:
    """Refuse a change of settings that no turn could be made with. Raises as `check_settings`."""
    if patch.HasField("enabled_tools"):
        tools.check(patch.enabled_tools.names)
    if patch.HasField("effort"):
        _check_effort(patch.effort)
    if patch.HasField("provider"):
        open_adapter(patch.provider)
    if patch.HasField("fallback_provider") and patch.fallback_provider:
        open_adapter(patch.fallback_provider.partition("/")[0])


def check_prices(settings: session_pb2.SessionSettings, price: Callable[[str], object | None]) -> None:
    """Refuse a bound on the cost where a model has no known price: it could never be kept.

    Raises:
        InvalidArgumentError: PRICE_UNKNOWN.
    """
    if not settings.limits.max_cost_micros:
        return
    models = [settings.model]
    if settings.fallback_provider:
        models.append(fallback_model(settings)[1])
    for model in models:
        if price(model) is None:
            raise InvalidArgumentError(
                f"the cost is bounded, but no price of model {model!r} is known: add one to your models file, or bound"
                " tokens or turns instead",
                reason="PRICE_UNKNOWN",
                metadata={"model": model},
            )


def check_fallback(settings: session_pb2.SessionSettings) -> None:
    """Refuse a fallback that is what it stands in for.

    Raises:
        InvalidArgumentError: FALLBACK_IS_PROVIDER.
    """
    if settings.fallback_provider and fallback_model(settings) == (settings.provider, settings.model):
        raise InvalidArgumentError(
            f"the fallback is provider {settings.provider!r} with the same model; name another provider, or"
            " PROVIDER/MODEL",
            reason="FALLBACK_IS_PROVIDER",
        )


def _check_effort(effort: str) -> None:
    if effort not in EFFORTS:
        known = ", ".join(sorted(EFFORTS - {""}))
        raise InvalidArgumentError(f"unknown effort {effort!r}; there are: {known}", reason="UNKNOWN_EFFORT")
