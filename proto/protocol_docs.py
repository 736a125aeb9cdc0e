"""Writes docs/protocol.md from the comments of the schemas, which are the specification.

`make docs` runs it as a program; a test compares what it makes with what is committed. Errors, idempotency and what a
caller that goes away leaves behind are found in the comments by their words (see `Remarks`), so that they stand at the
same place of every call.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    MethodDescriptorProto,
    ServiceDescriptorProto,
)

ROOT = Path(__file__).resolve().parent
PAGE = ROOT.parent / "docs" / "protocol.md"

HEAD = """\
# Protocol

Made from the comments of the schemas by `make docs`; change those, not this page. What crosses a wire here is also what
lies on the disk. Services answer health (`grpc.health.v1`) and reflection, so that `buf curl` and any client without
generated code can talk to them; `clients/node` is one that loads the schemas only.

An error is a `google.rpc.Status` with an `ErrorInfo` (domain `unreal-agent`), written here as CODE/REASON: programs
branch on these two, never on text. An `INVALID_ARGUMENT` names the field in a `BadRequest`; a `RetryInfo` is there
where waiting helps. Requests that change something are refused with `INVALID_ARGUMENT/UNKNOWN_FIELDS` where they hold a
field or an enum value that the server does not know, or leave a choice open; answers and events may hold such things,
and a client passes over them.
"""

CODES = (
    *("INVALID_ARGUMENT", "NOT_FOUND", "ALREADY_EXISTS", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE"),
    *("RESOURCE_EXHAUSTED", "UNAUTHENTICATED", "PERMISSION_DENIED", "UNAVAILABLE", "DEADLINE_EXCEEDED", "DATA_LOSS"),
)
_CODE = rf"\b(?:{'|'.join(CODES)})\b"
# A sentence ends before a capital; errors of one sentence are told apart by semicolons before a code.
_SENTENCE_END = re.compile(rf"(?<=[.:])\s+(?=[A-Z])|;\s+(?={_CODE})")
_ANY_CALL = "Any call:"  # begins the list of errors in a service's comment
_SCALARS = {
    number: name.removeprefix("TYPE_").lower()
    for name, number in FieldDescriptorProto.Type.items()
    if name not in ("TYPE_MESSAGE", "TYPE_ENUM", "TYPE_GROUP")
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Remarks:
    """A comment, taken apart by sentences."""

    description: str
    idempotency: str
    """What says "Idempotent" or "Resumable"."""
    cancellation: str
    """What says who "goes away", or what cancelling a call does."""
    errors: tuple[str, ...]
    """What names a status code."""


@dataclass(frozen=True, slots=True)
class Schema:
    """One file, with its comments by path."""

    file: FileDescriptorProto
    comments: dict[tuple[int, ...], str]

    def comment(self, *path: int) -> str:
        return self.comments.get(path, "")

    @property
    def title(self) -> str:
        """The package, as links within the page name it."""
        return self.file.package.removeprefix("unreal_agent.")

    @property
    def heading(self) -> str:
        return self.file.name.removeprefix("unreal_agent/")


def protocol_page() -> str:
    """Return the page.

    Raises:
        SystemExit: protoc refused a schema; it has told why on stderr.
    """
    schemas = _read_schemas()
    services = [schema for schema in schemas if schema.file.service]
    sections = [HEAD, _contents(schemas)]
    for schema in services:
        sections += ["".join(_service(schema, index)) for index in range(len(schema.file.service))]
    sections.append("## Messages\n")
    sections += ["".join(_messages(schema)) for schema in schemas]
    return "\n".join(sections)


def _read_schemas() -> list[Schema]:
    """Compile the schemas, those of services first, as a reader wants them."""
    # Imported late: whoever only imports this module needs no compiler.
    from grpc_tools import protoc

    names = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "unreal_agent").rglob("*.proto"))
    with TemporaryDirectory(prefix="protocol-docs-") as scratch:
        built = Path(scratch) / "schemas.binpb"
        includes = [f"-I{ROOT}", f"-I{files('grpc_tools') / '_proto'}"]
        if protoc.main(["protoc", *includes, f"--descriptor_set_out={built}", "--include_source_info", *names]):
            raise SystemExit("protoc failed; its message is above")
        compiled = FileDescriptorSet.FromString(built.read_bytes())
    schemas = [
        Schema(
            file,
            {
                tuple(location.path): " ".join(location.leading_comments.split())
                for location in file.source_code_info.location
                if location.leading_comments
            },
        )
        for file in compiled.file
    ]
    order = ("coordinator", "sessionstore", "operationmanager", "gateway")
    ranks = {f"unreal_agent.{name}.v1": rank for rank, name in enumerate(order)}
    return sorted(schemas, key=lambda schema: (ranks.get(schema.file.package, len(order)), schema.file.package))


def take_apart(comment: str) -> Remarks:
    """Sort the sentences of a comment."""
    description: list[str] = []
    idempotency: list[str] = []
    cancellation: list[str] = []
    errors: list[str] = []
    for sentence in _sentences(comment):
        if sentence == _ANY_CALL:
            continue
        if re.search(_CODE, sentence):
            errors.append(sentence.rstrip("."))
        elif re.search(r"\b(Idempotent|Resumable)\b", sentence):
            idempotency.append(sentence)
        elif re.search(r"goes away|Cancelling a call", sentence):
            cancellation.append(sentence)
        else:
            description.append(sentence)
    return Remarks(
        description=" ".join(description),
        idempotency=" ".join(idempotency),
        cancellation=" ".join(cancellation),
        errors=tuple(errors),
    )


def _sentences(comment: str) -> Iterator[str]:
    """Split a comment; an explanation that follows a code and a colon stays with it."""
    begin = 0
    for end in _SENTENCE_END.finditer(comment):
        piece = comment[begin : end.start()]
        if piece.endswith(":") and piece != _ANY_CALL:
            continue
        yield piece
        begin = end.end()
    if comment[begin:]:
        yield comment[begin:]


def _contents(schemas: Iterable[Schema]) -> str:
    services = (service.name for schema in schemas for service in schema.file.service)
    lines = [f"* [{name}](#{name.lower()})\n" for name in services]
    lines.append("* [Messages](#messages)")
    titles = (f"[{schema.heading}](#{_anchor(schema.heading)})" for schema in schemas)
    return "".join(lines) + ": " + ", ".join(titles) + "\n"


def _anchor(heading: str) -> str:
    """Return the anchor that Markdown viewers make of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _service(schema: Schema, index: int) -> Iterator[str]:
    service: ServiceDescriptorProto = schema.file.service[index]
    remarks = take_apart(schema.comment(6, index))
    yield f"## {service.name}\n\n`{schema.file.package}.{service.name}`. {_text(remarks.description)}\n"
    if remarks.cancellation:
        yield f"\n**Cancellation.** {_text(remarks.cancellation)}\n"
    if remarks.errors:
        yield "\n**Errors of any call**\n\n"
        yield from (f"* {_text(_capitalised(error))}\n" for error in remarks.errors)
    for position, method in enumerate(service.method):
        yield from _method(schema, method, take_apart(schema.comment(6, index, 2, position)))


