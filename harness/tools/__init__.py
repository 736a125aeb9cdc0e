"""The tool translators' contract; translators are imported from their own modules."""

from harness.tools.registry import ToolRegistry, default_registry
from harness.tools.tools import Rejection, ToolTranslator

__all__ = ["Rejection", "ToolRegistry", "ToolTranslator", "default_registry"]
