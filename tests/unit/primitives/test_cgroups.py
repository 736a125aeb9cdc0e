"""Where control groups are found, over trees of files as the kernel lays them out, and what is written there."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.primitives.cgroups import Cgroups, describe, find_cgroups


def process(tmp_path: Path, groups: str, mounts: str) -> Path:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "cgroup").write_text(groups)
    (tmp_path / "proc" / "mountinfo").write_text(mounts)
    return tmp_path / "proc"


def group(path: Path, handed: str, offered: str = "cpu memory pids") -> Path:
    path.mkdir(parents=True, exist_ok=True)
    for name, text in (("subtree_control", handed), ("controllers", offered), ("procs", "")):
        (path / f"cgroup.{name}").write_text(text)
    return path


@pytest.mark.parametrize("handed", ["memory pids", ""])
def test_version_2_is_used_where_it_hands_down_memory_and_pids(tmp_path: Path, handed: str) -> None:
    top = tmp_path / "cgroup"
    group(top / "service" / "manager", "", "")  # holds the manager's process, and so hands nothing down
    service = group(top / "service", handed)
    mounts = f"30 1 0:26 / {top} rw - cgroup2 cgroup2 rw\n"
    found = find_cgroups(process(tmp_path, "0::/service/manager\n", mounts))
    assert found == Cgroups(memory=service, pids=service, version=2)
    assert (service / "cgroup.subtree_control").read_text() == (handed or "+memory +pids")
    assert describe(found) == {"memory": "cgroup v2", "pids": "cgroup v2"}


def test_version_1_is_used_by_controller_also_below_a_containers_root(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    (pids / "mine").mkdir(parents=True)
    mounts = f"30 1 0:26 /docker/abc {pids} rw - cgroup cgroup rw,pids\n"
    found = find_cgroups(process(tmp_path, "8:pids:/docker/abc/mine\n4:memory:/docker/abc\n", mounts))
    assert found == Cgroups(pids=pids / "mine", version=1)
    assert describe(found) == {"memory": "", "pids": "cgroup v1"}


def test_without_control_groups_there_are_none(tmp_path: Path) -> None:
    assert find_cgroups(tmp_path / "missing") == Cgroups()


def test_a_command_gets_one_group_with_its_limits_that_goes_with_it(tmp_path: Path) -> None:
    parent = group(tmp_path / "service", "memory pids")
    groups = Cgroups(memory=parent, pids=parent)
    joined = groups.make("/state/operations/o1/1", max_memory_bytes=1 << 20, max_processes=7)
    (own,) = {Path(file).parent for file in joined}
    assert {path.name: path.read_text() for path in own.iterdir()} == {
        "memory.max": str(1 << 20),
        "memory.swap.max": "0",
        "pids.max": "7",
    }
    assert not groups.remove("/state/operations/o1/1")  # something is in it
    for path in own.iterdir():
        path.unlink()
    assert groups.remove("/state/operations/o1/1")
    assert not own.exists()
    assert groups.remove("/state/operations/o1/1")
