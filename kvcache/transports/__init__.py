"""How KV reaches a decode worker: in process, over a gRPC stream, or written into its memory beside the stream.

A transport moves chunks and reports refusals; it neither makes nor checks digests. Why the stream goes along with
every transport between processes: docs/decisions/0009-kv-lands-in-slots.md
"""

from kvcache.slots.carriers import Landings
from kvcache.slots.choice import landings_for
from kvcache.transports.dialer import Dialer
from kvcache.transports.incoming import Incoming
from kvcache.transports.local import LOCAL, LocalHandoff, Receiver
from kvcache.transports.stream import WINDOW, GrpcHandoff

__all__ = [
    "LOCAL",
    "WINDOW",
    "Dialer",
    "GrpcHandoff",
    "Incoming",
    "Landings",
    "LocalHandoff",
    "Receiver",
    "landings_for",
]
