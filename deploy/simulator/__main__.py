"""`python -m deploy.simulator`."""

from __future__ import annotations

import sys

from deploy.simulator.command import main

if __name__ == "__main__":
    sys.exit(main())
