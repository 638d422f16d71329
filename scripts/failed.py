"""Names what failed in the last run of the tests; ends with an error where that is more than a busy machine explains.

    python -m scripts.failed
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

FAILED = Path(__file__).parents[1] / ".pytest_cache" / "v" / "cache" / "lastfailed"
MOST = 8


def main() -> None:
    names = sorted(json.loads(FAILED.read_text())) if FAILED.exists() else []
    print(f"{len(names)} tests failed:", *names, sep="\n  ", flush=True)
    if not names:
        sys.exit("The run ended without a list of failed tests: it broke off.")
    if len(names) > MOST:
        sys.exit(f"More than {MOST} tests failed: run `make test` again when what they name is mended.")


if __name__ == "__main__":
    main()