def _method(schema: Schema, method: MethodDescriptorProto, remarks: Remarks) -> Iterator[str]:
    request, response = _type(schema, method.input_type), _type(schema, method.output_type)
    shape = f"{'stream of ' if method.client_streaming else ''}{request} → "
    shape += f"{'stream of ' if method.server_streaming else ''}{response}"
    yield f"\n### {method.name}\n\n{shape}\n\n{_text(remarks.description)}\n\n"
    yield f"* Delivery: {_delivery(method, remarks)}\n"
    if remarks.cancellation:
        yield f"* Cancellation: {_text(remarks.cancellation)}\n"
    if remarks.errors:
        yield "* Errors:\n"
        yield from (f"  * {_text(error)}\n" for error in remarks.errors)


def _delivery(method: MethodDescriptorProto, remarks: Remarks) -> str:
    kinds = {
        (False, False): "one request, one answer.",
        (False, True): "one request, a stream of answers; closing the call ends it.",
        (True, False): "a stream of requests, one answer after its end.",
        (True, True): "streams both ways.",
    }
    kind = kinds[method.client_streaming, method.server_streaming]
    return f"{kind} {_text(remarks.idempotency)}".rstrip()


def _messages(schema: Schema) -> Iterator[str]:
    yield f"### {schema.heading}\n\n{_text(schema.comment(12))}\n"
    for index, message in enumerate(schema.file.message_type):
        yield from _message(schema, message, (4, index), "")
    for index, enum in enumerate(schema.file.enum_type):
        yield from _enum(schema, enum, (5, index), "")


