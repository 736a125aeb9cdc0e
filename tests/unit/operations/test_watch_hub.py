"""Watchers remember which operations changed, never states."""

from __future__ import annotations

from harness.operations.watch_hub import Watcher, WatchHub


def drain(watcher: Watcher) -> list[str]:
    sent = []
    while (operation_id := watcher.pop()) is not None:
        sent.append(operation_id)
    return sent


def test_operation_that_changes_again_moves_behind_the_others() -> None:
    watcher = Watcher("")
    for operation_id in ("a", "b", "a", "c", "a"):
        watcher.mark(operation_id)
    assert drain(watcher) == ["b", "c", "a"]


def test_watcher_sees_its_owner_or_all_and_what_it_missed() -> None:
    hub = WatchHub()
    with hub.watch("one", ["missed"]) as one, hub.watch("", []) as everything:
        hub.publish("x", "one")
        hub.publish("y", "two")
        assert drain(one) == ["missed", "x"]
        assert drain(everything) == ["x", "y"]
        assert hub.watchers == 2
    assert hub.watchers == 0


async def test_silence_ends_a_wait_and_a_mark_before_it_too() -> None:
    watcher = Watcher("")
    assert not await watcher.wait(0.01)
    watcher.mark("a")
    assert await watcher.wait(10)
