"""Where the container image of a deployment comes from, and how the services in it are reached and left.

One place for what deploy/image/Containerfile and every renderer agree on.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

IMAGE, DEMO_IMAGE = "localhost/millrace:cpu", "localhost/millrace:cpu-demo"
RAY_IMAGE = "localhost/millrace:ray"  # Ray's own image and millrace in it (docs/deploy-ray.md)
CONTAINERFILE = "deploy/image/Containerfile"
API_PORT, GRPC_PORT, STATUS_PORT = 8000, 8100, 9100
CACHE = "/cache"  # the one folder, beside /tmp, that the image's user writes to
DISK, HUB = "/var/lib/millrace", "/var/lib/huggingface"  # of a pool node; of models fetched from the hub
SIGNAL_SECONDS, LAST_SECONDS = 5, 15  # until a signal is heard, and after the drain


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageSource:
    """An image's name, and the checkout it is built from where it is missing (None: it has to be there)."""

    name: str
    context: str | None = None


def grace_seconds(shutdown_timeout: float) -> int:
    """Seconds a container may take to leave: its drain, and a little before and after. Raises ValueError."""
    if not isfinite(shutdown_timeout):
        raise ValueError(f"shutdown_timeout = {shutdown_timeout}: a platform waits for a number of seconds; name it")
    return round(SIGNAL_SECONDS + shutdown_timeout + LAST_SECONDS)