def _message(schema: Schema, message: DescriptorProto, path: tuple[int, ...], outer: str) -> Iterator[str]:
    if message.options.map_entry:
        return
    name = f"{outer}{message.name}"
    yield f'\n<a id="{schema.title}.{name}"></a>\n**{name}** — {_text(schema.comment(*path))}\n\n'
    if message.field:
        yield "| # | field | type | meaning |\n|---|---|---|---|\n"
    for index, field in enumerate(message.field):
        meaning = _text(schema.comment(*path, 2, index))
        if field.HasField("oneof_index") and not field.proto3_optional:
            choice = message.oneof_decl[field.oneof_index].name
            meaning = f"*one of* `{choice}`: {meaning}"
        yield f"| {field.number} | `{field.name}` | {_field_type(schema, message, field)} | {meaning} |\n"
    choices = [
        (oneof.name, schema.comment(*path, 8, index))
        for index, oneof in enumerate(message.oneof_decl)
        if schema.comment(*path, 8, index)
    ]
    if choices:
        yield "\n" + " ".join(f"`{choice}`: {_text(comment)}" for choice, comment in choices) + "\n"
    for index, enum in enumerate(message.enum_type):
        yield from _enum(schema, enum, (*path, 4, index), f"{name}.")
    for index, nested in enumerate(message.nested_type):
        yield from _message(schema, nested, (*path, 3, index), f"{name}.")


def _enum(schema: Schema, enum: EnumDescriptorProto, path: tuple[int, ...], outer: str) -> Iterator[str]:
    name = f"{outer}{enum.name}"
    yield f'\n<a id="{schema.title}.{name}"></a>\n**{name}** (enum) — {_text(schema.comment(*path))}\n\n'
    yield "| # | value | meaning |\n|---|---|---|\n"
    for index, value in enumerate(enum.value):
        yield f"| {value.number} | `{value.name}` | {_text(schema.comment(*path, 2, index))} |\n"


def _field_type(schema: Schema, message: DescriptorProto, field: FieldDescriptorProto) -> str:
    entry = next((nested for nested in message.nested_type if field.type_name.endswith(f".{nested.name}")), None)
    if entry is not None and entry.options.map_entry:
        key, value = (_field_type(schema, entry, part) for part in entry.field)
        return f"map of {key} to {value}"
    name = _SCALARS.get(field.type) or _type(schema, field.type_name)
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"repeated {name}"
    return f"optional {name}" if field.proto3_optional else name


def _type(schema: Schema, full_name: str) -> str:
    """Return a type's name with a link to it, short within its own package."""
    name = full_name.removeprefix(".")
    if not name.startswith("unreal_agent."):
        return f"`{name}`"
    target = name.removeprefix("unreal_agent.")
    return f"[{target.removeprefix(f'{schema.title}.')}](#{target})"


def _capitalised(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]


def _text(comment: str) -> str:
    """Return a comment as Markdown: codes and reasons set as code, table bars kept out of the way."""
    escaped = comment.replace("|", "\\|").replace("<", "&lt;").replace("->", "→")
    return re.sub(rf"(?<!`)({_CODE}(?:/[A-Z_]+)?)", r"`\1`", escaped)


if __name__ == "__main__":
    PAGE.write_text(protocol_page())
