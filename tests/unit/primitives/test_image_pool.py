"""The image workers: real processes, how they end, and that each end costs the owner one request at most."""

from __future__ import annotations

import os
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from harness.errors import HarnessError
from harness.primitives.image_pool import ImagePool, view_image
from harness.primitives.images import ImageFacts, ImageRequest
from harness.primitives.primitives import Attachment, ComputeError, ComputeOutcome
from tests.support.eventually import eventually

HEADS = [b"", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF89a", b"II*\0"]


@pytest.fixture
def pool() -> Iterator[ImagePool]:
    pool = ImagePool(timeout_s=20)
    yield pool
    pool.close()


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    Image.effect_noise((40, 30), 50).convert("RGB").save(tmp_path / "a.png")
    return tmp_path


def request(workspace: Path, path: str = "a.png") -> ImageRequest:
    return ImageRequest(workspace=str(workspace), path=path)


def failure(pool: ImagePool, request: ImageRequest) -> str:
    with pytest.raises(HarnessError) as caught:
        pool.prepare(request)
    return caught.value.reason


def all_workers() -> list[int]:
    """Return the process IDs of this process's image workers, of those of other tests too."""
    found = []
    for name in os.listdir("/proc"):
        try:
            command = Path(f"/proc/{name}/cmdline").read_bytes()
            parent = Path(f"/proc/{name}/stat").read_text().rpartition(") ")[2].split()[1]
        except (OSError, IndexError):
            continue
        if b"harness.primitives.image_worker" in command and parent == str(os.getpid()):
            found.append(int(name))
    return found


@pytest.fixture
def workers() -> Callable[[], list[int]]:
    """Give a function that returns the process IDs of the image workers that this test started."""
    earlier = set(all_workers())
    return lambda: [pid for pid in all_workers() if pid not in earlier]


def test_an_image_comes_as_the_attachment_of_its_facts(workspace: Path) -> None:
    outcome = view_image(str(workspace), "a.png", 2000, 2000, 1_000_000)
    facts = ImageFacts(
        media_type="image/png",
        width=40,
        height=30,
        original_media_type="image/png",
        original_width=40,
        original_height=30,
    )
    content = (workspace / "a.png").read_bytes()
    assert outcome == ComputeOutcome(value=facts, attachments=(Attachment(data=content, media_type="image/png"),))


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("z.png", "FILE_EMPTY"),
        ("d.png", "FILE_IS_DIRECTORY"),
        ("f.png", "FILE_NOT_REGULAR"),
        ("zero.png", "FILE_OUTSIDE_WORKSPACE"),
        ("/dev/zero", "FILE_OUTSIDE_WORKSPACE"),
        ("missing.png", "FILE_NOT_FOUND"),
        ("a\nb.png", "FILE_NOT_FOUND"),
        ("svg.png", "IMAGE_UNSUPPORTED"),
        ("n" * 70_000, "PATH_INVALID"),
    ],
)
def test_what_is_no_image_fails_at_once_and_by_its_own_reason(workspace: Path, path: str, reason: str) -> None:
    (workspace / "z.png").touch()
    (workspace / "d.png").mkdir()
    os.mkfifo(workspace / "f.png")
    (workspace / "zero.png").symlink_to("/dev/zero")
    (workspace / "svg.png").write_text("<svg/>")
    with pytest.raises(ComputeError) as caught:
        view_image(str(workspace), path, 2000, 2000, 1_000_000)
    assert caught.value.reason == reason
    assert "\n" not in caught.value.message


def test_one_worker_answers_request_after_request(
    pool: ImagePool, workspace: Path, workers: Callable[[], list[int]]
) -> None:
    pool.prepare(request(workspace))
    (first,) = set(workers())
    failure(pool, request(workspace, "missing.png"))
    pool.prepare(request(workspace))
    assert workers() == [first]
    pool.close()
    assert workers() == []


def test_requests_at_once_share_the_workers(pool: ImagePool, workspace: Path, workers: Callable[[], list[int]]) -> None:
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(pool.prepare, [request(workspace)] * 12))
    assert len({answer.content for answer in answers}) == 1 and len(answers) == 12
    assert 1 <= len(workers()) <= 2


