"""How much memory the host, and the control groups this process is in, have left.

Read from /proc and /sys (Linux). It knows nothing of what the memory is for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_GROUPS = Path("sys/fs/cgroup")
_ACCOUNTS = (  # of a control group: its limit, what it uses, and what of that the kernel can drop at once
    ("memory.max", "memory.current", "inactive_file"),  # version 2, and below it version 1
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def unused_memory(root: Path = Path("/")) -> int:
    """Bytes that may be taken before the host swaps or a control group is at its limit; 0 where that is not told.

    Takes some tenths of a millisecond. `root` has the folders `proc` and `sys`.
    """
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB", (root / "proc/meminfo").read_text(), re.MULTILINE)
        groups = (root / "proc/self/cgroup").read_text().splitlines()
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
    """What the group's limit leaves, if it has one."""
    for limit, used, dropped in _ACCOUNTS:
        with suppress(OSError, ValueError):  # another version's, no such group here, or "max", which is no limit
            stat = re.search(rf"^{dropped} (\d+)$", (folder / "memory.stat").read_text(), re.MULTILINE)
            most, taken = int((folder / limit).read_text()), int((folder / used).read_text())
            return [most - taken + (int(stat[1]) if stat is not None else 0)]
    return []
