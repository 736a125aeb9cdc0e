"""Reads the arguments that a model gave to a tool. Pure and strict.

A call whose arguments are in doubt is never run: the model is told what is wrong, and what would be right.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, Final, NoReturn, TypeAlias

from harness.tools.tools import Rejection

JSONValue: TypeAlias = "None | bool | int | float | str | list[JSONValue] | dict[str, JSONValue]"

MAX_ARGUMENTS_BYTES: Final = 1024 * 1024
"""No model writes more in one response; what is larger is an accident or an attack."""

MAX_DEPTH: Final = 32
MAX_PROBLEMS: Final = 5
"""Problems that one rejection names."""

_MAX_SHOWN_CHARS = 60
_MAX_SCHEMA_CHARS = 2_000
_JSON_SPACE = " \t\r\n"
_TYPE_NAMES: Final[Mapping[str, str]] = {
    "string": "a string",
    "integer": "an integer",
    "number": "a number",
    "boolean": "true or false",
    "array": "an array",
    "object": "an object",
    "null": "null",
}
_ANNOTATIONS: Final = frozenset({"description", "title", "default", "examples", "$schema"})
_KEYWORDS: Final = frozenset(
    {
        "type",
        "properties",
        "required",
        "additionalProperties",
        "items",
        "enum",
        "minimum",
        "maximum",
        "minLength",
        "maxLength",
        "pattern",
    }
)


class _UnacceptableError(ValueError):
    """JSON that Python would take and that is not accepted here."""


class ArgumentSchema:
    """The arguments of one tool.

    Understands the keywords type, properties, required, additionalProperties (true or false), items, enum, minimum,
    maximum, minLength, maxLength and pattern of JSON Schema 2020-12, and annotations.
    """

    def __init__(self, tool_name: str, parameters_json: str) -> None:
        """Take the schema as the model is shown it.

        Raises:
            ValueError: No JSON object, or a keyword that would go unchecked.
        """
        schema = json.loads(parameters_json)
        if not isinstance(schema, dict) or schema.get("type") != "object":
            raise ValueError(f"the schema of tool {tool_name!r} must be a JSON object of type object")
        _refuse_unknown_keywords(tool_name, schema)
        self._tool_name = tool_name
        self._schema = schema
        self._shown = _shown_schema(schema)

    def parse(self, arguments_json: str) -> dict[str, JSONValue] | Rejection:
        """Return the arguments, or why they can't be used.

        Empty text, blanks and null mean {} where nothing is required. null for an argument that is not required means
        that it is not given. A number without fraction is an integer (600.0).
        """
        problem = None
        value: JSONValue = {}
        if len(arguments_json) > MAX_ARGUMENTS_BYTES or len(arguments_json.encode()) > MAX_ARGUMENTS_BYTES:
            problem = f"they are longer than {MAX_ARGUMENTS_BYTES} bytes"
        elif arguments_json.strip(_JSON_SPACE) not in ("", "null"):
            try:
                value = _decode(arguments_json)
            except _UnacceptableError as err:
                problem = str(err)
        if problem is None and not isinstance(value, dict):
            problem = _no_object(value)
        if problem is not None:
            return self._reject([problem])
        problems: list[str] = []
        checked = _check(value, self._schema, "", problems)
        if problems or not isinstance(checked, dict):
            return self._reject(problems)
        return checked

    def _reject(self, problems: list[str]) -> Rejection:
        shown = problems[:MAX_PROBLEMS]
        if len(problems) > MAX_PROBLEMS:
            shown.append(f"{len(problems) - MAX_PROBLEMS} more")
        return Rejection(
            message=f"{self._tool_name} was not run: its arguments are wrong: {'; '.join(shown)}.\n"
            f"JSON Schema of the arguments: {self._shown}"
        )


def _decode(text: str) -> JSONValue:
    try:
        value: JSONValue = json.loads(
            text, object_pairs_hook=_object, parse_constant=_refuse_constant, parse_float=_float, parse_int=_int
        )
    except json.JSONDecodeError as err:
        raise _UnacceptableError(_syntax_problem(text, err)) from err
    except RecursionError as err:
        raise _UnacceptableError(f"they are nested more than {MAX_DEPTH} deep") from err
    _check_strings_and_depth(value)
    return value


def _syntax_problem(text: str, err: json.JSONDecodeError) -> str:
    if err.msg == "Extra data":
        return f"there is more text behind the JSON object, from character {err.pos}: {_shown(text[err.pos :])}"
    # The decoder points to where an unterminated string begins, not to where the text ends.
    is_cut_off = err.msg.startswith("Unterminated string") or not text[err.pos :].strip(_JSON_SPACE)
    hint = ", so they may have been cut off" if is_cut_off else ""
    problem = err.msg[0].lower() + err.msg[1:].removesuffix(" at")
    return f"they are no valid JSON ({problem} at character {err.pos}{hint})"


def _object(pairs: list[tuple[str, JSONValue]]) -> dict[str, JSONValue]:
    members: dict[str, JSONValue] = {}
    for name, value in pairs:
        if name in members:
            raise _UnacceptableError(f"the name {_shown(name)} is given twice in one object")
        members[name] = value
    return members


def _refuse_constant(name: str) -> NoReturn:
    raise _UnacceptableError(f"{name} is no JSON number")


def _float(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise _UnacceptableError(f"the number {_shown(digits)} is too large")
    return number


def _int(digits: str) -> int:
    # Far beyond any bound of a schema; Python refuses to convert very long ones.
    if len(digits) > 100:
        raise _UnacceptableError(f"the number {_shown(digits)} is too large")
    return int(digits)


def _check_strings_and_depth(value: JSONValue) -> None:
    """Refuse what can't be stored, shown or passed on: lone surrogates, NUL, endless nesting."""
    pending: list[tuple[JSONValue, int]] = [(value, 1)]
    while pending:
        element, depth = pending.pop()
        if depth > MAX_DEPTH:
            raise _UnacceptableError(f"they are nested more than {MAX_DEPTH} deep")
        match element:
            case str():
                _check_string(element)
            case list():
                pending.extend((child, depth + 1) for child in element)
            case dict():
                for name, child in element.items():
                    _check_string(name)
                    pending.append((child, depth + 1))
            case _:
                pass


