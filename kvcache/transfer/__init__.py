"""Memory lent between processes (shared memory, NIXL) beside a gRPC stream, and zero-copy framing on the stream."""