async def test_an_idle_worker_ends_by_itself_and_is_replaced(workspace: Path, workers: Callable[[], list[int]]) -> None:
    pool = ImagePool(idle_s=0.05)
    pool.prepare(request(workspace))
    (pid,) = workers()
    await eventually(lambda: "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text())
    assert pool.prepare(request(workspace)).facts.width == 40
    assert pid not in workers()
    pool.close()


def test_a_worker_that_was_killed_fails_one_request_only(
    pool: ImagePool, workspace: Path, workers: Callable[[], list[int]]
) -> None:
    pool.prepare(request(workspace))
    (pid,) = workers()
    os.kill(pid, signal.SIGKILL)
    assert failure(pool, request(workspace)) == "IMAGE_WORKER_CRASHED"
    assert pool.prepare(request(workspace)).facts.width == 40


def test_a_worker_that_hangs_is_ended_in_time(workspace: Path, workers: Callable[[], list[int]]) -> None:
    pool = ImagePool(timeout_s=1.0)
    pool.prepare(request(workspace))
    (pid,) = workers()
    os.kill(pid, signal.SIGSTOP)
    assert failure(pool, request(workspace)) == "IMAGE_TIMEOUT"
    assert workers() == []
    pool.close()


def test_whoever_finds_no_free_worker_is_told_so(workspace: Path, workers: Callable[[], list[int]]) -> None:
    pool = ImagePool(max_workers=1, timeout_s=1.0)
    pool.prepare(request(workspace))
    (pid,) = workers()
    os.kill(pid, signal.SIGSTOP)
    reasons: list[str] = []
    threads = [threading.Thread(target=lambda: reasons.append(failure(pool, request(workspace)))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert "IMAGE_TIMEOUT" in reasons and set(reasons) <= {"IMAGE_TIMEOUT", "IMAGE_WORKERS_BUSY"}
    pool.close()


def test_a_worker_holds_no_secret_of_its_owner(
    pool: ImagePool, workspace: Path, workers: Callable[[], list[int]]
) -> None:
    os.environ["SOME_API_KEY"] = "hush"
    try:
        pool.prepare(request(workspace))
    finally:
        del os.environ["SOME_API_KEY"]
    (pid,) = workers()
    assert b"hush" not in Path(f"/proc/{pid}/environ").read_bytes()
    limits = Path(f"/proc/{pid}/limits").read_text().splitlines()
    assert [line.split()[3] for line in limits if line.startswith("Max address space")] == [str(1024**3)]


def test_memory_that_runs_out_fails_one_request_only(
    pool: ImagePool, workspace: Path, workers: Callable[[], list[int]]
) -> None:
    Image.new("F", (5600, 5600)).save(workspace / "large.tif", compression="tiff_adobe_deflate")
    with_room = pool.prepare(request(workspace, "large.tif")).facts
    assert (with_room.original_width, with_room.width) == (5600, 2000)
    (pid,) = workers()
    resource.prlimit(pid, resource.RLIMIT_AS, (64 * 1024**2, 64 * 1024**2))
    assert failure(pool, request(workspace, "large.tif")) in {
        "IMAGE_TOO_MUCH_MEMORY",
        "IMAGE_DAMAGED",
        "IMAGE_WORKER_CRASHED",
    }
    assert pool.prepare(request(workspace)).facts.width == 40


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    content=st.binary(max_size=300),
    head=st.sampled_from([b"", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF89a", b"II*\0"]),
)
def test_random_files_never_harm_the_owner(pool: ImagePool, workspace: Path, content: bytes, head: bytes) -> None:
    (workspace / "fuzz.png").write_bytes(head + content)
    assert failure(pool, request(workspace, "fuzz.png")) in {
        "FILE_EMPTY",
        "IMAGE_DAMAGED",
        "IMAGE_UNSUPPORTED",
        "IMAGE_TOO_MANY_PIXELS",
    }
