"""A call whose arguments are in doubt is never run; the model is told why."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.tools import Rejection
from harness.tools.arguments import MAX_ARGUMENTS_BYTES, ArgumentSchema

LOOSE = ArgumentSchema("Loose", '{"type":"object","properties":{"a":{"type":"integer"}}}')
STRICT = ArgumentSchema(
    "Strict",
    json.dumps(
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "pattern": r"\S", "maxLength": 5, "description": "Who."},
                "count": {"type": "integer", "minimum": 1, "maximum": 10},
                "ratio": {"type": "number"},
                "mode": {"enum": ["fast", "slow"]},
                "tags": {"type": "array", "items": {"type": "string", "minLength": 1}},
                "note": {"type": ["string", "null"]},
                "description": {"type": "boolean"},
            },
            "required": ["name"],
            "additionalProperties": False,
        }
    ),
)


def refusal(schema: ArgumentSchema, arguments_json: str) -> str:
    parsed = schema.parse(arguments_json)
    assert isinstance(parsed, Rejection), parsed
    return parsed.message


@pytest.mark.parametrize("nothing", ["", "  ", "\n\t", "null", " null ", "{}"])
def test_nothing_means_no_arguments_only_where_none_is_required(nothing: str) -> None:
    assert LOOSE.parse(nothing) == {}
    assert '"name" is required' in refusal(STRICT, nothing)


@pytest.mark.parametrize(
    ("arguments_json", "problem"),
    [
        ("[]", "must be a JSON object, got an array"),
        ('"x"', "must be a JSON object, got a string"),
        ('"{\\"a\\": 1}"', "give the object itself, not its text"),
        ("7", "must be a JSON object, got an integer"),
        ("true", "must be a JSON object, got true or false"),
        ('{"a":', "may have been cut off"),
        ('{"a":"rm -rf /tm', "may have been cut off"),
        ('{"a": 1', "may have been cut off"),
        ('{"a":1}{"b":2}', 'more text behind the JSON object, from character 7: "{\\"b\\":2}"'),
        ('{"a":1} and so on', "more text behind the JSON object"),
        ("{'a': 1}", "no valid JSON"),
        ('{"a":1,}', "no valid JSON"),
        ('{"a":1,"a":2}', 'the name "a" is given twice'),
        ('{"b":{"c":1,"c":1}}', 'the name "c" is given twice'),
        ('{"a":NaN}', "NaN is no JSON number"),
        ('{"a":-Infinity}', "-Infinity is no JSON number"),
        ('{"a":1e999}', "too large"),
        ('{"a":' + "9" * 5_000 + "}", "too large"),
        ('{"b":"x\\u0000"}', "holds a NUL"),
        ('{"b":"\\ud800"}', "half of a surrogate pair"),
        ('{"\\udfff":1}', "half of a surrogate pair"),
        ('{"b":' + "[" * 40 + "]" * 40 + "}", "nested more than 32 deep"),
        ("[" * 100_000, "nested more than 32 deep"),
        ('{"b":"' + "x" * 5_000_000 + '"}', f"longer than {MAX_ARGUMENTS_BYTES} bytes"),
        ('{"b":"' + "é" * (MAX_ARGUMENTS_BYTES // 2) + '"}', f"longer than {MAX_ARGUMENTS_BYTES} bytes"),
        ("\ufeff{}", "no valid JSON"),
    ],
)
def test_garbage_is_refused_with_its_problem_and_the_schema(arguments_json: str, problem: str) -> None:
    message = refusal(LOOSE, arguments_json)

    assert problem in message
    assert message.startswith("Loose was not run: its arguments are wrong: ")
    assert message.endswith('JSON Schema of the arguments: {"type":"object","properties":{"a":{"type":"integer"}}}')
    assert len(message) < 1_000
    message.encode()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({}, '"name" is required'),
        ({"name": None}, '"name" must be a string, got null'),
        ({"name": 5}, '"name" must be a string, got 5'),
        ({"name": " "}, '"name" must not be blank'),
        ({"name": "abcdef"}, '"name" must have at most 5 characters, got 6'),
        ({"name": "a", "count": "3"}, '"count" must be an integer, got the string "3"'),
        ({"name": "a", "count": 2.5}, '"count" must be an integer, got 2.5'),
        ({"name": "a", "count": True}, '"count" must be an integer, got true'),
        ({"name": "a", "count": 0}, '"count" must be at least 1, got 0'),
        ({"name": "a", "count": 11}, '"count" must be at most 10, got 11'),
        ({"name": "a", "mode": "warp"}, '"mode" must be one of ["fast", "slow"], got the string "warp"'),
        ({"name": "a", "tags": {"x": 1}}, '"tags" must be an array, got an object'),
        ({"name": "a", "tags": ["x", ""]}, '"tags[1]" must have at least 1 characters, got 0'),
        ({"name": "a", "nmae": 1}, 'unknown argument "nmae" (known arguments: name, count, ratio,'),
    ],
)
def test_wrong_values_are_named_with_what_would_be_right(arguments: dict[str, object], problem: str) -> None:
    assert problem in refusal(STRICT, json.dumps(arguments))


def test_all_problems_are_told_at_once_up_to_a_bound() -> None:
    message = refusal(STRICT, json.dumps({f"x{number}": 1 for number in range(9)}))

    assert '"name" is required' in message
    assert message.count("unknown argument") == 4
    assert "; 5 more." in message


def test_schema_is_shown_without_descriptions_and_with_a_property_of_that_name() -> None:
    message = refusal(STRICT, "{}")

    assert "Who." not in message
    assert '"description":{"type":"boolean"}' in message


def test_good_arguments_come_out_as_the_schema_types_them() -> None:
    parsed = STRICT.parse('{"name":"a","count":3.0,"ratio":2,"tags":["x"],"note":null,"mode":null}')

    assert parsed == {"name": "a", "count": 3, "ratio": 2, "tags": ["x"], "note": None}
    assert isinstance(parsed, dict)
    assert type(parsed["count"]) is int


@pytest.mark.parametrize("schema", ["[]", '{"type":"string"}', '{"type":"object","properties":{"a":{"oneOf":[]}}}'])
def test_schema_that_would_go_unchecked_is_the_hosts_error(schema: str) -> None:
    with pytest.raises(ValueError, match="schema"):
        ArgumentSchema("T", schema)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(), children, max_size=3),
    max_leaves=8,
)


@given(JSON_VALUES)
def test_any_json_is_taken_whole_or_refused(value: object) -> None:
    for schema in (LOOSE, STRICT):
        parsed = schema.parse(json.dumps(value))
        if isinstance(parsed, dict):
            expected = value or {}
            assert isinstance(expected, dict)
            assert parsed == {name: member for name, member in expected.items() if name in parsed}
            assert all(expected[name] is None for name in expected.keys() - parsed.keys())


@given(st.text(st.sampled_from('{}[]":,ab1e\\u0 \n'), max_size=30))
def test_any_text_is_an_object_or_refused(text: str) -> None:
    parsed = LOOSE.parse(text)

    if isinstance(parsed, dict) and parsed:
        assert json.loads(text).keys() >= parsed.keys()
