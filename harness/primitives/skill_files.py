"""Reads the front matter of a skill file: real YAML, bounded, with a line and a reason for each fault.

Pure. Nothing is constructed from the YAML: it is composed to nodes, of which two are looked at, so that no tag, no
merge key and no alias can do anything. What is clear but no YAML, `description: two axes: A and B`, is read all the
same and the repair is reported.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import yaml

MAX_FILE_BYTES = 256 * 1024
MAX_FRONT_MATTER_BYTES = 64 * 1024
MAX_NAME_CHARS = 64
MAX_DESCRIPTION_CHARS = 1024

_MAX_DEPTH = 20
_MAX_ALIASES = 16
# About 50 ms of parsing; 64 KiB of "- x" lines would take most of a second, in each of 256 folders.
_MAX_EVENTS = 2_000
_MAX_REPAIRS = 8
_REASON_CHARS = 300

_NAME = re.compile(r"[A-Za-z0-9_-]+")
_FENCE = re.compile(r"---[ \t]*")
# A key at the margin whose value is neither quoted nor a structure: the only place where a colon is taken for prose.
_PROSE_LINE = re.compile(r"(?P<key>[A-Za-z_][\w-]*:[ \t]+)(?P<prose>[^\s\"'\[\]{}>|*&!%#`@,?-].*)")
_STRING_TAG = "tag:yaml.org,2002:str"
_NULL_TAG = "tag:yaml.org,2002:null"


@dataclass(frozen=True, slots=True, kw_only=True)
class SkillFault:
    """Why a skill file can't be used, or what was repaired."""

    line: int
    """1-based; 0 where no line can be named."""

    reason: str
    """One line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SkillFile:
    """A skill file that can be used."""

    name: str
    description: str
    content: str
    """The whole file, front matter too."""

    repairs: Sequence[SkillFault]
    """What was read otherwise than YAML says."""


class _FaultError(Exception):
    def __init__(self, line: int, reason: str) -> None:
        one_line = " ".join(reason.split())
        self.fault = SkillFault(line=line, reason=one_line[:_REASON_CHARS])
        super().__init__(one_line)


def parse_skill(raw: bytes) -> SkillFile | SkillFault:
    """Return the skill that a file holds, or its first fault; never raises."""
    try:
        content = _decode(raw)
        front_matter = _front_matter(content)
        root, repairs = _compose(front_matter)
        fields = _fields(root)
        return SkillFile(
            name=_name(fields.get("name")),
            description=_description(fields.get("description")),
            content=content,
            repairs=tuple(repairs),
        )
    except _FaultError as error:
        return error.fault


def _decode(raw: bytes) -> str:
    if len(raw) > MAX_FILE_BYTES:
        raise _FaultError(0, f"the file has {len(raw):,} bytes; at most {MAX_FILE_BYTES:,} are allowed")
    try:
        content = raw.decode()
    except UnicodeDecodeError as error:
        raise _FaultError(_line_of(raw, error.start), f"the file is not UTF-8: {error.reason}") from error
    if "\0" in content:
        raise _FaultError(_line_of(raw, raw.index(b"\0")), "the file holds a NUL character")
    return content


def _line_of(raw: bytes, offset: int) -> int:
    return raw.count(b"\n", 0, offset) + 1


def _front_matter(content: str) -> str:
    """Return the text between the two fences; its first line is line 2 of the file."""
    lines = content.removeprefix("\ufeff").replace("\r\n", "\n").split("\n")
    if not _FENCE.fullmatch(lines[0]):
        raise _FaultError(1, "there is no front matter: the first line must be '---'")
    for number, line in enumerate(lines[1:], start=1):
        if _FENCE.fullmatch(line):
            text = "\n".join(lines[1:number])
            if len(text.encode()) > MAX_FRONT_MATTER_BYTES:
                raise _FaultError(1, f"the front matter has more than {MAX_FRONT_MATTER_BYTES:,} bytes")
            return text
    raise _FaultError(1, "the front matter is never closed: a second line '---' is missing")


def _compose(text: str) -> tuple[yaml.Node | None, list[SkillFault]]:
    """Compose YAML, putting quotes around prose that holds a colon where that makes it YAML."""
    lines = text.split("\n")
    repairs: list[SkillFault] = []
    first_error: yaml.YAMLError | None = None
    while len(repairs) <= _MAX_REPAIRS:
        candidate = "\n".join(lines)
        try:
            _check_bounds(candidate)
            return yaml.compose(candidate, Loader=yaml.SafeLoader), repairs
        except (ValueError, OverflowError) as error:
            # What PyYAML lets through for an escape beyond Unicode.
            raise _FaultError(0, f"the front matter is not YAML: {error}") from error
        except yaml.YAMLError as error:
            first_error = first_error or error
            index = _repair(lines, error)
        if index is None:
            break
        reason = "a value holds ': ' without quotes; it was read as plain text; put it in quotes"
        repairs.append(SkillFault(line=index + 2, reason=reason))
    raise _yaml_fault(first_error)


def _check_bounds(text: str) -> None:
    """Refuse nesting and aliases that cost more than a front matter is worth, before any node is made."""
    aliases = 0
    open_anchors: list[str | None] = []
    for count, event in enumerate(yaml.parse(text, Loader=yaml.SafeLoader)):
        if count > _MAX_EVENTS:
            raise _FaultError(_event_line(event), "the front matter holds too many values")
        if isinstance(event, yaml.CollectionStartEvent):
            open_anchors.append(event.anchor)
            if len(open_anchors) > _MAX_DEPTH:
                raise _FaultError(_event_line(event), f"the front matter is nested more than {_MAX_DEPTH} deep")
        elif isinstance(event, yaml.CollectionEndEvent):
            open_anchors.pop()
        elif isinstance(event, yaml.AliasEvent):
            aliases += 1
            if event.anchor in open_anchors:
                raise _FaultError(_event_line(event), f"alias *{event.anchor} contains itself")
            if aliases > _MAX_ALIASES:
                raise _FaultError(_event_line(event), f"the front matter holds more than {_MAX_ALIASES} aliases")


def _event_line(event: yaml.Event) -> int:
    return event.start_mark.line + 2 if event.start_mark else 0


def _repair(lines: list[str], error: yaml.YAMLError) -> int | None:
    """Quote the prose at which YAML stumbled; return the line's index, or None where the fault is another."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return None
    if error.problem != "mapping values are not allowed here":
        return None
    index = error.problem_mark.line
    # A YAML line break that is no "\n" would shift the count.
    match = _PROSE_LINE.fullmatch(lines[index]) if index < len(lines) else None
    if match is None or any(char in "\r\x85\u2028\u2029" for line in lines for char in line):
        return None
    quoted = match["prose"].rstrip().replace("'", "''")
    lines[index] = f"{match['key']}'{quoted}'"
    return index


