"""Confinement is decided by what was opened: links, "..", absolute paths, swaps, and things that are no files."""

from __future__ import annotations

import os
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.errors import HarnessError
from harness.primitives.confined_files import list_directory, open_directory, open_file, read_file

LIMIT = 1024


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Make a workspace `ws` with files and links beside a secret and a directory with the same prefix."""
    workspace = tmp_path / "ws"
    (workspace / "sub").mkdir(parents=True)
    (workspace / "sub" / "inner.png").write_bytes(b"inner")
    (workspace / "plain.png").write_bytes(b"plain")
    (tmp_path / "secret.png").write_bytes(b"secret")
    (tmp_path / "ws2").mkdir()
    (tmp_path / "ws2" / "x.png").write_bytes(b"other")
    (workspace / "a.png").symlink_to(tmp_path / "secret.png")
    (workspace / "d").symlink_to(tmp_path)
    (workspace / "up.png").symlink_to("../secret.png")
    (workspace / "near.png").symlink_to("sub/inner.png")
    (workspace / "far.png").symlink_to(workspace / "sub" / "inner.png")
    (workspace / "folder").symlink_to("sub")
    return tmp_path


def read(workspace: Path, path: str) -> bytes:
    with open_directory(str(workspace)) as root:
        return read_file(root, path, max_bytes=LIMIT)


def reason(workspace: Path, path: str) -> str:
    with pytest.raises(HarnessError) as caught:
        read(workspace, path)
    return caught.value.reason


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("plain.png", b"plain"),
        ("./sub/../plain.png", b"plain"),
        ("../ws/plain.png", b"plain"),
        ("near.png", b"inner"),
        ("far.png", b"inner"),
        ("folder/inner.png", b"inner"),
        ("d/ws/plain.png", b"plain"),
    ],
)
def test_what_lies_inside_is_read(place: Path, path: str, content: bytes) -> None:
    assert read(place / "ws", path) == content


@pytest.mark.parametrize(
    "path",
    [
        "a.png",
        "up.png",
        "d/secret.png",
        "d/missing.png",
        "d",
        "../secret.png",
        "../missing.png",
        "../ws2/x.png",
        "/etc/hostname",
        "/missing/file",
        "/dev/zero",
        "/proc/self/environ",
    ],
)
def test_what_lies_outside_is_refused(place: Path, path: str) -> None:
    assert reason(place / "ws", path) == "FILE_OUTSIDE_WORKSPACE"


def test_absolute_paths_are_judged_by_the_directory_and_not_by_the_prefix(place: Path) -> None:
    assert read(place / "ws", str(place / "ws" / "plain.png")) == b"plain"
    assert reason(place / "ws", str(place / "ws2" / "x.png")) == "FILE_OUTSIDE_WORKSPACE"
    assert reason(place / "ws", str(place / "secret.png")) == "FILE_OUTSIDE_WORKSPACE"


def test_a_root_that_is_itself_a_link_works(place: Path) -> None:
    (place / "link").symlink_to("ws")
    assert read(place / "link", "plain.png") == b"plain"
    assert read(place / "link", str(place / "link" / "sub" / "inner.png")) == b"inner"
    assert read(place / "link", str(place / "ws" / "sub" / "inner.png")) == b"inner"
    assert reason(place / "link", "a.png") == "FILE_OUTSIDE_WORKSPACE"


def test_the_whole_file_system_can_be_a_root(place: Path) -> None:
    assert read(Path("/"), str(place / "secret.png")) == b"secret"
    assert read(Path("/"), str(place / "secret.png").lstrip("/")) == b"secret"


def test_an_opened_file_says_where_it_really_lies(place: Path) -> None:
    with open_directory(str(place / "ws")) as root, open_file(root, "folder/inner.png") as file:
        assert (file.path, file.size_bytes) == ("sub/inner.png", 5)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("missing.png", "FILE_NOT_FOUND"),
        ("line\nbreak.png", "FILE_NOT_FOUND"),
        ("plain.png/below", "FILE_NOT_FOUND"),
        ("dangling.png", "FILE_NOT_FOUND"),
        ("empty.png", "FILE_EMPTY"),
        ("sub", "FILE_IS_DIRECTORY"),
        (".", "FILE_IS_DIRECTORY"),
        ("pipe.png", "FILE_NOT_REGULAR"),
        ("socket.png", "FILE_NOT_REGULAR"),
        ("loop.png", "FILE_LINK_LOOP"),
        ("big.png", "FILE_TOO_LARGE"),
        ("", "PATH_INVALID"),
        ("nul\0.png", "PATH_INVALID"),
        ("half\ud800.png", "PATH_INVALID"),
        ("n" * 300, "PATH_INVALID"),
        ("n/" * 3000, "PATH_INVALID"),
    ],
)
def test_each_thing_that_is_no_readable_file_has_its_own_error(place: Path, path: str, expected: str) -> None:
    workspace = place / "ws"
    (workspace / "empty.png").touch()
    (workspace / "dangling.png").symlink_to("nowhere")
    (workspace / "loop.png").symlink_to("loop.png")
    (workspace / "big.png").write_bytes(b"x" * (LIMIT + 1))
    # Nobody ever opens the other end: an ordinary open would wait for ever.
    os.mkfifo(workspace / "pipe.png")
    with socket.socket(socket.AF_UNIX) as listener, open_directory(str(workspace)) as root:
        # The name of a socket is short, so it is bound by way of the descriptor.
        listener.bind(f"/proc/self/fd/{root}/socket.png")
        assert reason(workspace, path) == expected


def test_a_name_with_a_line_break_is_a_name(place: Path) -> None:
    (place / "ws" / "line\nbreak.png").write_bytes(b"odd")
    assert read(place / "ws", "line\nbreak.png") == b"odd"


@pytest.fixture
def unprivileged() -> Iterator[Path]:
    """Give a directory that a user without rights can enter, and become one: root may read everything."""
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        was_root = os.geteuid() == 0
        yield Path(directory)
        if was_root:
            os.seteuid(0)


def test_a_file_without_read_permission_is_called_so(unprivileged: Path) -> None:
    (unprivileged / "shut.png").write_bytes(b"x")
    (unprivileged / "shut.png").chmod(0)
    (unprivileged / "shut").mkdir(mode=0)
    if os.geteuid() == 0:
        os.seteuid(65534)
    assert reason(unprivileged, "shut.png") == "FILE_NOT_PERMITTED"
    assert reason(unprivileged, "shut/inner.png") == "FILE_NOT_PERMITTED"
    assert reason(unprivileged / "shut", "inner.png") in ("WORKSPACE_NOT_PERMITTED", "FILE_NOT_PERMITTED")


def test_a_file_that_grows_is_not_read_by_half(place: Path) -> None:
    path = place / "ws" / "growing.png"
    path.write_bytes(b"x" * 100)
    with open_directory(str(place / "ws")) as root, open_file(root, "growing.png") as file:
        assert file.size_bytes == 100
    stop = threading.Event()

    def grow() -> None:
        while not stop.is_set():
            with path.open("r+b") as handle:
                handle.truncate(100)
            with path.open("ab") as handle:
                handle.write(b"y" * 50)

    writer = threading.Thread(target=grow)
    writer.start()
    try:
        outcomes = set()
        for _ in range(3000):
            try:
                content = read(place / "ws", "growing.png")
            except HarnessError as error:
                outcomes.add(error.reason)
            else:
                assert len(content) in (100, 150)
    finally:
        stop.set()
        writer.join()
    assert outcomes <= {"FILE_CHANGED"}


def test_a_file_swapped_for_a_link_never_lets_anything_out(place: Path) -> None:
    workspace = place / "ws"
    (workspace / "own.png").write_bytes(b"plain")
    stop = threading.Event()

    def swap() -> None:
        while not stop.is_set():
            for source in ("own.png", "a.png"):
                temporary = workspace / "swap.tmp"
                if source == "a.png":
                    temporary.symlink_to(place / "secret.png")
                else:
                    os.link(workspace / "own.png", temporary)
                temporary.rename(workspace / "victim.png")
                temporary.unlink(missing_ok=True)

    writer = threading.Thread(target=swap)
    writer.start()
    seen: set[bytes | str] = set()
    try:
        for _ in range(3000):
            try:
                seen.add(read(workspace, "victim.png"))
            except HarnessError as error:
                seen.add(error.reason)
    finally:
        stop.set()
        writer.join()
    assert b"secret" not in seen
    assert seen <= {b"plain", "FILE_OUTSIDE_WORKSPACE", "FILE_NOT_FOUND", "FILE_CHANGED"}


@pytest.mark.parametrize("path", ["missing", "plain.png"])
def test_a_root_must_be_a_directory(place: Path, path: str) -> None:
    assert reason(place / "ws" / path, "x") == "WORKSPACE_NOT_FOUND"


def test_directories_are_listed_inside_only(place: Path) -> None:
    with open_directory(str(place / "ws")) as root:
        assert list_directory(root, "folder") == ["inner.png"]
        for path, expected in (("d", "FILE_OUTSIDE_WORKSPACE"), ("plain.png", "FILE_NOT_DIRECTORY")):
            with pytest.raises(HarnessError) as caught:
                list_directory(root, path)
            assert caught.value.reason == expected


def test_no_descriptor_is_left_open(place: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for path in ("plain.png", "a.png", "missing.png", "sub", "", "d/missing.png"):
        try:
            read(place / "ws", path)
        except HarnessError:
            continue
    assert len(os.listdir("/proc/self/fd")) == before
