"""The bound on what runs at once, and its fairness."""

from __future__ import annotations

from harness.operations.start_queue import StartQueue


def drain(queue: StartQueue) -> list[str]:
    taken = []
    while (operation_id := queue.take()) is not None:
        taken.append(operation_id)
    return taken


def test_sessions_take_turns_and_keep_their_own_order() -> None:
    queue = StartQueue(100)
    for number in range(3):
        queue.put("a", f"a{number}")
    queue.put("b", "b0")
    queue.put("c", "c0")
    assert drain(queue) == ["a0", "b0", "c0", "a1", "a2"]


def test_no_more_than_the_slots_hold_and_a_release_lets_the_next_in() -> None:
    queue = StartQueue(2)
    for number in range(4):
        queue.put("a", f"a{number}")
    assert drain(queue) == ["a0", "a1"]
    assert (queue.holders, queue.waiting) == (2, 2)
    queue.release("a0")
    queue.release("a0")
    assert drain(queue) == ["a2"]


def test_what_ran_before_a_restart_may_exceed_the_bound() -> None:
    queue = StartQueue(1)
    queue.hold("old-1")
    queue.hold("old-2")
    queue.put("a", "a0")
    queue.release("old-1")
    assert drain(queue) == []
    queue.release("old-2")
    assert drain(queue) == ["a0"]
