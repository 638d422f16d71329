"""Memory that one process lends another to write to, and what writes there: shared memory, NIXL.

What the bytes mean, and how the two ends agree whose turn it is, goes over a gRPC stream beside it. No torch.
"""