def _check_string(text: str) -> None:
    if "\0" in text:
        raise _UnacceptableError(f"the string {_shown(text)} holds a NUL character, which no tool takes")
    try:
        text.encode()
    except UnicodeEncodeError as err:
        raise _UnacceptableError(f"the string {_shown(text)} holds half of a surrogate pair") from err


def _no_object(value: JSONValue) -> str:
    problem = f"they must be a JSON object, got {_TYPE_NAMES[_type_of(value)]}"
    if isinstance(value, str) and value.lstrip(_JSON_SPACE).startswith("{"):
        problem += " that holds an object: give the object itself, not its text"
    return problem


def _check(value: JSONValue, schema: Mapping[str, Any], path: str, problems: list[str]) -> JSONValue:
    """Return `value` with numbers of the type asked for; add what is wrong with it to `problems`."""
    expected = schema.get("type")
    if expected is not None:
        names = [expected] if isinstance(expected, str) else list(expected)
        actual = _type_of(value)
        if actual == "number" and isinstance(value, float) and value.is_integer() and "integer" in names:
            value, actual = int(value), "integer"
        if actual not in names and not (actual == "integer" and "number" in names):
            wanted = " or ".join(_TYPE_NAMES[name] for name in names)
            problems.append(f'"{path}" must be {wanted}, got {_shown_value(value)}')
            return value
    if "enum" in schema and value not in schema["enum"]:
        problems.append(f'"{path}" must be one of {json.dumps(schema["enum"])}, got {_shown_value(value)}')
        return value
    match value:
        case bool() | None:
            return value
        case int() | float():
            _check_number(value, schema, path, problems)
        case str():
            _check_text(value, schema, path, problems)
        case list():
            items = schema.get("items", {})
            return [_check(item, items, f"{path}[{index}]", problems) for index, item in enumerate(value)]
        case dict():
            return _check_members(value, schema, path, problems)
    return value


