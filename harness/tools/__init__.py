"""The tool translators' contract; translators are imported from their own modules."""

from harness.tools.tools import Rejection, ToolTranslator

__all__ = ["Rejection", "ToolTranslator"]
