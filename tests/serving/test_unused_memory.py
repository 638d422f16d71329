"""What memory is left: by the host, and by every control group on the way to the process, of either version."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from serving.unused_memory import unused_memory

AVAILABLE = 1024 * 1000  # bytes that the made-up host has


def system(root: Path, groups: str, files: Mapping[str, str]) -> Path:
    """A root with these control groups; `files` lie below /sys/fs/cgroup."""
    below = {"proc/meminfo": "MemTotal: 2000 kB\nMemAvailable:    1000 kB\n", "proc/self/cgroup": groups}
    for name, content in (below | {f"sys/fs/cgroup/{name}": content for name, content in files.items()}).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


def second(folder: str, limit: str, used: int, dropped: int) -> dict[str, str]:
    stat = f"anon 1\ninactive_file {dropped}\nactive_file 7\n"
    return {f"{folder}memory.max": limit, f"{folder}memory.current": f"{used}\n", f"{folder}memory.stat": stat}


def first(folder: str, limit: str, used: int, dropped: int) -> dict[str, str]:
    names = (f"memory/{folder}memory.limit_in_bytes", f"memory/{folder}memory.usage_in_bytes")
    stat = f"inactive_file 3\ntotal_inactive_file {dropped}\n"
    return {names[0]: limit, names[1]: f"{used}\n", f"memory/{folder}memory.stat": stat}


@pytest.mark.parametrize(
    ("groups", "files", "left"),
    [
        ("0::/\n", {}, AVAILABLE),
        ("0::/a/b\n", second("a/b/", "max\n", 5, 5) | second("a/", "max\n", 5, 5), AVAILABLE),
        ("0::/a/b\n", second("a/b/", "1000\n", 400, 100) | second("a/", "max\n", 5, 5), 700),
        ("0::/a/b\n", second("a/b/", "1000\n", 400, 100) | second("a/", "900\n", 800, 0), 100),
        ("0::/elsewhere/on/the/host\n", second("", "1000\n", 400, 0), 600),  # mounted as a container has it
        ("0::/a\n", second("a/", "1000\n", 1100, 0), 0),  # over its limit, which was lowered
        ("0::/a\n", second("a/", f"{10**15}\n", 0, 0), AVAILABLE),
        (
            "4:memory:/a\n2:cpu,cpuacct:/b\n0::/\n",
            first("a/", "1000", 400, 50) | first("", f"{2**63 - 4096}", 9, 0),
            650,
        ),
        ("4:memory:/elsewhere\n", first("", "1000", 400, 0), 600),
        ("2:cpu:/a\n", first("a/", "1000", 400, 0), AVAILABLE),
    ],
)
def test_the_least_of_host_and_groups_is_left(tmp_path: Path, groups: str, files: Mapping[str, str], left: int) -> None:
    assert unused_memory(system(tmp_path, groups, files)) == left


def test_what_is_not_told_is_nothing(tmp_path: Path) -> None:
    assert unused_memory(tmp_path) == 0
    (system(tmp_path, "0::/\n", {}) / "proc/meminfo").write_text("MemTotal: 2000 kB\n")
    assert unused_memory(tmp_path) == 0


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="Linux tells")
def test_this_host_has_some() -> None:
    assert 0 < unused_memory() < 1 << 50


def test_what_is_above_memory_high_is_not_left(tmp_path: Path) -> None:
    """The kernel throttles a group above it at every allocation (cgroup-v2, memory.high): MemoryHigh= of systemd."""
    files = second("a/", "max\n", 400, 100) | {"a/memory.high": "1000\n"}
    assert unused_memory(system(tmp_path, "0::/a\n", files)) == 700
    files = second("a/", "900\n", 400, 100) | {"a/memory.high": "1000\n"}
    assert unused_memory(system(tmp_path, "0::/a\n", files)) == 600


def test_a_group_with_any_name_is_read(tmp_path: Path) -> None:
    root = system(tmp_path, "0::/\n", {})
    (root / "proc/self/cgroup").write_bytes(b"0::/caf\xe9\n")
    assert unused_memory(root) == AVAILABLE
