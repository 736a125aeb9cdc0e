"""Session stores as processes over one PostgreSQL database, chosen by URL."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.postgres import PostgresServer, postgres_server
from tests.support.session_records import Author, items_of, new_session, text_input
from tests.support.store_service import StoreProcess, connected, store_process


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with postgres_server() as running:
        yield running


async def test_commit_of_a_killed_replica_is_answered_by_another(server: PostgresServer, tmp_path: Path) -> None:
    url = server.make_schema()
    async with (
        store_process(tmp_path / "a", "--store", url) as doomed,
        store_process(tmp_path / "b", "--store", url) as other,
        connected(doomed) as through_first,
        connected(other) as through_second,
    ):
        author = await new_session(through_first)
        request = author.request(text_input("i"))
        await through_first.commit(request)
        await doomed.end(signal.SIGKILL)
        # As a caller that the answer did not reach.
        again = await Author(through_second, "s").send(request)
        assert (again.duplicate, again.last_sequence) == (True, 1)
        assert [item.input.input_id for item in await items_of(through_second, "s")] == ["i"]


async def test_store_is_chosen_by_a_file_url(tmp_path: Path) -> None:
    url = f"sqlite://{tmp_path}/elsewhere/kept%20here.db"
    async with store_process(tmp_path / "state", "--store", url) as process, connected(process) as store:
        await new_session(store)
    assert (tmp_path / "elsewhere" / "kept here.db").exists()


@pytest.mark.parametrize("url", ["mysql://me:hush@somewhere/x", "postgresql://me:hush@127.0.0.1:1/x?connect_timeout=2"])
async def test_password_of_a_store_that_does_not_start_is_in_no_log(tmp_path: Path, url: str) -> None:
    process = StoreProcess(tmp_path / "state", "--store", url)
    with pytest.raises(AssertionError) as caught:
        await process.start()
    assert await process.process.wait() == 1
    assert "hush" not in str(caught.value)
    assert process.log()
    assert "hush" not in process.log()
