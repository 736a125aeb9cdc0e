"""docs/protocol.md says what the schemas say, at the same place for every call."""

from __future__ import annotations

import re
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "protocol.md"


@pytest.fixture(scope="module")
def protocol_docs() -> ModuleType:
    # A program of the build, on nobody's path.
    spec = spec_from_file_location("protocol_docs", ROOT / "proto" / "protocol_docs.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_committed_page_is_that_of_the_schemas(protocol_docs: ModuleType) -> None:
    assert PAGE.read_text() == protocol_docs.protocol_page(), "run `make docs`"


def test_every_link_leads_somewhere() -> None:
    text = PAGE.read_text()
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    anchors |= set(re.findall(r'<a id="([^"]+)">', text))
    assert set(re.findall(r"\]\(#([^)]+)\)", text)) - anchors == set()


def test_a_comment_is_taken_apart_by_what_its_sentences_say(protocol_docs: ModuleType) -> None:
    comment = (
        "Makes it. Idempotent by request_id. ABORTED/STALE_EPOCH: a higher epoch was seen -> drop it; "
        "NOT_FOUND/NO_SUCH: gone. A caller that goes away cancels nothing. Costs little."
    )
    assert protocol_docs.take_apart(comment) == protocol_docs.Remarks(
        description="Makes it. Costs little.",
        idempotency="Idempotent by request_id.",
        cancellation="A caller that goes away cancels nothing.",
        errors=("ABORTED/STALE_EPOCH: a higher epoch was seen -> drop it", "NOT_FOUND/NO_SUCH: gone"),
    )
