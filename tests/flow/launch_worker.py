"""`millrace` as a build with another version of the KV protocol: python -m tests.flow.launch_worker VERSION decode …

For rolls between versions, of which this checkout has but one.
"""

from __future__ import annotations

import sys

from serving import messages

if __name__ == "__main__":
    messages.KV_PROTOCOL = int(sys.argv.pop(1))
    from deploy.cli import main  # whatever reads the version is imported from here on

    sys.exit(main())
