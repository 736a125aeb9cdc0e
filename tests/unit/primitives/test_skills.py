"""Skills: what is found, what is wrong with the rest, and that neither hides the other."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from harness.primitives.confined_files import open_directory
from harness.primitives.primitives import ComputeError
from harness.primitives.skill_files import SkillFault, SkillFile, parse_skill
from harness.primitives.skills import SkillContent, SkillIndex, discover_skills, use_skill
from harness.primitives.workspace_inspection import inspect_workspace
from unreal_agent.operation.v1 import operation_pb2

GOOD = "---\nname: good\ndescription: A good skill.\n---\n# Good\n"


def write(workspace: Path, folder: str, content: str | bytes) -> None:
    path = workspace / ".harness" / "skills" / folder / "SKILL.md"
    path.parent.mkdir(parents=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)


def discover(workspace: Path) -> SkillIndex:
    with open_directory(str(workspace)) as root:
        return discover_skills(root)


def problems(workspace: Path) -> list[tuple[str, int, str, bool]]:
    return [
        (problem.path.removeprefix(".harness/skills/"), problem.line, problem.reason, problem.is_loaded)
        for problem in discover(workspace).problems
    ]


def front(*lines: str) -> str:
    return "\n".join(["---", *lines, "---", "text"])


def test_bad_files_are_listed_and_hide_nothing(tmp_path: Path) -> None:
    write(tmp_path, "good", GOOD)
    write(tmp_path, "colon", front("name: colon", "description: two axes: A and B"))
    write(tmp_path, "none", front("name: none"))
    write(tmp_path, "long", front("name: long", f"description: {'x' * 1100}"))
    write(tmp_path, "bare", "# Just text\n")
    write(tmp_path, "open", "---\nname: open\ndescription: x\n")
    write(tmp_path, "types", front("name: 123", "description: [x]"))
    write(tmp_path, "bomb", front("a: &a [*a,*a]"))
    index = discover(tmp_path)
    assert [(skill.name, skill.description, skill.path) for skill in index.skills] == [
        ("colon", "two axes: A and B", ".harness/skills/colon/SKILL.md"),
        ("good", "A good skill.", ".harness/skills/good/SKILL.md"),
    ]
    assert problems(tmp_path) == [
        ("bare/SKILL.md", 1, "there is no front matter: the first line must be '---'", False),
        ("bomb/SKILL.md", 2, "alias *a contains itself", False),
        (
            "colon/SKILL.md",
            3,
            "a value holds ': ' without quotes; it was read as plain text; put it in quotes",
            True,
        ),
        ("long/SKILL.md", 3, "'description' has 1,100 characters; at most 1,024 are allowed", False),
        ("none/SKILL.md", 1, "'description' is missing", False),
        ("open/SKILL.md", 1, "the front matter is never closed: a second line '---' is missing", False),
        ("types/SKILL.md", 2, "'name' must be text, not int; put it in quotes", False),
    ]


@pytest.mark.parametrize(
    ("content", "name", "description"),
    [
        (front("name: a", "description: b"), "a", "b"),
        (front("description: b", "name: a", "other: [1, {x: y}]"), "a", "b"),
        (front('name: "123"', "description: 'two: axes'"), "123", "two: axes"),
        (front("name: a", "description: >", "  folded", "  text"), "a", "folded text"),
        (front("name: a", "description: |", "  two", "  lines"), "a", "two\nlines"),
        (front("name: a", "description: b # a note: not part"), "a", "b"),
        (front("name: a", "description: größer 🙂"), "a", "größer 🙂"),
        ("\ufeff" + front("name: a", "description: b").replace("\n", "\r\n"), "a", "b"),
        (front("name: a", "description: &d b", "again: *d"), "a", "b"),
        (front("name: a", "description: b", "tag: !!python/object/apply:os.system [false]"), "a", "b"),
    ],
)
def test_front_matter_is_real_yaml(content: str, name: str, description: str) -> None:
    parsed = parse_skill(content.encode())
    assert parsed == SkillFile(name=name, description=description, content=content, repairs=())


@pytest.mark.parametrize(
    ("lines", "line", "words"),
    [
        (("name: a b", "description: x"), 2, "letters, digits"),
        (("name: ../a", "description: x"), 2, "letters, digits"),
        (("name: ünder", "description: x"), 2, "letters, digits"),
        ((f"name: {'a' * 65}", "description: x"), 2, "65 characters"),
        (("name: true", "description: x"), 2, "not bool"),
        (("name:", "description: x"), 2, "blank"),
        (("name: a", "description: '  '"), 3, "blank"),
        (("name: a", "description: {x: y}"), 3, "not map"),
        (("name: a", "description: !!binary eA=="), 3, "not binary"),
        (("name: a", "name: b", "description: x"), 3, "twice"),
        (("name: a", "description: x", "x: [1"), 4, "not YAML"),
        (("name: a", "\tdescription: x"), 3, "not YAML"),
        (("name: a", "description: two: axes", "  and more: prose"), 3, "not YAML"),
        (("name: a", "nested:", "  description: two: axes"), 4, "not YAML"),
        (("- name", "- description"), 2, "key: value"),
        (("just words",), 2, "key: value"),
        ((), 1, "empty"),
        (("name: a", 'description: "\\0"'), 3, "control character"),
        (("name: a", 'description: "\\ud800"'), 3, "half a character"),
        (("name: a", 'description: "\\U00110000"'), 0, "not YAML"),
        (("x: " + "[" * 30 + "]" * 30,), 2, "nested"),
        (("x: " + "[" * 60_000,), 2, "nested"),
        (("a: &a [x]", f"b: [{', '.join(['*a'] * 17)}]"), 3, "aliases"),
        (("x:", *["- y"] * 3000), 1999, "too many values"),
        (("x: " + "y" * 70_000,), 1, "65,536 bytes"),
    ],
)
def test_each_fault_names_its_line_and_reason(lines: tuple[str, ...], line: int, words: str) -> None:
    fault = parse_skill(front(*lines).encode())
    assert isinstance(fault, SkillFault)
    assert words in fault.reason
    assert fault.line == line


@pytest.mark.parametrize(
    ("raw", "line", "words"),
    [
        (b"", 1, "no front matter"),
        (b"\n" + GOOD.encode(), 1, "no front matter"),
        (b"---\nname: a\ndescription: \xff\n---\n", 3, "UTF-8"),
        (GOOD.encode() + b"\0", 6, "NUL"),
        (GOOD.encode() + b"x" * 300_000, 0, "262,144"),
    ],
)
def test_files_that_are_no_text_are_refused(raw: bytes, line: int, words: str) -> None:
    fault = parse_skill(raw)
    assert isinstance(fault, SkillFault)
    assert (fault.line, words in fault.reason) == (line, True)


@given(st.one_of(st.binary(max_size=200), st.text(alphabet="ab:- \n'\"[]{}&*!|>#%@`,?\\0123\t\r\x85", max_size=80)))
@example("description: a: b\r: c")
@example("? [a: b]: c")
def test_no_content_crashes_the_parser(body: bytes | str) -> None:
    raw = body.encode() if isinstance(body, str) else body
    for content in (raw, b"---\n" + raw + b"\n---\n", b"---\nname: a\ndescription: " + raw + b"\n---\n"):
        parsed = parse_skill(content)
        if isinstance(parsed, SkillFile):
            operation_pb2.Skill(name=parsed.name, description=parsed.description, path=parsed.content)
        else:
            assert "\n" not in operation_pb2.SkillProblem(line=parsed.line, reason=parsed.reason).reason


def test_the_first_of_two_skills_with_one_name_wins(tmp_path: Path) -> None:
    write(tmp_path, "b", front("name: twin", "description: second"))
    write(tmp_path, "a", front("name: twin", "description: first"))
    assert [skill.description for skill in discover(tmp_path).skills] == ["first"]
    assert problems(tmp_path) == [("b/SKILL.md", 1, "the name 'twin' is taken by .harness/skills/a/SKILL.md", False)]


def test_links_are_followed_inside_and_refused_outside(tmp_path: Path) -> None:
    workspace = tmp_path / "ws"
    write(workspace, "good", GOOD)
    write(tmp_path, "secret", GOOD)
    skills = workspace / ".harness" / "skills"
    (workspace / "shared").mkdir()
    (workspace / "shared" / "SKILL.md").write_text(front("name: shared", "description: x"))
    (skills / "inside").symlink_to("../../shared")
    (skills / "outside").symlink_to(tmp_path / ".harness" / "skills" / "secret")
    (skills / "dangling").mkdir()
    (skills / "dangling" / "SKILL.md").symlink_to("nowhere")
    os.mkfifo(skills / "fifo")
    (skills / "pipe").mkdir()
    os.mkfifo(skills / "pipe" / "SKILL.md")
    (skills / "README.md").write_text("no skill")
    (skills / "empty").mkdir()
    assert [skill.name for skill in discover(workspace).skills] == ["good", "shared"]
    assert [(path, reason.rpartition("; ")[0] or reason) for path, _, reason, _ in problems(workspace)] == [
        ("dangling/SKILL.md", "the file is a link to something that does not exist"),
        ("outside/SKILL.md", "'.harness/skills/outside/SKILL.md' lies outside the workspace"),
        ("pipe/SKILL.md", "'.harness/skills/pipe/SKILL.md' is a FIFO, not a regular file"),
    ]


def test_a_skills_directory_outside_the_workspace_is_a_problem(tmp_path: Path) -> None:
    write(tmp_path, "secret", GOOD)
    workspace = tmp_path / "ws"
    workspace.mkdir()
    (workspace / ".harness").symlink_to(tmp_path / ".harness")
    index = discover(workspace)
    assert list(index.skills) == []
    assert [(problem.path, "outside" in problem.reason) for problem in index.problems] == [(".harness/skills", True)]


def test_a_workspace_without_skills_has_no_problem(tmp_path: Path) -> None:
    assert discover(tmp_path) == SkillIndex(skills=[], problems=[])


def test_a_folder_whose_name_is_no_text_is_listed(tmp_path: Path) -> None:
    write(tmp_path, "good", GOOD)
    os.makedirs(os.fsencode(tmp_path) + b"/.harness/skills/\xff")
    assert [skill.name for skill in discover(tmp_path).skills] == ["good"]
    assert problems(tmp_path) == [("\ufffd/SKILL.md", 0, "the folder's name is not UTF-8", False)]


def test_the_number_of_folders_is_bounded(tmp_path: Path) -> None:
    for number in range(258):
        (tmp_path / ".harness" / "skills" / f"{number:03}").mkdir(parents=True)
    assert problems(tmp_path) == [(".harness/skills", 0, "there are 258 entries; only the first 256 were read", True)]


def test_a_skill_is_used_as_the_file_is_now(tmp_path: Path) -> None:
    write(tmp_path, "folder", GOOD)
    outcome = use_skill(str(tmp_path), "good")
    assert outcome.value == SkillContent(path=".harness/skills/folder/SKILL.md", content=GOOD)


def test_an_unknown_skill_is_answered_with_those_that_exist(tmp_path: Path) -> None:
    write(tmp_path, "a", front("name: zeta", "description: x"))
    write(tmp_path, "b", GOOD)
    write(tmp_path, "c", "no skill")
    with pytest.raises(ComputeError) as caught:
        use_skill(str(tmp_path), "gone")
    assert caught.value.reason == "SKILL_NOT_FOUND"
    assert caught.value.message == (
        "no skill is named 'gone'; there are: good, zeta; 1 could not be loaded, the first is "
        ".harness/skills/c/SKILL.md (line 1): there is no front matter: the first line must be '---'"
    )


def test_an_inspection_says_what_is_true_of_the_workspace(tmp_path: Path) -> None:
    write(tmp_path / "real", "folder", GOOD)
    (tmp_path / "link").symlink_to("real")
    state = inspect_workspace(str(tmp_path / "link")).value
    assert isinstance(state, operation_pb2.InspectWorkspaceState)
    assert state.workspace == str(tmp_path / "real")
    assert (state.exists, state.is_writable, list(state.problems)) == (True, True, [])
    assert [skill.name for skill in state.skills] == ["good"]
    assert Path(state.shell).name == "bash" and state.platform.startswith("linux/")


def test_a_missing_workspace_is_a_finding(tmp_path: Path) -> None:
    state = inspect_workspace(str(tmp_path / "gone")).value
    assert isinstance(state, operation_pb2.InspectWorkspaceState)
    assert (state.exists, state.is_writable, len(state.problems)) == (False, False, 1)
    assert "not a directory" in state.problems[0].reason
