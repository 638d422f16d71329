"""Memory that one process lends another to write to (shared memory, NIXL), and zero-copy protobuf framing."""
