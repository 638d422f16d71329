"""How KV reaches a decode worker: in process, over a gRPC stream, or written into its memory by NIXL beside the stream.

A transport moves chunks and reports refusals; it neither makes nor checks digests. Why the stream goes along with
every transport between processes: docs/decisions/0009-kv-lands-in-slots.md
"""

from kvcache.transports.carriers import Landing
from kvcache.transports.dialer import Dialer, landing_for
from kvcache.transports.incoming import Incoming
from kvcache.transports.local import LOCAL, LocalHandoff, Receiver
from kvcache.transports.stream import WINDOW, GrpcHandoff

__all__ = ["LOCAL", "WINDOW", "Dialer", "GrpcHandoff", "Incoming", "Landing", "LocalHandoff", "Receiver", "landing_for"]