def _yaml_fault(error: yaml.YAMLError | None) -> _FaultError:
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        return _FaultError(mark.line + 2 if mark else 0, f"the front matter is not YAML: {error.problem}")
    return _FaultError(0, f"the front matter is not YAML: {error}")


def _fields(root: yaml.Node | None) -> dict[str, yaml.Node]:
    if root is None:
        raise _FaultError(1, "the front matter is empty; it needs 'name' and 'description'")
    if not isinstance(root, yaml.MappingNode):
        raise _FaultError(2, "the front matter must hold 'key: value' lines")
    fields: dict[str, yaml.Node] = {}
    for key, value in root.value:
        if not isinstance(key, yaml.ScalarNode) or key.tag != _STRING_TAG:
            continue
        if key.value in fields and key.value in ("name", "description"):
            raise _FaultError(key.start_mark.line + 2, f"{key.value!r} is given twice")
        fields[key.value] = value
    return fields


def _text(field: str, node: yaml.Node | None) -> tuple[str, int]:
    """Return a field's stripped text and its line."""
    if node is None:
        raise _FaultError(1, f"{field!r} is missing")
    line = node.start_mark.line + 2
    if node.tag == _NULL_TAG:
        raise _FaultError(line, f"{field!r} is blank")
    if not isinstance(node, yaml.ScalarNode) or node.tag != _STRING_TAG:
        kind = str(node.tag).rpartition(":")[2]
        raise _FaultError(line, f"{field!r} must be text, not {kind}; put it in quotes")
    text = str(node.value).strip()
    if not text:
        raise _FaultError(line, f"{field!r} is blank")
    return text, line


def _name(node: yaml.Node | None) -> str:
    name, line = _text("name", node)
    if len(name) > MAX_NAME_CHARS:
        raise _FaultError(line, f"'name' has {len(name):,} characters; at most {MAX_NAME_CHARS} are allowed")
    if not _NAME.fullmatch(name):
        raise _FaultError(line, f"'name' may hold letters, digits, '-' and '_' only, got {name!a}")
    return name


def _description(node: yaml.Node | None) -> str:
    description, line = _text("description", node)
    if len(description) > MAX_DESCRIPTION_CHARS:
        message = f"'description' has {len(description):,} characters; at most {MAX_DESCRIPTION_CHARS:,} are allowed"
        raise _FaultError(line, message)
    # YAML's escapes can make what the file itself may not hold: "\0" and lone surrogates.
    if any(char < " " and char not in "\n\t" or "\ud800" <= char <= "\udfff" for char in description):
        raise _FaultError(line, "'description' holds a control character or half a character")
    return description
