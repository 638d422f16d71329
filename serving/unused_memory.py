"""How much memory the host, and the control groups this process is in, have left.

Read from /proc and /sys (Linux). It knows nothing of what the memory is for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_GROUPS = Path("sys/fs/cgroup")
_ACCOUNTS = (  # of a control group: its limits, what it uses, and what of that the kernel can drop at once
    (("memory.max", "memory.high"), "memory.current", "inactive_file"),  # version 2, and below it version 1
    (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"),
)


def unused_memory(root: Path = Path("/")) -> int:
    """Bytes that may be taken before the host swaps or a control group is at its limit; 0 where that is not told.

    Takes some tenths of a millisecond. `root` has the folders `proc` and `sys`.
    """
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB", (root / "proc/meminfo").read_text(), re.MULTILINE)
        groups = (root / "proc/self/cgroup").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return 0
    left = [1024 * int(found[1])] if found is not None else [0]
    for line in groups:
        _, controllers, path = line.split(":", 2)
        for folder in _folders(root / _GROUPS, controllers, path):
            left += _left_in(folder)
    return max(0, min(left))


def _folders(mounted: Path, controllers: str, path: str) -> Iterator[Path]:
    """Those of a group and all above it; within a container what is mounted may begin anywhere on the way."""
    below = path.strip("/")
    if controllers and "memory" not in controllers.split(","):
        return
    top = mounted / controllers if controllers else mounted
    yield from (top / below, *(top / parent for parent in Path(below).parents))


def _left_in(folder: Path) -> list[int]:
    """What each of the group's limits leaves; above memory.high it is slowed down."""
    for limits, used, dropped in _ACCOUNTS:
        with suppress(OSError, ValueError):  # another version's, or no such group here
            stat = re.search(rf"^{dropped} (\d+)$", (folder / "memory.stat").read_text(), re.MULTILINE)
            taken = int((folder / used).read_text()) - (int(stat[1]) if stat is not None else 0)
            return [most - taken for most in map(_limit, (folder / name for name in limits)) if most is not None]
    return []


def _limit(file: Path) -> int | None:
    with suppress(OSError, ValueError):  # none, or "max", which is none
        return int(file.read_text())
    return None
