"""The table of behaviours kept from the original names tests that exist."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NotRequired, TypedDict, cast

import pytest

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "tests" / "upstream_behaviours.toml"


class Behaviour(TypedDict):
    area: str
    behaviour: str
    replaced_by: NotRequired[str]
    tests: list[str]


def behaviours() -> list[Behaviour]:
    table = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    # The shape is what `test_every_row_is_whole` checks.
    return cast("list[Behaviour]", table["behaviour"])


@cache
def functions_of(path: str) -> frozenset[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, kinds))


def test_every_row_is_whole() -> None:
    for row in behaviours():
        mapping: Mapping[str, object] = {**row}
        assert set(mapping) - {"replaced_by"} == {"area", "behaviour", "tests"}, row
        assert row["behaviour"].endswith("."), row
        assert row.get("replaced_by", "so it is.").endswith("."), row
        assert row["tests"], row


def test_no_behaviour_is_listed_twice() -> None:
    listed = [(row["area"], row["behaviour"]) for row in behaviours()]
    assert len(listed) == len(set(listed))


@pytest.mark.parametrize("named", sorted({test for row in behaviours() for test in row["tests"]}))
def test_the_test_that_is_named_exists(named: str) -> None:
    path, _, name = named.partition("::")
    assert name.startswith("test_")
    assert name in functions_of(path), f"{path} has no {name}"
