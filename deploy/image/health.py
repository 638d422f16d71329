"""Exits with 0 while the service of this container says that it can serve, for the image's health check.

It asks the worker's own door where MILLRACE_METRICS_PORT names one, else the API.
"""

from __future__ import annotations

import os
import ssl
import sys
import urllib.request

SECONDS = 3.0


def main() -> int:
    port = os.environ.get("MILLRACE_METRICS_PORT") or os.environ.get("MILLRACE_PORT") or "8000"
    secure = bool(os.environ.get("MILLRACE_SSL_CERTFILE"))
    context = ssl._create_unverified_context() if secure else None  # noqa: S323 - its own loopback
    url = f"{'https' if secure else 'http'}://127.0.0.1:{port}/health"
    try:
        with urllib.request.urlopen(url, timeout=SECONDS, context=context) as answer:  # noqa: S310
            return 0 if answer.status == 200 else 1
    except OSError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