def _check_members(
    value: dict[str, JSONValue], schema: Mapping[str, Any], path: str, problems: list[str]
) -> dict[str, JSONValue]:
    properties: Mapping[str, Any] = schema.get("properties", {})
    required: list[str] = schema.get("required", [])
    prefix = f"{path}." if path else ""
    problems.extend(f'"{prefix}{name}" is required' for name in required if name not in value)
    checked: dict[str, JSONValue] = {}
    for name, member in value.items():
        if name in properties:
            if member is None and name not in required and not _takes_null(properties[name]):
                continue
            checked[name] = _check(member, properties[name], prefix + name, problems)
        elif schema.get("additionalProperties", True):
            checked[name] = member
        else:
            known = ", ".join(properties) or "none"
            problems.append(f"unknown argument {_shown(prefix + name)} (known arguments: {known})")
    return checked


def _check_number(value: float, schema: Mapping[str, Any], path: str, problems: list[str]) -> None:
    if value < schema.get("minimum", -math.inf):
        problems.append(f'"{path}" must be at least {schema["minimum"]}, got {_shown_value(value)}')
    if value > schema.get("maximum", math.inf):
        problems.append(f'"{path}" must be at most {schema["maximum"]}, got {_shown_value(value)}')


def _check_text(value: str, schema: Mapping[str, Any], path: str, problems: list[str]) -> None:
    if len(value) < schema.get("minLength", 0):
        problems.append(f'"{path}" must have at least {schema["minLength"]} characters, got {len(value)}')
    elif len(value) > schema.get("maxLength", math.inf):
        problems.append(f'"{path}" must have at most {schema["maxLength"]} characters, got {len(value)}')
    elif "pattern" in schema and not re.search(schema["pattern"], value):
        wish = "not be blank" if schema["pattern"] == r"\S" else f"match {schema['pattern']}"
        problems.append(f'"{path}" must {wish}, got {_shown_value(value)}')


def _takes_null(schema: Mapping[str, Any]) -> bool:
    if None not in schema.get("enum", [None]):
        return False
    expected = schema.get("type", "null")
    return "null" in ([expected] if isinstance(expected, str) else expected)


def _type_of(value: JSONValue) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case dict():
            return "object"


def _shown_value(value: JSONValue) -> str:
    if isinstance(value, list | dict):
        return _TYPE_NAMES[_type_of(value)]
    return f"the string {_shown(value)}" if isinstance(value, str) else json.dumps(value)[:_MAX_SHOWN_CHARS]


def _shown(text: str) -> str:
    cut = text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}..."
    # ASCII, so that half a surrogate pair can be told in a message that is stored.
    return json.dumps(cut)


def _refuse_unknown_keywords(tool_name: str, schema: Mapping[str, Any]) -> None:
    unknown = sorted(schema.keys() - _KEYWORDS - _ANNOTATIONS)
    if unknown:
        raise ValueError(f"the schema of tool {tool_name!r} uses keywords that are not checked: {', '.join(unknown)}")
    parts = list(schema.get("properties", {}).values())
    if "items" in schema:
        parts.append(schema["items"])
    for part in parts:
        _refuse_unknown_keywords(tool_name, part)


def _shown_schema(schema: Mapping[str, Any]) -> str:
    text = json.dumps(_without_annotations(schema), separators=(",", ":"))
    return text if len(text) <= _MAX_SCHEMA_CHARS else f"{text[:_MAX_SCHEMA_CHARS]}..."


def _without_annotations(schema: Mapping[str, Any]) -> dict[str, Any]:
    kept = {keyword: value for keyword, value in schema.items() if keyword not in _ANNOTATIONS}
    if "properties" in kept:
        kept["properties"] = {name: _without_annotations(part) for name, part in kept["properties"].items()}
    if "items" in kept:
        kept["items"] = _without_annotations(kept["items"])
    return kept
