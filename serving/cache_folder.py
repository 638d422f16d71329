"""Where what is made once for a host is kept: compiled kernels, scales, packed weights, snapshots.

It knows the place, and nothing of what lies there.
"""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """`millrace` in the user's cache folder, `$XDG_CACHE_HOME` or ~/.cache; it need not be there yet."""
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(root) / "millrace"
