"""Messages, model, engine and HTTP API: what every service builds on. Imports no other top-level package."""

import os

__version__ = "0.1.0"

# gRPC's core writes lines of its own to standard error, which no collector of ours could read; what goes wrong there is
# also an error of the call. It looks when it is imported, which is later than this.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
